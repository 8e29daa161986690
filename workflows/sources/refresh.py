"""Turns the commits that a user made in ``third_party/<name>`` into the patch series of that component."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workflows import errors
from workflows.sources import git, patch, tree
from workflows.sources.lock import Pin
from workflows.sources.manifest import Component
from workflows.sources.patch import Patch
from workflows.sources.workspace import Workspace

_SLUG_LENGTH = 60


def refresh(workspace: Workspace, component: Component, pin: Pin) -> tuple[Pin, tuple[Patch, ...]]:
    """Rewrite ``patches/<name>/`` from the commits since the base; return the new pin and series.

    Patches whose commit did not change keep their file, byte for byte. The tree's branch is moved to the commits that
    the new series gives; its files do not change.
    """
    place = workspace.place(component.name)
    look = tree.observe(place)
    _check(component, look)
    repo, record = git.Repo(place), look.record
    if record is None:
        raise errors.DirtyTreeError(f"third_party/{component.name}: was not made by this tooling; run a sync first")
    if record.version != component.version:
        raise errors.PinError(
            f"third_party/{component.name}: holds {record.version}, not {component.version}; run a sync first"
        )
    series = _series(workspace, component, repo, record.base)
    commit = patch.apply_series(repo, record.base, series)
    patched = repo.object(f"{commit}^{{tree}}")
    if patched != repo.object("HEAD^{tree}"):
        raise errors.PatchError(
            f"third_party/{component.name}: its commits cannot be told as patches; leave out merges"
        )
    _write(workspace, component.name, series)
    repo("update-ref", "-m", "refresh", git.BRANCH, commit)
    repo("symbolic-ref", "HEAD", git.BRANCH)
    repo("read-tree", "--reset", commit)
    repo("update-index", "-q", "--refresh", check=False)
    tree.write_record(place, replace(record, commit=commit, series=patch.digest(series)))
    files = tuple((each.file, each.sha256) for each in series)
    return replace(pin, patches=files, patched_commit=commit, patched_tree=patched), series


def _check(component: Component, look: tree.Observed) -> None:
    where = f"third_party/{component.name}"
    if look.state == "missing":
        raise errors.UsageError(f"{where}: is not there; run `python -m workflows sync` first")
    if look.state in ("unknown", "link"):
        raise errors.DirtyTreeError(
            f"{where}: was not made by this tooling; run `python -m workflows sync --stash` first"
        )
    if look.state == "dirty":
        raise errors.DirtyTreeError(
            f"{where}: {look.changed[0]} is not committed; commit your changes there, then refresh"
        )
    if look.record is not None and look.record.override is not None:
        raise errors.UsageError(f"{where}: comes from --override {look.record.override}; sync without it first")


def _series(workspace: Workspace, component: Component, repo: git.Repo, base: str) -> tuple[Patch, ...]:
    """Return one patch a commit since the base, in order."""
    if repo("merge-base", "--is-ancestor", base, "HEAD", check=False).returncode:
        raise errors.PatchError(
            f"third_party/{component.name}: its commits do not stand on {base[:12]}; rebase them onto it"
        )
    commits = repo("rev-list", "--reverse", f"{base}..HEAD").text.split()
    if repo("rev-list", "--merges", f"{base}..HEAD").text:
        raise errors.PatchError(
            f"third_party/{component.name}: holds a merge, which is no patch; rebase it into commits"
        )
    known = {each.message: each for each in patch.load_series(workspace.root, component.name)}
    series: list[Patch] = []
    for commit in commits:
        message = repo("show", "--no-patch", "--format=%B", commit).text.strip() + "\n"
        before = known.get(message)
        after = _as_patch(repo, component.name, commit, message, before, {each.file for each in series})
        series.append(before if before is not None and _same(repo, commit, before) else after)
    return tuple(series)


def _same(repo: git.Repo, commit: str, before: Patch) -> bool:
    """Say whether an existing patch still gives what a commit holds."""
    index = {"GIT_INDEX_FILE": str(repo.root / ".git" / "refresh.index")}
    repo("read-tree", f"{commit}^", env=index)
    applied = repo("apply", "--cached", "--whitespace=nowarn", "-", stdin=before.data, check=False, env=index)
    same = applied.returncode == 0 and repo("write-tree", env=index).text == repo.object(f"{commit}^{{tree}}")
    (repo.root / ".git" / "refresh.index").unlink(missing_ok=True)
    return same


def _as_patch(repo: git.Repo, name: str, commit: str, message: str, before: Patch | None, taken: set[str]) -> Patch:
    options = ("-p", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-renames", "--root")
    content = repo("diff-tree", *options, "--no-commit-id", commit).stdout
    subject, _, body = message.partition("\n")
    head = f"Subject: {subject}\n\n" + (f"{body.strip()}\n" if body.strip() else "") + "---\n"
    file = before.file if before is not None and before.file not in taken else _file_name(subject, taken)
    return Patch(name, file, head.encode() + content)


def _file_name(subject: str, taken: set[str]) -> str:
    slug = re.sub(r"[^a-z0-9.]+", "-", subject.lower()).strip("-.")[:_SLUG_LENGTH].strip("-.") or "change"
    names = (f"{slug}{suffix}.patch" for suffix in ("", *(f"-{number}" for number in range(2, 10_000))))
    return next(name for name in names if name not in taken)


def _write(workspace: Workspace, name: str, series: Sequence[Patch]) -> None:
    """Replace the folder of a series by a new one; a kill leaves the old or the new, or the old beside its place."""
    folder = workspace.root / "patches" / name
    fresh, old = folder.with_name(f".{name}.new"), folder.with_name(f".{name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    for each in series:
        (fresh / each.file).write_bytes(each.data)
    (fresh / patch.SERIES).write_text("".join(f"{each.file}\n" for each in series), encoding="utf-8")
    for other in folder.glob("*") if folder.is_dir() else ():
        if other.name != patch.SERIES and other.suffix != ".patch":
            _copy(other, fresh / other.name)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
        os.chmod(target, source.lstat().st_mode & 0o777, follow_symlinks=False) if not source.is_symlink() else None
