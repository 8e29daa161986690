"""Builds one component in a stage folder: its upstream tree, its patches, its checked-out files."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors
from tooling.sources import git, patch, wheel
from tooling.sources.manifest import Component, Pin, Wheel
from tooling.sources.patch import Patch
from tooling.sources.workspace import Record, Workspace, observe

_ATTEMPTS = 3
# Files that running the sources leaves beside them. Without this every tree would be dirty after its first use.
_EXCLUDE = "__pycache__/\n*.pyc\n*.egg-info/\n"


class Recipe(NamedTuple):
    """All that decides the bytes of one component.

    ``override`` is the ``URL@SHA`` that replaces the locked source; then only the commit is pinned.
    """

    component: Component
    pin: Pin
    patches: tuple[Patch, ...]
    override: str | None = None


class Means(NamedTuple):
    """Where components are built, and how: from stores on this disk, then from the network unless ``offline``."""

    stage: Path
    reporter: console.Reporter
    seeds: Sequence[Path] = ()
    offline: bool = False
    mirror: str | None = None

    def seeded(self, workspace: Workspace, name: str) -> Means:
        """Use the tree of a component that is here: it may hold the objects of the next."""
        place = workspace.place(name)
        return self._replace(seeds=[place] if (place / ".git" / "objects").is_dir() and not place.is_symlink() else [])


def build(recipe: Recipe, means: Means, *, verify: bool = True) -> Record:
    """Make the component in ``stage / <name>``, ready to be moved into place; nothing outside of the stage changes.

    With ``verify`` the patched commit and tree must be those of the lock (where it pins them).
    """
    component, pin, reporter = recipe.component, recipe.pin, means.reporter
    name = component.name
    repo = git.init(means.stage / name)
    (repo.root / ".git" / "info" / "exclude").write_text(_EXCLUDE, encoding="utf-8")
    _seed(repo, means.seeds)
    source = "disk" if _on_disk(repo, component, pin) else _obtain(repo, component, pin, means)
    base = _commit_of(repo, component, pin)
    repo("update-ref", git.BASE, base)
    if recipe.patches:
        reporter.phase(name, f"applying {len(recipe.patches)} patches")
    commit = patch.apply_series(repo, base, recipe.patches)
    patched = repo.object(f"{commit}^{{tree}}") or ""
    if verify and recipe.override is None:
        meant = f"run `python -m tooling lock {name}` if you changed the patches"
        _expect(f"{name}: patched commit", pin.patched_commit, commit, meant)
        _expect(f"{name}: patched tree", pin.patched_tree, patched, meant)
    reporter.phase(name, "checking out")
    repo("update-ref", git.BRANCH, commit)
    repo("symbolic-ref", "HEAD", git.BRANCH)
    (repo.root / ".git" / "index").unlink(missing_ok=True)
    repo("checkout", "--quiet", "--force", "patched", "--")
    record = Record(component.version, base, commit, source, recipe.override, patch.digest(recipe.patches), patched)
    record.write(repo.root)
    look = observe(repo.root)
    if look.state != "clean":
        raise errors.IntegrityError(
            f"{name}: the files on disk are not those of the commit ({', '.join(look.changed[:3])})"
        )
    return record


def _expect(
    what: str, pinned: str | None, found: str, remedy: str = "do not use this source; take another --mirror"
) -> None:
    if pinned is not None and pinned != found:
        raise errors.IntegrityError(f"{what} is {found}, sources.lock pins {pinned}; {remedy}")


def _seed(repo: git.Repo, seeds: Iterable[Path]) -> None:
    """Link the packs and objects of earlier trees into this one, so that nothing on this disk is fetched again."""
    for source in (source for seed in seeds for source in (seed / ".git" / "objects").glob("*/*")):
        target = repo.root / ".git" / "objects" / source.parent.name / source.name
        if source.name.startswith("tmp_") or source.parent.name == "info" or target.exists():
            continue
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(source, target)
        except FileNotFoundError:
            continue
        except OSError:  # no hard links on this file system
            shutil.copy2(source, target)


def _on_disk(repo: git.Repo, component: Component, pin: Pin) -> bool:
    """Say whether the seeds hold all that is needed."""
    wanted = pin.commit if component.keeps_upstream_commit else pin.tree
    if wanted is None or not repo.object(f"{wanted}^{{tree}}"):
        return False
    if component.keeps_upstream_commit:
        (repo.root / ".git" / "shallow").write_text(f"{wanted}\n", encoding="utf-8")
    reached = ("rev-list", "--objects", "--quiet", "--end-of-options", f"{wanted}^{{tree}}")
    return repo(*reached, check=False).returncode == 0


def _obtain(repo: git.Repo, component: Component, pin: Pin, means: Means) -> str:
    """Get the component's objects, verified, from its wheel or by git; return the name of the source."""
    if means.offline:
        raise errors.NetworkError(f"{component.name}: its source is not on this disk; run once without --offline")
    failed = None
    if component.wheel:
        try:
            _download(repo, component, pin, component.wheel, means)
            return "wheel"
        except (errors.NetworkError, errors.MissingCommitError, errors.PinError) as error:
            failed = error
    try:
        _fetch(repo, component, pin, means)
    except (errors.NetworkError, errors.MissingCommitError, errors.PinError) as error:
        raise type(error)(f"{failed}; and {error}" if failed else str(error)) from error
    return "git"


def _download(repo: git.Repo, component: Component, pin: Pin, asked: Wheel, means: Means) -> None:
    name, sha256 = component.name, dict(pin.archives).get(asked.file)
    if sha256 is None:
        raise errors.PinError(f"{name}: sources.lock has no sha256 of {asked.file}; copy it from its publisher")
    if pin.tree is None:
        raise errors.PinError(f"{name}: sources.lock has no tree for {asked.file} to be held against")
    means.reporter.phase(name, f"downloading {asked.file}")
    path = wheel.download(component, asked, [sha256], means.stage / f"{name}.download")
    means.reporter.phase(name, "importing")
    found = wheel.import_tree(repo, path, asked.root, label=name)
    _expect(f"{name}: tree of {asked.file}", pin.tree, found)


def _fetch(repo: git.Repo, component: Component, pin: Pin, means: Means) -> None:
    name, url = component.name, component.address(means.mirror)
    if pin.commit is None:
        raise errors.PinError(f"{name}: sources.lock has no commit; run `python -m tooling bump`")
    for attempt in range(1, _ATTEMPTS + 1):
        means.reporter.phase(name, f"fetching {pin.commit[:12]}" + (f", attempt {attempt}" if attempt > 1 else ""))
        try:
            told = functools.partial(means.reporter.advance, name)
            git.fetch(repo, url, pin.commit, label=name, on_progress=told)
            break
        except errors.NetworkError:
            if attempt == _ATTEMPTS:
                raise
    _expect(f"{name}: root tree", pin.root_tree, repo.object(f"{pin.commit}^{{tree}}") or "")
    found = repo.object(f"{pin.commit}:{component.path}")
    if found is None:
        raise errors.IntegrityError(
            f"{name}: {pin.commit} has no folder {component.path}; correct 'path' in sources.yaml"
        )
    _expect(f"{name}: tree", pin.tree, found)


def _commit_of(repo: git.Repo, component: Component, pin: Pin) -> str:
    """Return the commit that the patches start from: the upstream's, or ours around the component's tree."""
    if component.keeps_upstream_commit:
        return pin.commit or ""
    inner = pin.tree or repo.object(f"{pin.commit}:{component.path}") or ""
    for folder in reversed(component.path.split("/") if component.path else []):
        inner = repo("mktree", stdin=f"040000 tree {inner}\t{folder}\n".encode()).text
    message = f"{component.name} {component.version}\n\nUpstream: {component.url}\nCommit: {pin.commit}\n"
    return repo("commit-tree", inner, stdin=message.encode(), env=git.IDENTITY).text
