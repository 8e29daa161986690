"""Brings ``third_party/`` to the state of the lock: looks, decides, builds in a stage, moves into place.

``lock`` writes there what an upstream and the patches give.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors, files
from tooling.core.files import ROOT
from tooling.sources import fetch, git, manifest
from tooling.sources.manifest import LOCKED, Component, Pin, Recipe, make_recipe

DEFAULT = ("run", "source", "dev")
CUDA = ("cuda12", "cuda13")  # only where asked for: packages of 5 GB, for GPUs
ADDED = (*CUDA, "compile-gpu", "data")  # to those of run: 2 GB; of cuda12 what compiles, more cannot be loaded
THIRD_PARTY, LOCK = ROOT / "third_party", ROOT / "sources.lock"
TOOLING = ".venv/bin/python -m tooling"


class Tree(NamedTuple):
    """One look at ``third_party/<name>``, whose state is ``missing`` or one of these.

    ``clean``: as this tooling left it; ``outdated``: by another recipe; ``overridden``: by one with ``--override``.
    ``dirty``: files were changed or added. ``commits``: the branch has moved. ``unknown``: not made by this tooling,
    such as a link. ``work`` says what else nobody could make again.
    """

    state: str
    head: str = "-"
    work: str = ""


def choose_groups(args: argparse.Namespace) -> set[str]:
    """Return the groups of the command line. With packages for GPUs come those that run on them."""
    groups = {*(args.groups or DEFAULT)}
    return groups | {"run"} if groups & {*ADDED} else groups


def choose_components(args: argparse.Namespace) -> dict[Component, str]:
    """Return the components of the command line in the order of the manifest, each with its ``--override``."""
    sources, overrides = manifest.load(ROOT / "sources.yaml"), dict(map(read_override, args.override))
    names = {manifest.find(sources, name).name for name in (*args.names, *overrides)}
    groups = choose_groups(args) if args.groups or not args.names else set()
    chosen = [component for component in sources.values() if component.name in names or groups & {*component.groups}]
    return {component: overrides.get(component.name, "") for component in chosen}


def read_override(text: str) -> tuple[str, str]:
    """Read one ``--override``: a name, and ``URL@SHA``."""
    name, _, value = text.partition("=")
    url, at, commit = value.rpartition("@")
    if not name or not at or not git.COMMIT.fullmatch(commit):
        raise errors.OptionError("--override: write NAME=URL@SHA, with 40 hex digits")
    return name, f"{git.check_address(url, f'--override {name}')}@{commit}"


def run(args: argparse.Namespace) -> None:
    """Bring components in; print the outcomes. A component that fails does not keep the others from coming."""
    chosen, pins, rows = choose_components(args), manifest.load_lock(LOCK), list[tuple[str, ...]]()
    failures = list[Exception]()
    with contextlib.ExitStack() as undo:
        enter = functools.cache(lambda: undo.enter_context(stage()))
        if (THIRD_PARTY / ".stage").exists():  # a run that was killed left it
            enter()
        for component, override in chosen.items():
            try:
                rows.append(_bring(make_recipe(ROOT, component, pins, override), enter, force=args.force))
            except (errors.ToolingError, OSError) as error:
                failures.append(error)
                rows.append((component.name, "failed", "left as it was", "-"))
    print(console.table(("component", "action", "detail", "commit"), rows))
    if failures:
        raise ExceptionGroup("sync", failures)


def observe(name: str, ref: str) -> Tree:
    """Look at a folder of ``third_party/``, whose recipe has this ref; reads only, and runs one ``git status``."""
    place, unknown = THIRD_PARTY / name, Tree("unknown", work="was not made by this tooling")
    if not os.path.lexists(place):
        return Tree("missing")
    if place.is_symlink() or not (place / ".git").is_dir():
        return unknown
    try:
        with git.open_repo(place) as repo:
            head = git.find_object(repo, "HEAD") or ""
            lines = repo.git.status("--porcelain", "-z", "--no-renames").split("\0")
            refs = repo.git.for_each_ref("--format=%(refname) %(objectname)").splitlines()
    except errors.SourceError:
        return unknown
    commits, changed = dict(line.split() for line in refs), [line[3:] for line in lines if line]
    recipe = next((other for other in commits if other.startswith(manifest.REFS)), git.BASE)
    branches = [other for other in commits if other.startswith(("refs/heads/", "refs/stash"))]
    work = [other for other in branches if other != f"refs/heads/{git.BRANCH}"]  # which a new tree would not have
    if recipe not in commits:
        return unknown
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return Tree("dirty", head[:12], f"has changes that no commit holds ({', '.join(changed[:3])}{more})")
    state = "overridden" if recipe.startswith(manifest.REFS[1]) else "outdated"
    state = "commits" if head != commits[recipe] else "clean" if recipe == ref else state
    return Tree(state, head[:12], f"has branches or a stash of yours ({', '.join(work[:3])})" if work else "")


def _bring(recipe: Recipe, enter: Callable[[], Path], *, force: bool) -> tuple[str, ...]:
    """Build one component in the stage, and move it into place, where nobody's work lies; return its row."""
    name, place = recipe.component.name, THIRD_PARTY / recipe.component.name
    tree = observe(name, recipe.ref)  # which needs no writing
    if tree.state != "clean":
        folder = enter()
        tree = observe(name, recipe.ref)  # again: another run may have been here
    if tree.state == "clean":
        return (name, "kept", "in place", tree.head)
    remedy = "make a patch of it (CONTRIBUTING.md, 'Add a patch'), move it away, or drop it with --force"
    if tree.work and not force:
        raise errors.SourceError(f"third_party/{name}: {tree.work}; {remedy}")
    commit, source = fetch.build(ROOT, recipe, folder)
    if tree.state == "commits" and not force:
        with git.open_repo(place) as old, git.open_repo(folder / name) as new:
            if old.head.commit.tree != new.head.commit.tree:  # else the patches give the same files
                raise errors.SourceError(f"third_party/{name}: is at {tree.head}, which nobody locked; {remedy}")
    if tree.state != "missing":
        place.rename(folder / f"{name}.old")
    (folder / name).rename(place)
    detail = f"{recipe.pin.version[:12]}, {len(recipe.series)} patches, from {source}"
    return (name, "created" if tree.state == "missing" else "replaced", detail, commit[:12])


@contextlib.contextmanager
def stage() -> Iterator[Path]:
    """Let one run at a time change ``third_party/``, in a folder there that is gone afterwards.

    A killed run's git may still write into its own folder, so none is used twice.
    """
    stages = THIRD_PARTY / ".stage"
    stages.mkdir(parents=True, exist_ok=True)
    with files.lock(THIRD_PARTY / ".lock", "waiting for another run that changes third_party/"):
        try:
            stages.mkdir(exist_ok=True)
            if not os.path.lexists(THIRD_PARTY / "multimesh"):
                (THIRD_PARTY / "multimesh").symlink_to("../multimesh")
            yield Path(tempfile.mkdtemp(dir=stages))
        finally:
            for old in stages.glob("*/*.old"):  # taken away, and nothing came in its place
                if not os.path.lexists(THIRD_PARTY / old.stem):
                    old.rename(THIRD_PARTY / old.stem)
            shutil.rmtree(stages, ignore_errors=True)


def run_status(args: argparse.Namespace) -> int:
    """Print a table of all components; exit 0 if all trees that are here are as locked."""
    pins, rows = manifest.load_lock(LOCK), []
    for name, component in manifest.load(ROOT / "sources.yaml").items():
        ref, version, count, state = "", "-", "-", ""
        try:
            recipe = make_recipe(ROOT, component, pins)
            ref, version, count = recipe.ref, recipe.pin.version[:12], str(len(recipe.series))
        except errors.NotThereError:
            pass  # the tree that names its commit is yet to come
        except errors.SourceError as error:
            console.note(str(error))
            state = "unlocked"
        tree = observe(name, ref)
        rows.append((name, ",".join(component.groups), version, state or tree.state, count, tree.head))
    print(console.table(("component", "groups", "version", "state", "patches", "commit"), rows))
    return int(any(row[3] not in ("clean", "missing") for row in rows))


def run_lock(args: argparse.Namespace) -> None:
    """Write ``sources.lock``; nothing, unless the patches apply."""
    name, version = args.name, args.version
    sources, pins = manifest.load(ROOT / "sources.yaml"), manifest.load_lock(LOCK)
    component = manifest.find(sources, name)
    if other := component.commit.component:
        raise errors.OptionError(f"{name}: the tree of {other} names its commit; it has no pin to lock")
    if version:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", version):
            raise errors.OptionError(f"'{version}' is no version; write letters, digits, dots, dashes")
        find_commit = _commit_in_wheel if component.commit.file else _commit_of_tag
        pins[name] = Pin(version, find_commit(component, version), None)
    elif name not in pins:
        raise errors.OptionError(f"{name}: sources.lock has no version of it; give one behind the name")
    pins[name] = pin = _try(component, pins[name])
    manifest.save_lock(LOCK, sources, pins)
    print(f"{name}: {pin.version} is {pin.commit or f'tree {pin.tree}'}; run `{TOOLING} sync` to bring it in")


def _try(component: Component, pin: Pin) -> Pin:
    """Return a pin with what its patches give, built aside, and with its tree and wheel."""
    name, series = component.name, manifest.list_patches(ROOT, component.name)
    if not series and not fetch.is_wrapped(component):  # there is nothing to try: a commit fixes all
        return pin._replace(patched_commit=pin.commit)
    with stage() as folder:
        commit, _ = fetch.build(ROOT, Recipe(component, pin, series), folder, verify=False)
        with git.open_repo(folder / name) as repo:
            tree, digest = git.find_object(repo, f"{git.BASE}:{component.path}"), pin.wheel_sha256
            if component.wheel and not digest:
                digest = fetch.unpack_wheel(name, pin.version, (), folder / "wheel")
                content = git.write_tree(repo, folder / "wheel" / component.wheel)
                if content != tree:
                    raise errors.SourceError(f"{name}: its wheel holds tree {content}, the commit {tree}; leave it out")
    return pin._replace(tree=tree, wheel_sha256=digest, patched_commit=commit)


def _commit_of_tag(component: Component, version: str) -> str:
    """Return the commit of a version: of its tag, or the version itself where it is a commit."""
    if git.COMMIT.fullmatch(version):
        return version
    if not component.tag:
        raise errors.OptionError(f"{component.name}: has no 'tag' in sources.yaml, so its version must be a commit")
    url, tag = git.find_address(component.url), component.tag.replace("{version}", version)
    with tempfile.TemporaryDirectory() as folder, git.open_repo(Path(folder), new=True) as repo:
        text = str(repo.git.ls_remote("--end-of-options", url, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"))
    if not text:
        raise errors.NotThereError(f"{component.name}: {url} has no tag {tag}; check the version")
    return text.splitlines()[-1].split("\t")[0]  # of an annotated tag its commit comes last


def _commit_in_wheel(component: Component, version: str) -> str:
    """Return the commit that the locked wheel of a component's version names; pip compares the wheel with its hash."""
    name, file, (locked, hashes) = component.name, component.commit, manifest.find_newest(ROOT, component.name)
    if locked != version:
        raise errors.SourceError(
            f"{name}: {LOCKED} has {name} {locked}, and only a locked wheel says the commit of its sources; run "
            f"`.venv/bin/python -m tooling lock {name} {locked}`, or have {version} there"
        )
    with tempfile.TemporaryDirectory(prefix="multimesh-wheel-") as folder:
        fetch.unpack_wheel(name, version, hashes, Path(folder, "wheel"))
        try:
            return manifest.read_commit(Path(folder, "wheel", file.file), file, name)
        except OSError as error:
            raise errors.SourceError(f"{name}: the wheel of {name} {version} holds no {file.file}") from error
