"""Builds one component in a stage folder: its upstream tree by any transport, its patches, its checked-out files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workflows import console, errors
from workflows.sources import archive, git, patch, tree
from workflows.sources.lock import Pin
from workflows.sources.manifest import Component, Transport
from workflows.sources.patch import Patch
from workflows.sources.workspace import Workspace

_ATTEMPTS = 3


@dataclass(frozen=True)
class Recipe:
    """All that decides the bytes of one component.

    ``override`` is the ``URL@SHA`` that replaces the locked source; then only the commit is pinned.
    """

    component: Component
    pin: Pin
    patches: tuple[Patch, ...]
    override: str | None = None


@dataclass(frozen=True)
class Means:
    """How bytes may be had: from other object stores on this disk first, then from the network unless ``offline``."""

    seeds: tuple[Path, ...]
    offline: bool
    mirror: str | None


@dataclass(frozen=True)
class Built:
    """A tree in the stage, ready to be moved into place."""

    folder: Path
    record: tree.Record
    tree: str


def build(recipe: Recipe, stage: Path, means: Means, reporter: console.Reporter, *, verify: bool = True) -> Built:
    """Make the component in ``stage / <name>``; nothing outside of ``stage`` changes.

    With ``verify`` the patched commit and tree must be those of the lock (where it pins them).
    """
    name = recipe.component.name
    repo = git.init(stage / name)
    (repo.root / ".git" / "info" / "exclude").write_text(tree.EXCLUDE, encoding="utf-8")
    _seed(repo, means.seeds)
    base, source = _base(repo, recipe, stage, means, reporter)
    if recipe.patches:
        reporter.phase(name, f"applying {len(recipe.patches)} patches")
    commit = patch.apply_series(repo, base, recipe.patches)
    patched = repo.object(f"{commit}^{{tree}}") or ""
    if verify and recipe.override is None:
        _expect(f"{name}: patched commit", recipe.pin.patched_commit, commit)
        _expect(f"{name}: patched tree", recipe.pin.patched_tree, patched)
    reporter.phase(name, "checking out")
    _check_out(repo, base, commit)
    record = tree.Record(recipe.component.version, base, commit, source, recipe.override, patch.digest(recipe.patches))
    tree.write_record(repo.root, record)
    look = tree.observe(repo.root)
    if look.state != "clean":
        raise errors.IntegrityError(
            f"{name}: the files on disk are not those of the commit ({', '.join(look.changed[:3])})"
        )
    return Built(repo.root, record, patched)


def _expect(what: str, pinned: str | None, found: str) -> None:
    if pinned is not None and pinned != found:
        raise errors.IntegrityError(
            f"{what} is {found}, sources.lock pins {pinned}; `python -m workflows lock` if you changed it"
        )


def seeds(workspace: Workspace, name: str, left: Iterable[Path]) -> tuple[Path, ...]:
    """Return the trees on this disk that may hold a component's objects: the one in place, and those of killed runs."""
    folders = (workspace.place(name), *(stage / name for stage in left))
    return tuple(folder for folder in folders if (folder / ".git" / "objects").is_dir() and not folder.is_symlink())


def _seed(repo: git.Repo, seeds: Iterable[Path]) -> None:
    """Link the packs and objects of earlier trees into this one, so that what is on disk is not fetched again."""
    for seed in seeds:
        for source in (seed / ".git" / "objects").glob("*/*"):
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


def _base(repo: git.Repo, recipe: Recipe, stage: Path, means: Means, reporter: console.Reporter) -> tuple[str, str]:
    """Return the commit before patches and where its bytes came from; the tree is verified."""
    component, pin = recipe.component, recipe.pin
    source = _on_disk(repo, component, pin)
    failures: list[errors.WorkflowsError] = []
    if source is None and means.offline:
        raise errors.NetworkError(f"{component.name}: its source is not on this disk; run once without --offline")
    for transport in component.transports if source is None else ():
        try:
            source = _obtain(repo, recipe, transport, stage, means, reporter)
            break
        except (errors.NetworkError, errors.MissingCommitError, errors.PinError) as error:
            failures.append(error)
    if source is None:
        raise _combined(failures)
    base = _commit_of(repo, component, pin)
    repo("update-ref", git.BASE, base)
    return base, source


def _combined(failures: Sequence[errors.WorkflowsError]) -> errors.WorkflowsError:
    """Return one error for all transports; its kind is that of the last."""
    last = failures[-1]
    return type(last)("; and ".join(str(failure) for failure in failures))


def _on_disk(repo: git.Repo, component: Component, pin: Pin) -> str | None:
    """Say that the seeds hold all that is needed, or return None."""
    if component.keeps_upstream_commit:
        wanted = pin.commit if pin.commit and repo.object(f"{pin.commit}^{{tree}}") else None
        if wanted:
            (repo.root / ".git" / "shallow").write_text(f"{wanted}\n", encoding="utf-8")
    else:
        wanted = pin.tree
    return "disk" if wanted and repo.object(f"{wanted}^{{tree}}") and repo.whole(f"{wanted}^{{tree}}") else None


def _obtain(
    repo: git.Repo,
    recipe: Recipe,
    transport: Transport,
    stage: Path,
    means: Means,
    reporter: console.Reporter,
) -> str:
    """Get the component's objects by one transport and verify them; return what to call the source."""
    component, pin = recipe.component, recipe.pin
    if transport.kind == "git":
        _fetch(repo, component, pin, means, reporter)
        return "git"
    sha256 = dict(pin.archives).get(transport.file)
    if sha256 is None:
        raise errors.PinError(
            f"{component.name}: sources.lock has no sha256 of {transport.file}; copy it from its publisher"
        )
    reporter.phase(component.name, f"downloading {transport.file}")
    path = archive.download(
        transport, component.version, sha256, stage / f"{component.name}.download",
        label=component.name, mirror=means.mirror,
        on_progress=lambda done, total: reporter.advance(component.name, done, total),
    )  # fmt: skip
    reporter.phase(component.name, "importing")
    found = archive.import_tree(repo, path, transport.root, label=component.name)
    if pin.tree is None:
        raise errors.PinError(f"{component.name}: sources.lock has no tree for {transport.file} to be held against")
    _expect(f"{component.name}: tree of {transport.file}", pin.tree, found)
    return transport.kind


def _fetch(repo: git.Repo, component: Component, pin: Pin, means: Means, reporter: console.Reporter) -> None:
    if pin.commit is None:
        raise errors.PinError(f"{component.name}: sources.lock has no commit; run `python -m workflows bump`")
    url = address(component, means.mirror)
    for attempt in range(1, _ATTEMPTS + 1):
        reporter.phase(component.name, f"fetching {pin.commit[:12]}" + (f", attempt {attempt}" if attempt > 1 else ""))
        try:
            git.fetch(
                repo, url, pin.commit, label=component.name,
                on_progress=lambda done, total: reporter.advance(component.name, done, total),
            )  # fmt: skip
            break
        except errors.NetworkError:
            if attempt == _ATTEMPTS:
                raise
    _expect(f"{component.name}: root tree", pin.root_tree, repo.object(f"{pin.commit}^{{tree}}") or "")
    found = repo.object(f"{pin.commit}:{component.path}")
    if found is None:
        raise errors.IntegrityError(
            f"{component.name}: {pin.commit} has no folder {component.path}; correct 'path' in sources.yaml"
        )
    _expect(f"{component.name}: tree", pin.tree, found)


def address(component: Component, mirror: str | None) -> str:
    """Return where a component is fetched from: its upstream, or a mirror that keeps it under its last name."""
    if mirror is None:
        return component.url
    return f"{mirror.rstrip('/')}/{component.url.rstrip('/').rpartition('/')[2]}"


def _commit_of(repo: git.Repo, component: Component, pin: Pin) -> str:
    """Return the commit that the patches start from: the upstream's, or ours around the component's tree."""
    if component.keeps_upstream_commit:
        patch.check_tree(repo, f"{pin.commit}^{{tree}}", component.name, errors.IntegrityError)
        return pin.commit or ""
    inner = pin.tree or repo.object(f"{pin.commit}:{component.path}") or ""
    for folder in reversed(component.path.split("/") if component.path else []):
        inner = repo("mktree", stdin=f"040000 tree {inner}\t{folder}\n".encode()).text
    patch.check_tree(repo, inner, component.name, errors.IntegrityError)
    message = f"{component.name} {component.version}\n\nUpstream: {component.url}\nCommit: {pin.commit}\n"
    return repo("commit-tree", inner, stdin=message.encode(), env=git.IDENTITY).text


def _check_out(repo: git.Repo, base: str, commit: str) -> None:
    repo("update-ref", git.BRANCH, commit)
    repo("symbolic-ref", "HEAD", git.BRANCH)
    (repo.root / ".git" / "index").unlink(missing_ok=True)
    repo("checkout", "--quiet", "--force", "patched", "--")


def overridden(recipe: Recipe, url: str, commit: str) -> Recipe:
    """Return the recipe for the same component from a fork or another commit."""
    component = replace(recipe.component, url=url, version=commit, transports=(Transport("git"),), link="")
    return Recipe(component, Pin(commit, commit, None), recipe.patches, f"{url}@{commit}")
