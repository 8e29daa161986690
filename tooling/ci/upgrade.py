"""Moves every pin to the newest release that its source offers, as far as patches and validation let it."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tooling.ci import relock
from tooling.core import console, errors, proc
from tooling.image import bump, digests
from tooling.sources import git, lock, manifest, pins
from tooling.sources.lock import Move
from tooling.sources.manifest import Component
from tooling.sources.workspace import Workspace

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
_XLA = ("third_party/xla/revision.bzl", re.compile(r"^XLA_COMMIT = \"([0-9a-f]{40})\"", re.MULTILINE))
_BAZEL = (".bazelversion", re.compile(r"^(\d+\.\d+\.\d+)\s*$"))


def newest(component: Component, mirror: str | None) -> str:
    """Return the highest version among an upstream's release tags; pre-releases do not count."""
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


def upgrade(here: Workspace, mirror: str | None, reporter: console.Reporter) -> list[Move]:
    """Move every pin that can move. Another stays as it was, and its move says why."""
    moves = []
    for component in manifest.load(here.manifest).components:
        if component.tag:
            moves.append(_move(here, component, partial(newest, component, mirror), mirror, reporter))
            if component.name == "jax" and not moves[-1].fault and moves[-1].new != moves[-1].old:
                xla = manifest.load(here.manifest)["xla"]
                find = partial(_named_by_jax, here, mirror, *_XLA)
                moves += [_move(here, xla, find, mirror, reporter), _bazel(here, mirror)]
    moves += relock.move(here.root)
    moves += bump.bump(here.root)
    return [move for move in moves if move.fault or move.new != move.old]


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
    jax, pin = manifest.load(here.manifest)["jax"], lock.load(here.lock)["jax"]
    with tempfile.TemporaryDirectory() as folder:
        repo = git.init(Path(folder, "jax"))
        git.fetch(repo, jax.address(mirror), str(pin.commit), label="jax")
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


def load(folder: Path) -> list[Move]:
    """Read the moves of another job: names and versions, which are data, whoever wrote them."""
    path = folder / MOVES
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return [Move(**{key: str(value) for key, value in each.items()}) for each in told]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise errors.UsageError(f"{path}: cannot be read ({error}); run `ci upgrade {folder}` again") from error
