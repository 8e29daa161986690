"""Writes pins: for the patches on disk, for patches made anew of commits, and for another version."""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tooling.core import console, errors, files
from tooling.core.console import Subparsers, command
from tooling.sources import assemble, git, manifest, patch, wheel
from tooling.sources.assemble import Means, Recipe
from tooling.sources.manifest import Component, Pin
from tooling.sources.named import in_wheel, resolve
from tooling.sources.patch import Patch
from tooling.sources.workspace import Record, Workspace, observe

_SLUG_LENGTH = 60


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    text, examples = "record the patches as they are on disk, and what they give", ["python -m tooling lock maxtext"]
    parser = command(subparsers, "lock", run_lock, text, examples)
    parser.add_argument("names", nargs="*", metavar="NAME", help="components (default: all whose patches changed)")
    text = "turn the commits in third_party/NAME into its patch series"
    parser = command(subparsers, "refresh", run_refresh, text, ["python -m tooling refresh maxtext"])
    parser.add_argument("names", nargs="+", metavar="NAME", help="components")


def run_lock(args: argparse.Namespace) -> None:
    """Rewrite the patch entries of ``sources.lock``; the pins of upstreams stay."""
    here = Workspace()
    wanted, held = manifest.load(here.manifest), manifest.load_lock(here.lock)
    with here.exclusive(), console.Reporter() as reporter:
        for component in [wanted.named(name) for name in args.names] or wanted.components:
            if not component.link and not component.follows:
                pin = manifest.pin_of(component, held)
                held[component.name] = relock(here, component, pin, reporter, always=bool(args.names))
                manifest.save_lock(here.lock, wanted, held)


def run_refresh(args: argparse.Namespace) -> None:
    """Write the patch series of components anew from their commits, and lock it."""
    here = Workspace()
    wanted = manifest.load(here.manifest)
    with here.exclusive():
        for name in args.names:
            component, held = wanted.named(name), manifest.load_lock(here.lock)
            if component.link:
                raise errors.UsageError(f"{name}: is a link to {component.link}; there is nothing to refresh")
            pin, series = refresh(here, *resolve(here, component, held))
            manifest.save_lock(here.lock, wanted, held if component.follows else held | {name: pin})
            print(f"{name}: {len(series)} patches, {(pin.patched_commit or '-')[:12]}")
            print("".join(f"  {each.file}\n" for each in series), end="")


def relock(here: Workspace, component: Component, pin: Pin, reporter: console.Reporter, *, always: bool) -> Pin:
    """Return the pin with the patches on disk, and with the commit and tree that they give when built aside."""
    patches = patch.load_series(here.root, component.name)
    found = patch.digests(patches)
    if found == pin.patches and pin.patched_commit and not always:
        return pin
    pin = pin._replace(patches=found)
    if not patches and component.keeps_upstream_commit:
        return pin._replace(patched_commit=pin.commit, patched_tree=pin.tree)
    with here.stage() as stage:
        means = Means(stage, reporter).seeded(here, component.name)
        built = assemble.build(Recipe(component, pin, patches), means, verify=False)
    reporter.done(component.name, f"locked {len(patches)} patches, {built.commit[:12]}")
    return pin._replace(patched_commit=built.commit, patched_tree=built.tree)


def refresh(here: Workspace, component: Component, pin: Pin) -> tuple[Pin, tuple[Patch, ...]]:
    """Rewrite ``patches/<name>/`` from the commits since the base; return the new pin and series.

    A commit's subject names its file. The tree's branch is moved to the commits that the new series gives; its files
    do not change.
    """
    place, where = here.place(component.name), f"third_party/{component.name}"
    repo, record = git.Repo(place), _record(component, place)
    series = _series(component, repo, record.base)
    commit = patch.apply_series(repo, record.base, series)
    patched = repo.object(f"{commit}^{{tree}}")
    if patched != repo.object("HEAD^{tree}"):
        raise errors.PatchError(f"{where}: its commits cannot be told as patches; leave out merges")
    _write(here.root / "patches" / component.name, series)
    repo("update-ref", "-m", "refresh", git.BRANCH, commit)
    repo("symbolic-ref", "HEAD", git.BRANCH)
    repo("read-tree", "--reset", commit)
    repo("update-index", "-q", "--refresh", check=False)
    record._replace(commit=commit, series=patch.digest(series)).write(place)
    return pin._replace(patches=patch.digests(series), patched_commit=commit, patched_tree=patched), series


def _record(component: Component, place: Path) -> Record:
    """Return the record of a tree that can be refreshed."""
    look, where = observe(place), f"third_party/{component.name}"
    if look.record is None or look.state in ("missing", "unknown", "link"):
        raise errors.UsageError(f"{where}: is not there as a sync makes it; run `python -m tooling sync` first")
    if look.state == "dirty":
        raise errors.DirtyTreeError(
            f"{where}: {look.changed[0]} is not committed; commit your changes there, then refresh"
        )
    if look.record.override or look.record.version != component.version:
        held = look.record.override or look.record.version
        raise errors.PinError(f"{where}: holds {held}, not {component.version}; run `python -m tooling sync` first")
    return look.record


def _series(component: Component, repo: git.Repo, base: str) -> tuple[Patch, ...]:
    """Return one patch a commit since the base, in order."""
    where = f"third_party/{component.name}"
    if repo("merge-base", "--is-ancestor", base, "HEAD", check=False).returncode:
        raise errors.PatchError(f"{where}: its commits do not stand on {base[:12]}; rebase them onto it")
    if repo("rev-list", "--merges", f"{base}..HEAD").text:
        raise errors.PatchError(f"{where}: holds a merge, which is no patch; rebase it into commits")
    commits = repo("rev-list", "--reverse", f"{base}..HEAD").text.split()
    series = tuple(_as_patch(repo, component.name, commit) for commit in commits)
    if len({each.file for each in series}) < len(series):
        raise errors.PatchError(f"{where}: two commits have one subject, which names a patch; give each its own")
    return series


def _as_patch(repo: git.Repo, name: str, commit: str) -> Patch:
    subject, _, body = repo("show", "--no-patch", "--format=%B", commit).text.strip().partition("\n")
    options = ("-p", "-U1", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-renames", "--root")
    content = repo("diff-tree", *options, "--no-commit-id", commit).stdout
    head = f"Subject: {subject}\n\n" + (f"{body.strip()}\n" if body.strip() else "") + "---\n"
    slug = re.sub(r"[^a-z0-9._]+", "-", subject.lower()).strip("-._")[:_SLUG_LENGTH].strip("-._") or "change"
    return Patch(name, f"{slug}.patch", head.encode() + content)


def _write(folder: Path, series: Sequence[Patch]) -> None:
    """Replace the patches in a folder; after a kill in between, ``sources.lock`` does not agree with them."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in series:
        (folder / each.file).write_bytes(each.data)
    files.write(folder / patch.SERIES, "".join(f"{each.file}\n" for each in series))
    for path in set(folder.glob("*.patch")) - {folder / each.file for each in series}:
        path.unlink()


def bump(here: Workspace, name: str, version: str, mirror: str | None, reporter: console.Reporter) -> Pin:
    """Write ``sources.yaml`` and ``sources.lock`` for a new version, if its source can be had and the patches apply.

    Raises ``MissingCommitError`` where the upstream has no such version, ``PatchError`` where a patch does not apply.
    Nothing was changed then.
    """
    before = manifest.load(here.manifest).named(name)
    if before.link or before.follows:
        why = f"the tree of {before.follows} names its commit" if before.follows else "is a link to this repository"
        raise errors.UsageError(f"{name}: {why}; it has no version to bump")
    temporary = here.manifest.with_name(f".{here.manifest.name}.{os.getpid()}")
    try:
        temporary.write_text(_with_version(here.manifest, name, version), encoding="utf-8")
        wanted = manifest.load(temporary)
        pin = _resolve(here, wanted.named(name), mirror, reporter)
        # The lock goes first: a kill between the two leaves a manifest that the next bump corrects.
        manifest.save_lock(here.lock, wanted, manifest.load_lock(here.lock) | {name: pin})
        os.replace(temporary, here.manifest)
    finally:
        temporary.unlink(missing_ok=True)
    return pin


def _with_version(path: Path, name: str, version: str) -> str:
    """Return the manifest's text with one version changed and all else, comments too, as it was."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", version):
        raise errors.UsageError(f"'{version}' is no version; write letters, digits, dots, dashes or underscores")
    before = rf"^  {re.escape(name)}:[ ]*\n(?:(?:    .*|[ ]*#.*|[ ]*)\n)*?    version:\s+"
    place = re.compile(rf"({before})(?:\"[^\"]*\"|'[^']*'|[^\s#]+)", re.MULTILINE)
    text, changed = place.subn(rf'\g<1>"{version}"', path.read_text(encoding="utf-8"))
    if changed != 1:
        raise errors.ManifestError(
            f"sources.yaml: {name} has no line 'version:' of its own; write one, indented by four"
        )
    return text


def _resolve(here: Workspace, component: Component, mirror: str | None, reporter: console.Reporter) -> Pin:
    """Find the pins of a version, with the commit and tree that the patches give on it."""
    name, url = component.name, component.address(mirror)
    patches = patch.load_series(here.root, name)
    told = in_wheel(here, component, component.commit) if component.commit else None
    with here.stage() as stage:
        reporter.phase(name, f"asking {url}")
        try:
            commit = _find_commit(component, url, told)
        except errors.NetworkError:
            if told is None or patches:
                raise
            reporter.done(name, f"{url} does not answer; the locked wheel says the commit")
            return Pin(component.version, told, None, patched_commit=told)
        probe = git.init(stage / f"{name}.probe")
        git.fetch(probe, url, commit, label=name, on_progress=functools.partial(reporter.advance, name))
        root_tree, tree = probe.object(f"{commit}^{{tree}}"), probe.object(f"{commit}:{component.path}")
        if tree is None:
            raise errors.MissingCommitError(f"{name}: {component.version} has no folder {component.path}")
        archives: manifest.Digests = ()
        if component.wheel:
            path = wheel.download(component, component.wheel, (), stage / "wheels")
            found = wheel.import_tree(probe, path, component.wheel.root, label=name)
            if found != tree:
                raise errors.IntegrityError(f"{name}: {path.name} holds tree {found}, the commit {tree}; leave it out")
            archives = ((path.name, files.sha256(path)),)
        root_tree = root_tree if component.path else None
        pin = Pin(component.version, commit, tree, root_tree, archives, patch.digests(patches))
        means = Means(stage, reporter, (probe.root,), offline=True)
        built = assemble.build(Recipe(component, pin, patches), means, verify=False)
    reporter.done(name, f"{len(patches)} patches apply to {component.version}")
    return pin._replace(patched_commit=built.commit, patched_tree=built.tree)


def _find_commit(component: Component, url: str, told: str | None) -> str:
    """Return the commit of a version: of its tag, or the version itself where it is a commit.

    A wheel that names a commit must name that of the tag.
    """
    if git.COMMIT.fullmatch(component.version):
        return component.version
    if not component.tag:
        raise errors.UsageError(f"{component.name}: has no 'tag' in sources.yaml, so its version must be a full commit")
    ref = f"refs/tags/{component.tag}"
    answer = git.ask(url, ref, label=component.name)
    commit = answer.get(f"{ref}^{{}}") or answer.get(ref) or told
    if commit is None:
        raise errors.MissingCommitError(f"{component.name}: {url} has no tag {component.tag}; check the version")
    if told not in (None, commit):
        raise errors.IntegrityError(
            f"{component.name}: the locked wheel is of commit {told}, the tag {component.tag} of {url} is {commit}; "
            "find out why before you use either"
        )
    return commit
