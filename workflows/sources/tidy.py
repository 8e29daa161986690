"""Finds and removes what nothing in ``third_party/`` needs any more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from workflows.sources import git, manifest, tree
from workflows.sources.workspace import Workspace


def collect(workspace: Workspace, *, stashes: bool, dry_run: bool) -> Iterator[tuple[Path, int]]:
    """Remove, and yield with their size in bytes, the things that nothing needs.

    These are stages of killed runs; clean trees of components that the manifest no longer names; objects that no commit
    reaches; and, if asked for, stashes. A tree that is dirty, or not ours, always stays.
    """
    wanted = {component.name for component in manifest.load(workspace.manifest).components}
    doomed = sorted(workspace.stages.glob("run-*"))
    if stashes:
        doomed += sorted(workspace.stashes.glob("*"))
    for place in sorted(workspace.third_party.iterdir()):
        if place.name not in wanted and not place.name.startswith(".") and tree.observe(place).state == "clean":
            doomed.append(place)
    for path in doomed:
        size = size_of(path)
        if not dry_run:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield path, size
    if not dry_run:
        for name in sorted(wanted):
            yield from _compact(workspace.place(name))


def _compact(place: Path) -> Iterator[tuple[Path, int]]:
    if tree.observe(place).state != "clean":
        return
    objects = place / ".git" / "objects"
    before = size_of(objects)
    git.Repo(place)("gc", "--quiet", "--prune=now")
    if (saved := before - size_of(objects)) > 0:
        yield objects, saved


def size_of(path: Path) -> int:
    """Return the bytes of the files under a path, links not followed."""
    if path.is_symlink() or path.is_file():
        return path.lstat().st_size
    return sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(path) for name in names)
