"""Brings ``third_party/`` to the state of the lock: looks, decides, builds in a stage, moves into place."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors, files
from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.sources import fetch, git, manifest
from tooling.sources.manifest import Component, Recipe, make_recipe

DEFAULT = ("run", "source", "dev")
CUDA = ("cuda12", "cuda13")  # only where asked for: packages of 5 GB, for GPUs
ADDED = (*CUDA, "compile-gpu", "data")  # to those of run: 2 GB; of cuda12 what compiles, more cannot be loaded


class Tree(NamedTuple):
    """One look at ``third_party/<name>``, whose state is ``missing`` or one of these.

    ``clean``: as this tooling left it; ``outdated``: by another recipe. ``dirty``: files were changed or added.
    ``commits``: the branch has moved. ``unknown``: not made by this tooling, such as a link. ``work`` says what else
    nobody could make again.
    """

    state: str
    head: str = "-"
    work: str = ""
    override: str = ""


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    python = ".venv/bin/python -m tooling sync"
    examples = [python, f"{python} jax", f"{python} --override maxtext=URL@SHA"]
    parser = command(subparsers, "sync", run, "bring third_party/ to what sources.lock says", examples)
    parser.add_argument("names", nargs="*", metavar="NAME", help="components, in place of those of groups")
    add_options(parser)
    text = "show every component and its pin"
    command(subparsers, "status", run_status, text, [".venv/bin/python -m tooling status"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``sync`` and ``bootstrap`` share."""
    parser.set_defaults(names=())
    add = parser.add_argument
    add("--group", action="append", choices=(*DEFAULT, "image", *ADDED), dest="groups",
        help="only this group; may be repeated (default: run, source and dev); run: for MaxText; image: for images; "
        "cuda12: run, and the packages with which JAX uses NVIDIA GPUs (5 GB); cuda13: the same for drivers of 580 or "
        "later; compile-gpu: run, and what compiles for GPUs without having one (1.7 GB); data: run, and what reads "
        "Parquet files and datasets of Hugging Face and TensorFlow (2 GB); source: for jaxlib; dev: here")  # fmt: skip
    add("--mirror", metavar="URL", help="fetch NAME.git from URL/ instead of its upstream")
    text = "for this run take a component from a commit of another repository, such as file:///path/to/it@SHA"
    add("--override", action="append", default=[], metavar="NAME=URL@SHA", help=text)
    add("--force", action="store_true", help="drop changed or unknown trees")


def choose_groups(args: argparse.Namespace) -> set[str]:
    """Return the groups of the command line. With packages for GPUs come those that run on them."""
    groups = {*(args.groups or DEFAULT)}
    return groups | {"run"} if groups & {*ADDED} else groups


def choose_components(args: argparse.Namespace) -> dict[Component, str]:
    """Return the components of the command line in the order of their making, each with its ``--override``."""
    if args.mirror and (fault := git.url_fault(args.mirror)):
        raise errors.OptionError(f"--mirror '{git.hide_password(args.mirror)}': {fault}")
    if args.names and args.groups:
        raise errors.OptionError("--group and names of components exclude each other: leave one out")
    sources, groups = manifest.load(ROOT / "sources.yaml"), choose_groups(args)
    chosen = [manifest.find(sources, name) for name in dict.fromkeys(args.names)]
    chosen = chosen or [component for component in sources.values() if groups & {*component.groups}]
    overrides = dict(map(read_override, args.override))
    for name in overrides:
        if manifest.find(sources, name) not in chosen:
            there = ", ".join(component.name for component in chosen)
            raise errors.OptionError(f"--override {name}: is not among {there}; add it")
    chosen.sort(key=lambda component: bool(component.follows))  # after the trees that name their commits
    return {component: overrides.get(component.name, "") for component in chosen}


def read_override(text: str) -> tuple[str, str]:
    """Read one ``--override``: a name, and ``URL@SHA``."""
    name, _, value = text.partition("=")
    url, at, commit = value.rpartition("@")
    if not name or not at or not git.COMMIT.fullmatch(commit):
        raise errors.OptionError(f"--override '{git.hide_password(text)}': write NAME=URL@SHA, with 40 hex digits")
    if fault := git.url_fault(url):
        raise errors.OptionError(f"--override {name}: '{git.hide_password(url)}' {fault}")
    return name, value


def run(args: argparse.Namespace) -> None:
    """Bring components in; print the outcomes. A component that fails does not keep the others from coming."""
    chosen, pins, rows = choose_components(args), manifest.load_lock(ROOT / "sources.lock"), list[tuple[str, ...]]()
    failures = list[Exception]()

    def keep(component: Component) -> bool:
        """Say whether the place of a component has what its recipe gives."""
        with contextlib.suppress(errors.SourceError):
            recipe = make_recipe(ROOT, component, pins, chosen[component])
            tree = observe(component.name, recipe.key)
            if tree.state == "clean":
                rows.append((component.name, "kept", "in place", tree.head))
                return True
        return False

    # Looking needs no writing, unless a run that was killed left something.
    if not all(map(keep, chosen)) or (ROOT / "third_party" / ".stage").exists():
        rows.clear()
        with stage(ROOT) as folder:
            library = ROOT / "third_party" / "multimesh"
            if not os.path.lexists(library):
                library.symlink_to("../multimesh")
            for component, override in chosen.items():
                try:
                    if not keep(component):
                        recipe = make_recipe(ROOT, component, pins, override)
                        rows.append(_bring(recipe, folder, args.mirror, force=args.force))
                except (errors.ToolingError, OSError) as error:
                    failures.append(error)
                    rows.append((component.name, "failed", "left as it was", "-"))
    print(console.table(("component", "action", "detail", "commit"), rows))
    if failures:
        raise ExceptionGroup("sync", failures)


def observe(name: str, key: str) -> Tree:
    """Look at a folder of ``third_party/``, whose recipe has this key; reads only, and runs one ``git status``."""
    place = ROOT / "third_party" / name
    if not os.path.lexists(place):
        return Tree("missing")
    record, unknown = fetch.read_record(place), Tree("unknown", work="was not made by this tooling")
    if record is None or place.is_symlink():
        return unknown
    try:
        with git.open_repo(place) as repo:
            head = git.find_object(repo, "HEAD") or ""
            lines = git.run(repo, "status", "--porcelain", "-z", "--no-renames").split("\0")
            refs = git.run(repo, "for_each_ref", "--format=%(refname)", "refs/heads", "refs/stash").split()
    except errors.SourceError:
        return unknown
    changed = [line[3:] for line in lines if line]
    state, work = "clean" if record.key == key else "outdated", ""
    if refs := [ref for ref in refs if ref != f"refs/heads/{git.BRANCH}"]:  # which a new tree would not have
        work = f"has branches or a stash of yours ({', '.join(refs[:3])})"
    if head != record.commit:
        state = "commits"
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        state, work = "dirty", f"has changes that no commit holds ({', '.join(changed[:3])}{more})"
    return Tree(state, head[:12], work, record.override)


def _bring(recipe: Recipe, folder: Path, mirror: str | None, *, force: bool) -> tuple[str, ...]:
    """Build one component in ``folder``, and move it into place, where nobody's work lies; return its row."""
    name, place = recipe.component.name, ROOT / "third_party" / recipe.component.name
    tree = observe(name, recipe.key)
    remedy = "make a patch of it (CONTRIBUTING.md, 'Add a patch'), move it away, or drop it with --force"
    if tree.work and not force:
        raise errors.SourceError(f"third_party/{name}: {tree.work}; {remedy}")
    record, source = fetch.build(ROOT, recipe, folder, mirror)
    if tree.state == "commits" and not force:
        with git.open_repo(place) as old, git.open_repo(folder / name) as new:
            if old.head.commit.tree != new.head.commit.tree:  # else the patches give the same files
                raise errors.SourceError(f"third_party/{name}: is at {tree.head}, which nobody locked; {remedy}")
    if tree.state != "missing":
        place.rename(folder / f"{name}.old")
    (folder / name).rename(place)
    detail = f"{recipe.pin.version[:12]}, {len(recipe.series)} patches, from {source}"
    return (name, "created" if tree.state == "missing" else "replaced", detail, record.commit[:12])


@contextlib.contextmanager
def stage(root: Path) -> Iterator[Path]:
    """Let one run at a time change ``third_party/``, in a folder there that is gone afterwards.

    A killed run's git may still write into its own folder, so none is used twice.
    """
    third_party, stages = root / "third_party", root / "third_party" / ".stage"
    stages.mkdir(parents=True, exist_ok=True)
    with files.lock(third_party / ".lock", "waiting for another run that changes third_party/"):
        try:
            stages.mkdir(exist_ok=True)
            yield Path(tempfile.mkdtemp(dir=stages))
        finally:
            for old in stages.glob("*/*.old"):  # taken away, and nothing came in its place
                if not os.path.lexists(third_party / old.stem):
                    old.rename(third_party / old.stem)
            shutil.rmtree(stages, ignore_errors=True)


def run_status(args: argparse.Namespace) -> int:
    """Print a table of all components; exit 0 if all trees that are here are as locked."""
    pins, rows = manifest.load_lock(ROOT / "sources.lock"), []
    for name, component in manifest.load(ROOT / "sources.yaml").items():
        key, version, count, state = "", "-", "-", ""
        try:
            recipe = make_recipe(ROOT, component, pins)
            key, version, count = recipe.key, recipe.pin.version[:12], str(len(recipe.series))
        except errors.NotThereError:
            pass  # the tree that names its commit is yet to come
        except errors.SourceError as error:
            console.note(str(error))
            state = "unlocked"
        tree = observe(name, key)
        state = "overridden" if tree.override else state or tree.state
        rows.append((name, ",".join(component.groups), version, state, count, tree.head))
    print(console.table(("component", "groups", "version", "state", "patches", "commit"), rows))
    return int(any(row[3] not in ("clean", "missing") for row in rows))
