"""Fetching four pinned repositories: this tooling, git submodules and west against one server on this machine.

``tests/benchmarks/sources.py [--scale S] [--json]``. The repositories are made here, the same on every machine:
as many files and folders as jax, xla, MaxText and MultiMesh have at scale 1, and a history behind and ahead of the pin.
Bytes are counted by the server and compared with the pack of the pinned trees, which is the least that any method can
fetch. CPU time is that of the command and all that it started, without the server.

With nothing to do, the same commands are compared, in turns. `tooling sync` looks at every file; git and west only at
commits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from git_server import GitServer

ROOT = Path(__file__).resolve().parents[2]
AGAIN_RUNS = 11
JOBS = 4
COMMITS = 12
AHEAD = 3  # commits that the branch has moved on since the pin
WORDS = [
    f"{a}{b}{c}" for a in ("re", "un", "pre", "sub", "co") for b in ("shard", "mesh", "stage", "lower") for c in "_snde"
]


@dataclass(frozen=True)
class Shape:
    """A repository's size at scale 1: files, their mean length in bytes, and how many lie in one folder."""

    name: str
    files: int
    mean_bytes: int
    per_folder: int


@dataclass(frozen=True)
class Repository:
    """A repository on the server, its pin, and the bytes of a pack of just the pinned tree."""

    name: str
    bare: Path
    commit: str
    tree: str
    pack_bytes: int


@dataclass(frozen=True)
class Fetch:
    """One method from nothing: MB and multiples of the least, seconds of wall and CPU time."""

    method: str
    megabytes: float
    of_least: float
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Again:
    """One command with nothing to do: medians of wall and CPU seconds."""

    command: str
    wall_s: float
    cpu_s: float


SHAPES = (
    Shape("jax", 1900, 12_000, 12),
    Shape("xla", 9000, 9_000, 10),
    Shape("maxtext", 1400, 9_000, 10),
    Shape("multimesh", 150, 6_000, 8),
)


def environment(home: Path) -> dict[str, str]:
    """Return the same plain environment for every method."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
    identity = {f"GIT_{role}_{field}": "bench" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    return kept | identity | {"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}


def git(cwd: Path, *args: str, stdin: bytes | None = None) -> bytes:
    """Run git for the setting up, which is not measured."""
    command = ["git", "-c", "init.defaultBranch=main", *args]
    return subprocess.run(command, cwd=cwd, input=stdin, check=True, capture_output=True, env=environment(cwd)).stdout


def text_of(seed: str, length: int) -> bytes:
    """Return about ``length`` bytes that compress as source code does."""
    rng = random.Random(seed)
    words: list[str] = []
    size = 0
    while size < length:
        word = rng.choice(WORDS) if rng.random() < 0.8 else f"{rng.getrandbits(40):x}"
        words.append(word + ("\n" if rng.random() < 0.12 else " "))
        size += len(words[-1])
    return "".join(words).encode()


def make_repository(shape: Shape, scale: float, served: Path) -> Repository:
    """Write a repository with a history; the pin is ``AHEAD`` commits behind its branch."""
    bare = served / f"{shape.name}.git"
    bare.mkdir()
    git(bare, "init", "-q", "--bare")
    count = max(4, round(shape.files * scale))
    stream: list[bytes] = []
    for commit in range(COMMITS):
        stream.append(b"commit refs/heads/main\ncommitter b <b> %d +0000\ndata 1\n.\n" % (1_700_000_000 + commit))
        changed = (
            range(count) if commit == 0 else random.Random(f"{shape.name} {commit}").sample(range(count), count // 10)
        )
        for number in changed:
            length = random.Random(f"{shape.name} {number}").randrange(200, 2 * shape.mean_bytes)
            data = text_of(f"{shape.name} {number}", length) + text_of(f"{commit}", 100) * bool(commit)
            path = f"d{number // shape.per_folder // 20}/e{number // shape.per_folder}/f{number}.py"
            stream.append(b"M 100644 inline %s\ndata %d\n%s\n" % (path.encode(), len(data), data))
    git(bare, "fast-import", "--quiet", "--done", stdin=b"".join(stream) + b"done\n")
    git(bare, "repack", "-adq")
    git(bare, "symbolic-ref", "HEAD", "refs/heads/main")
    commit_id = git(bare, "rev-parse", f"main~{AHEAD}").decode().strip()
    listed = git(bare, "rev-list", "--objects", "--no-walk", commit_id)
    names = b"".join(line.split()[0] + b"\n" for line in listed.splitlines())
    pack = git(bare, "pack-objects", "-q", "--stdout", "--delta-base-offset", stdin=names)
    tree = git(bare, "rev-parse", f"{commit_id}^{{tree}}").decode().strip()
    return Repository(shape.name, bare, commit_id, tree, len(pack))


def timed(command: Sequence[str], cwd: Path, env: dict[str, str]) -> tuple[float, float]:
    """Run a command to success; return its wall and CPU seconds, those of its descendants included."""
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        process = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"error: {' '.join(command)} failed:\n{output.read().decode(errors='replace')[-2000:]}")
    return wall, usage.ru_utime + usage.ru_stime


def prepare_ours(folder: Path, repositories: Sequence[Repository], url: str) -> list[str]:
    """Write a clone of this repository that wants these components; return the command that fetches them."""
    shutil.copytree(ROOT / "tooling", folder / "tooling")
    (folder / "third_party").mkdir()
    manifest, lock = {}, {}
    for each in repositories:
        entry = {"url": f"{url}/{each.name}.git", "version": "1", "groups": ["run"]}
        manifest[each.name] = entry
        pins = {"commit": each.commit, "tree": each.tree, "patched_commit": each.commit, "patched_tree": each.tree}
        lock[each.name] = {"version": "1", "archives": {}, "patches": {}, **pins}
    for name, components in (("sources.yaml", manifest), ("sources.lock", lock)):
        (folder / name).write_text(json.dumps({"format": 1, "components": components}))
    return [sys.executable, "-m", "tooling", "sync"]  # four at a time unless told otherwise


def prepare_submodules(folder: Path, repositories: Sequence[Repository], url: str) -> list[str]:
    """Write a repository with the pins as submodules."""
    git(folder, "init", "-q")
    for each in repositories:
        git(folder, "update-index", "--add", "--cacheinfo", f"160000,{each.commit},{each.name}")
        for key, value in (("path", each.name), ("url", f"{url}/{each.name}.git")):
            git(folder, "config", "-f", ".gitmodules", f"submodule.{each.name}.{key}", value)
    git(folder, "add", ".gitmodules")
    git(folder, "commit", "-q", "-m", "pins")
    return ["git", "submodule", "update", "--init", "--depth", "1", "--jobs", str(JOBS)]


def prepare_west(folder: Path, repositories: Sequence[Repository], url: str) -> list[str]:
    """Write a west workspace with the pins."""
    projects = [{"name": each.name, "revision": each.commit, "url": f"{url}/{each.name}.git"} for each in repositories]
    (folder / "manifest").mkdir()
    (folder / "manifest" / "west.yml").write_text(json.dumps({"manifest": {"projects": projects}}))
    west = str(Path(sys.executable).with_name("west"))
    subprocess.run(
        [west, "init", "-l", "manifest"], cwd=folder, env=environment(folder), check=True, capture_output=True
    )
    return [west, "update", "--narrow", "-o=--depth=1"]


METHODS: dict[str, Callable[[Path, Sequence[Repository], str], list[str]]] = {
    "tooling sync": prepare_ours,
    "git submodule --depth 1 --jobs 4": prepare_submodules,
    "west --narrow --depth=1": prepare_west,
}


def fetch(method: str, work: Path, repositories: Sequence[Repository], server: GitServer) -> tuple[Fetch, list[str]]:
    """Fetch with one method from nothing; return the figures and the command."""
    work.mkdir()
    command = METHODS[method](work, repositories, server.url)
    before = server.sent
    wall, cpu = timed(command, work, environment(work))
    fetched = server.sent - before
    least = sum(each.pack_bytes for each in repositories)
    return Fetch(method, fetched / 1e6, fetched / least, wall, cpu), command


def again(commands: dict[str, tuple[list[str], Path]]) -> list[Again]:
    """Run all commands in turns, so that all share what else the machine does; the first turn is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(1 + AGAIN_RUNS):
        for name, (command, work) in commands.items():
            seconds[name].append(timed(command, work, environment(work)))
    return [
        Again(name, statistics.median(wall for wall, _ in each[1:]), statistics.median(cpu for _, cpu in each[1:]))
        for name, each in seconds.items()
    ]


def run(scale: float, folder: Path) -> tuple[float, list[Fetch], list[Again]]:
    """Measure all methods; return the least MB that any could fetch, and the figures."""
    served = folder / "served"
    served.mkdir()
    repositories = [make_repository(shape, scale, served) for shape in SHAPES]
    fetches, commands = [], {}
    with GitServer(served) as server:
        for method in METHODS:
            work = folder / method.split()[0]
            result, command = fetch(method, work, repositories, server)
            fetches.append(result)
            commands[method] = (command, work)
        return (
            sum(each.pack_bytes for each in repositories) / 1e6,
            fetches,
            again(commands),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--scale", type=float, default=0.05, help="size of the repositories; 1 is that of the real ones"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if not 0 < args.scale <= 10:
        parser.error(f"--scale {args.scale}: must be above 0 and at most 10")
    with tempfile.TemporaryDirectory(prefix="bench-sources-") as folder:
        least, fetches, agains = run(args.scale, Path(folder).resolve())
    if args.json:
        figures = {"fetch": [asdict(each) for each in fetches], "again": [asdict(each) for each in agains]}
        print(json.dumps({"scale": args.scale, "least_megabytes": least, **figures}, indent=1))
        return 0
    print(f"four repositories at scale {args.scale}; least that can be fetched: {least:.2f} MB")
    print(f"{'from nothing':34}{'MB':>8}{'x least':>9}{'wall s':>8}{'CPU s':>8}")
    for each in fetches:
        print(f"{each.method:34}{each.megabytes:8.2f}{each.of_least:9.3f}{each.wall_s:8.2f}{each.cpu_s:8.2f}")
    print(f"\n{'with nothing to do':34}{'wall ms':>8}{'CPU ms':>9}")
    for one in agains:
        print(f"{one.command:34}{one.wall_s * 1e3:8.1f}{one.cpu_s * 1e3:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
