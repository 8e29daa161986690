"""Moves pins: a component's, those of images, or every one to the newest release that its source offers.

A pin that cannot move, for its patches or because nobody answers, stays as it was, and its ``Move`` says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tooling.ci import relock
from tooling.ci.relock import Move
from tooling.core import console, errors, files, proc
from tooling.core.console import Subparsers, command
from tooling.image import digests, engine, reference, tags
from tooling.sources import git, manifest, pins
from tooling.sources.manifest import Component
from tooling.sources.workspace import ROOT, Workspace

TITLE = "Move pins to the newest releases"
MOVES, VERDICT, TEXT = "moves.json", "verdict.json", "pull.md"
# The image to build where a pin moved: accelerator and stage.
_BUILDS = {
    relock.NEWEST: ("cuda12", "runtime"),
    "cuda-base": ("cuda12", "runtime"),
    "cuda-devel": ("cuda12", "dev"),
    "ubuntu": ("cpu", "runtime"),
}
_SAID_LINES = 25
_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")
_XLA = ("third_party/xla/revision.bzl", re.compile(r"^XLA_COMMIT = \"([0-9a-f]{40})\"", re.MULTILINE))
_BAZEL = (".bazelversion", re.compile(r"^(\d+\.\d+\.\d+)\s*$"))


def register(subparsers: Subparsers) -> None:
    """Add ``bump``."""
    text = "move a component to another version, with its patches; or fill images.lock"
    examples = ["python -m tooling bump maxtext 0.2.5", "python -m tooling bump images"]
    parser = command(subparsers, "bump", run, text, examples)
    parser.add_argument("name", metavar="NAME", help="component, or `images` for the base images")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="its new version; a commit where it has no tags")
    parser.add_argument("--mirror", metavar="URL", help="ask URL/ instead of the upstream")


def add_steps(parts: Subparsers, mirror: str | None) -> None:
    """Add the steps of the workflow ``bump``; ``mirror`` is what they ask where they are not told."""
    text = "move every pin to the newest release, and write down which moved; nothing of what moved is run"
    upgraded = command(parts, "upgrade", run_upgrade, text)
    text = "move the same pins again, train on them, build images on moved bases; write the verdict"
    validated = command(parts, "validate", run_validate, text)
    text = "of the build of an image on a new base image"
    validated.add_argument("--network", choices=("default", "host"), help=text)
    text = "move the same pins again, and write the text of their pull request to pull.md"
    proposed = command(parts, "propose", run_propose, text)
    for part in (upgraded, validated, proposed):
        part.add_argument("folder", type=Path, help="where each step finds what those before it wrote")
        text = "ask URL/NAME.git (default: MULTIMESH_MIRROR)"
        part.add_argument("--mirror", metavar="URL", default=mirror, help=text)


def run(args: argparse.Namespace) -> int:
    """Pin another version, if its patches apply there; or ask for all images, and fail if anything did not answer."""
    here = Workspace()
    if args.name == "images":
        if args.version or args.mirror:
            raise errors.UsageError("bump images: takes no version and no --mirror; it asks where images.lock points")
        moves = images(here.root)
        print(console.table(("pin", "before", "now"), [(each.name, each.old, each.new) for each in moves]))
        if silent := [f"{each.name}: {each.fault}" for each in moves if each.fault]:
            raise errors.SeveralErrors(silent, errors.NetworkError.exit_code)
        return 0
    if args.version is None:
        raise errors.UsageError(f"bump {args.name}: to which version? Give it after the name")
    with here.exclusive(), console.Reporter() as reporter:
        pin = pins.bump(here, args.name, args.version, args.mirror, reporter)
    print(f"{args.name}: {args.version} is {pin.commit}; run `python -m tooling sync` to bring it in")
    for missing in pin.missing:
        print(f"{args.name}: sources.lock has no {missing}")
    return 0


def run_upgrade(args: argparse.Namespace) -> None:
    """Print the table of the moves."""
    moves = upgrade(args.mirror)
    args.folder.mkdir(parents=True, exist_ok=True)
    files.write_json(args.folder / MOVES, [move._asdict() for move in moves])
    print("\n".join(move.line for move in moves) or "every pin is the newest release")


def run_validate(args: argparse.Namespace) -> None:
    """Exit 0 also where the validation failed: the pull request says so."""
    moves, verdict = again(args.folder, args.mirror), {}
    if any(not move.fault for move in moves):
        verdict = dict(zip(("passed", "said"), validate(ROOT, checks(moves, args.network)), strict=True))
    files.write_json(args.folder / VERDICT, verdict)
    print(verdict.get("said") or "nothing moved")


def run_propose(args: argparse.Namespace) -> None:
    """Print the title of the pull request, or nothing where there is nothing to propose."""
    verdict = files.read_object(args.folder / VERDICT)
    moves = again(args.folder, args.mirror)
    if any(not move.fault for move in moves):
        files.write(args.folder / TEXT, report(moves, verdict))
        print(TITLE)


def upgrade(mirror: str | None) -> list[Move]:
    """Move every pin of this clone that can move."""
    here, moves = Workspace(), list[Move]()
    with here.exclusive(), console.Reporter() as reporter:
        for component in manifest.load(here.manifest).components:
            if component.tag:
                moves.append(_move(here, component, partial(newest, component, mirror), mirror, reporter))
                if component.name == "jax" and not moves[-1].fault and moves[-1].new != moves[-1].old:
                    xla = manifest.load(here.manifest).named("xla")
                    find = partial(_named_by_jax, here, mirror, *_XLA)
                    moves += [_move(here, xla, find, mirror, reporter), _bazel(here, mirror)]
        moves += relock.move(here.root)
        moves += images(here.root)
    return [move for move in moves if move.fault or move.new != move.old]


def again(folder: Path, mirror: str | None) -> list[Move]:
    """Move the pins that ``upgrade`` moved, from their own sources: nothing but names and versions is taken over.

    Those are data, whoever wrote them. ``IntegrityError`` where other pins move now.
    """
    path = folder / MOVES
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        wanted = [Move(**{key: str(value) for key, value in each.items()}) for each in told]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise errors.UsageError(f"{path}: cannot be read ({error}); run `ci upgrade {folder}` again") from error
    moves = upgrade(mirror)
    if [(each.name, each.new) for each in moves] != [(each.name, each.new) for each in wanted]:
        raise errors.IntegrityError(f"{folder}: other pins move now than when it was written; start over")
    return moves


def images(root: Path) -> list[Move]:
    """Ask for every pin of ``images.lock`` that has a source to ask, all at once.

    The devcontainer that is built from it changes together with it.
    A standalone Python's checksum comes from a table that a person reads, so it is not asked for.
    """
    held = digests.load(root)
    downloads = {name: file for name, file in held.files.items() if name.startswith("bazel ")}
    moves: list[Move] = proc.together(
        *(partial(_asked, name, pin.digest, partial(_digest, pin.reference)) for name, pin in held.images.items()),
        *(partial(_asked, k, file.sha256, partial(_published, f"{file.url}.sha256")) for k, file in downloads.items()),
    )
    new = {move.name: move.new for move in moves if not move.fault}
    others = {name: file._replace(sha256=new[name], read_in="") for name, file in downloads.items() if name in new}
    pulled = {name: pin._replace(digest=new[name], read_in="") for name, pin in held.images.items() if name in new}
    moved = digests.ImageLock(held.images | pulled, held.files | others)
    digests.save(root, moved)
    digests.follow(root, moved)
    return moves


def _asked(name: str, old: str | None, find: Callable[[], str]) -> Move:
    try:
        return Move(name, old or "null", find())
    except errors.ToolingError as error:
        return Move(name, old or "null", old or "null", str(error))


def _digest(image: str) -> str:
    """Return the digest that a registry gives for a reference; for all platforms where it has several."""
    repository, _, tag = image.rpartition(":")
    try:
        return tags.get(engine.detect(), str(reference.make(repository, None, tag)), sleep=lambda _: None).digest
    except errors.ToolingError as error:
        raise errors.NetworkError(f"{image}: its registry does not answer ({error})") from error


def _published(url: str) -> str:
    """Return the checksum that a project publishes beside a file."""
    import requests

    try:
        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise errors.NetworkError(f"{url}: cannot be fetched ({type(error).__name__})") from error
    if found := _SHA256.search(answer.text[:1000]):
        return found.group()
    raise errors.NetworkError(f"{url}: holds no sha256")


def newest(component: Component, mirror: str | None) -> str:
    """Return the highest version among an upstream's release tags; pre-releases do not count."""
    from packaging.version import InvalidVersion, Version

    prefix, _, suffix = component.tag.partition(component.version)
    url, found = component.address(mirror), []
    for ref in git.ask(url, f"refs/tags/{prefix}*", label=component.name):
        name = ref.removeprefix(f"refs/tags/{prefix}").removesuffix("^{}").removesuffix(suffix)
        with contextlib.suppress(InvalidVersion):
            if not Version(name).is_prerelease:
                found.append((Version(name), name))
    if not found:
        raise errors.MissingCommitError(f"{component.name}: {url} has no release tag {prefix}*")
    return max(found)[1]


def _move(
    here: Workspace, component: Component, find: Callable[[], str], mirror: str | None, reporter: console.Reporter
) -> Move:
    new = component.version
    try:
        new = find()
        if new != component.version:
            pins.bump(here, component.name, new, mirror, reporter)
        return Move(component.name, component.version, new)
    except errors.ToolingError as error:
        return Move(component.name, component.version, new, str(error))


def _named_by_jax(here: Workspace, mirror: str | None, path: str, pattern: re.Pattern[str]) -> str:
    """Return the name that a pattern finds in a file of the pinned jax."""
    jax, pin = manifest.load(here.manifest).named("jax"), manifest.load_lock(here.lock)["jax"]
    with tempfile.TemporaryDirectory() as folder:
        repo = git.init(Path(folder, "jax"))
        git.fetch(repo, jax.address(mirror), str(pin.commit), label="jax", on_progress=lambda done, total: None)
        text = repo("show", f"{pin.commit}:{path}", check=False)
    match = pattern.search(text.text)
    if match is None:
        raise errors.MissingCommitError(f"jax's {path} does not name it; move it by hand")
    return match[1]


def _bazel(here: Workspace, mirror: str | None) -> Move:
    """Name the Bazel of the pinned jax; who asks for the images asks for its checksum too."""
    try:
        version = _named_by_jax(here, mirror, *_BAZEL)
    except errors.ToolingError as error:
        return Move("bazel", "", "", str(error))
    return Move("bazel", digests.move_bazel(here.root, version), version)


def checks(moves: Sequence[Move], network: str | None) -> list[list[str]]:
    """Return the commands that try moved pins: the CPU job, the oldest JAX, the images that hold them."""
    moved = {move.name for move in moves if not move.fault}
    built = sorted({_BUILDS[name] for name in moved & _BUILDS.keys()})
    options = ["--tag", "bump", "--validate", "small", *(["--network", network] if network else [])]
    return [
        ["./bootstrap.sh", "--group", "run"],
        ["maxtext/validate-cpu.sh"],
        *([[".ci/run", "oldest-jax"]] if relock.EARLIER in moved else []),
        *(["docker/build.py", "--accelerator", each, "--stage", stage, *options] for each, stage in built),
    ]


def validate(root: Path, commands: Sequence[Sequence[str]]) -> tuple[bool, str]:
    """Run commands until one fails; return whether all passed, and the end of the output of each."""
    said = ""
    for argv in commands:
        done = proc.run(argv, cwd=root, check=False)
        lines = [*done.text.splitlines(), *([done.complaint] if done.returncode else [])]
        said += "\n".join([f"$ {' '.join(argv)}", *lines[-_SAID_LINES:], ""])
        if done.returncode:
            return False, said
    return True, said


def report(moves: Sequence[Move], verdict: Mapping[str, Any]) -> str:
    """Return the text of the pull request; ``verdict`` holds ``passed`` and ``said``, or nothing where nothing ran."""
    rows = "\n".join(move.line for move in moves)
    table = f"| pin | from | to | outcome |\n|---|---|---|---|\n{rows}\n"
    if not verdict:
        return f"{table}\nNo pin moved, so nothing was validated.\n"
    fenced = str(verdict["said"]).replace("```", "'''")
    outcome = "passed" if verdict["passed"] else "**failed**"
    return f"{table}\nThe validation {outcome} on the new pins:\n\n```text\n{fenced}```\n"
