"""The files that a build reads, as trees of git: no file is in an image that its labels do not count.

A tree holds all that git tracks, or would add where a build looks, as it is now; those of ``third_party/`` lie beside.
A build reads a copy, so that a file which is saved later changes nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors, proc
from tooling.sources import manifest

IGNORE = "docker/Dockerfile.dockerignore"


class Snapshot(NamedTuple):
    """The commits of this repository and of MaxText, marked where files differ, and those files: no commit holds them.

    A file that differs in another component marks this repository.
    """

    revision: str
    maxtext: str
    changed: tuple[str, ...] = ()


def take_snapshot(root: Path, folder: Path, names: Sequence[str]) -> Snapshot:
    """Copy a clone with these components to ``folder / "context"``, and say what that is.

    ``SourceError``: a component is missing, has no history, or is at another commit than its pin.
    """
    context = folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    # Data that lies beside the files of a build is not read.
    lines = (root / IGNORE).read_text(encoding="utf-8").split() if (root / IGNORE).is_file() else ["!."]
    read = [line[1:] for line in lines if line.startswith("!") and line != "!third_party"]
    commit, changed = _copy(root, context, [name for name in read if (root / name).exists()])
    dirty, maxtext = bool(changed), ""
    for name in names:
        pin, files = _copy_component(root, context, name)
        changed += [f"third_party/{name}/{file}" for file in files]
        if name == "maxtext":
            maxtext = f"{pin}-dirty" if files else pin
        else:
            dirty = dirty or bool(files)
    return Snapshot(f"{commit}-dirty" if dirty else commit, maxtext, tuple(changed))


def _copy_component(root: Path, context: Path, name: str) -> tuple[str, list[str]]:
    place = root / "third_party" / name
    remedy = f"run ./bootstrap.sh --group {'image' if name == 'maxtext' else 'source'}"
    if not place.is_dir():
        raise errors.NotThereError(f"third_party/{name} is not there; {remedy}")
    commit, changed = _copy(place, context / "third_party" / name, ["."])
    component, pins = manifest.load(root / "sources.yaml")[name], manifest.load_lock(root / "sources.lock")
    ref = manifest.make_recipe(root, component, pins).ref
    if proc.run(["git", "-C", place, "rev-parse", "--verify", ref], check=False).text != commit:
        raise errors.SourceError(f"third_party/{name} is at {commit[:12]}, which is not its pin; {remedy}")
    return commit, changed


def _copy(place: Path, target: Path, paths: Sequence[str]) -> tuple[str, list[str]]:
    """Copy the files of a clone as they are now; return its commit, and the files that differ from it.

    New files count below ``paths`` alone, and ignored ones nowhere. A file that git was told not to look at has the
    content that was committed.
    """
    target.mkdir(parents=True, exist_ok=True)
    head = proc.run(["git", "-C", place, "rev-parse", "--show-toplevel", "HEAD"], check=False)
    top, _, commit = head.text.partition("\n")
    if head.returncode or Path(top).resolve() != place.resolve():
        raise errors.SourceError(f"{place} has no history of git, so nobody knows its commit; clone it")

    def git(*args: str, env: dict[str, str] | None = None) -> list[str]:
        argv: list[str | Path] = ["git", "-C", place, "-c", "core.autocrlf=false", "--literal-pathspecs", *args]
        return os.fsdecode(proc.run(argv, env=env).stdout).split("\0")[:-1]

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".git-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}  # of the copy: the clone's stays as it is
        git(f"--work-tree={target}", "read-tree", "--reset", "-u", commit, env=os.environ | index)
    tracked = ("diff", "--no-ext-diff", "--no-renames", "--ignore-submodules", "--name-only", "-z", commit)
    new = git("ls-files", "--others", "--exclude-standard", "-z", "--", *paths)
    changed = sorted({*git(*tracked), *(name for name in new if not name.endswith("/"))})  # a folder is a clone
    for name in changed:  # a folder before what lies in it: one that became a link is not followed
        if (target / name).is_dir() and not (target / name).is_symlink():
            shutil.rmtree(target / name)
        (target / name).unlink(missing_ok=True)
    for name in {*changed}.difference(git(*tracked, "--diff-filter=D")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(place / name, target / name, follow_symlinks=False)
    return commit, changed
