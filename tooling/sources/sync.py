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
from tooling.sources.fetch import Recipe, Record, make_recipe
from tooling.sources.manifest import Component

Row = tuple[str, str, str, str]


class Tree(NamedTuple):
    """One look at ``third_party/<name>``, whose state is ``missing`` or one of these.

    ``clean``: as this tooling left it; ``outdated``: by another recipe. ``dirty``: files were changed or added.
    ``commits``: the branch has moved. ``unknown``: not made by this tooling, such as a link.
    """

    state: str
    head: str = ""
    record: Record | None = None
    changed: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()  # and a stash: refs that a new tree would not have


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
    add("--group", action="append", choices=manifest.ALL_GROUPS, dest="groups",
        help="only this group; may be repeated (default: run, source and dev); run: for MaxText; image: for images; "
        "cuda12: run, and the packages with which JAX uses NVIDIA GPUs (5 GB); cuda13: the same for drivers of 580 or "
        "later; compile-gpu: run, and what compiles for GPUs without having one (1.7 GB); data: run, and what reads "
        "Parquet files and datasets of Hugging Face and TensorFlow (2 GB); source: for jaxlib; dev: here")  # fmt: skip
    add("--mirror", metavar="URL", help="fetch NAME.git from URL/ instead of its upstream")
    text = "for this run take a component from a commit of another repository, such as file:///path/to/it@SHA"
    add("--override", action="append", default=[], metavar="NAME=URL@SHA", help=text)
    add("--force", action="store_true", help="drop changed or unknown trees")


def choose_groups(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the groups of the command line. With packages for GPUs come those that run on them."""
    groups = tuple(args.groups or manifest.GROUPS)
    more = {*manifest.CUDA, manifest.COMPILER, "data"}
    return ("run", *groups) if more & {*groups} and "run" not in groups else groups


def run(args: argparse.Namespace) -> None:
    """Bring components in; print the outcomes. A component that fails does not keep the others from coming."""
    if args.mirror and (fault := git.url_fault(args.mirror)):
        raise errors.OptionError(f"--mirror '{git.hide_password(args.mirror)}': {fault}")
    if args.names and args.groups:
        raise errors.OptionError("--group and names of components exclude each other: leave one out")
    rows, failures = sync(ROOT, args)
    print(console.table(("component", "action", "detail", "commit"), rows))
    if failures:
        raise ExceptionGroup("sync", failures)


def read_override(text: str) -> tuple[str, str]:
    """Read one ``--override``: a name, and ``URL@SHA``."""
    name, _, value = text.partition("=")
    url, at, commit = value.rpartition("@")
    if not name or not at or not git.COMMIT.fullmatch(commit):
        raise errors.OptionError(f"--override '{git.hide_password(text)}': write NAME=URL@SHA, with 40 hex digits")
    if fault := git.url_fault(url):
        raise errors.OptionError(f"--override {name}: '{git.hide_password(url)}' {fault}")
    return name, value


def sync(root: Path, args: argparse.Namespace) -> tuple[list[Row], list[Exception]]:
    """Bring components into place; return a row for each, and the errors of those that failed."""
    sources, pins = manifest.load(root / "sources.yaml"), manifest.load_lock(root / "sources.lock")
    overrides, groups = dict(map(read_override, args.override)), {*choose_groups(args)}
    components = [manifest.find(sources, name) for name in dict.fromkeys(args.names)]
    components = components or [component for component in sources.values() if groups & {*component.groups}]
    for name in overrides:
        if manifest.find(sources, name) not in components:
            there = ", ".join(component.name for component in components)
            raise errors.OptionError(f"--override {name}: is not among {there}; add it")
    components.sort(key=lambda component: bool(component.follows))  # after the trees that name their commits

    def choose(component: Component) -> Recipe:
        return make_recipe(root, component, pins, overrides.get(component.name, ""))

    def keep(component: Component) -> Row | None:
        """Return the row of a component whose place has what its recipe gives."""
        with contextlib.suppress(errors.SourceError):
            tree = observe(root, component.name, choose(component).key)
            if tree.state == "clean":
                return (component.name, "kept", "in place", tree.head[:12])
        return None

    rows, failures = list(filter(None, map(keep, components))), list[Exception]()
    killed = (root / "third_party" / ".stage").exists()  # what a run left there
    if len(rows) == len(components) and not killed:
        return rows, []  # looking needs no writing
    with stage(root) as folder:
        rows = []
        library = root / "third_party" / "multimesh"
        if not os.path.lexists(library):
            library.symlink_to("../multimesh")
        for component in components:
            try:
                rows.append(keep(component) or _bring(root, choose(component), folder, args))
            except (errors.ToolingError, OSError) as error:
                failures.append(error)
                rows.append((component.name, "failed", "left as it was", "-"))
    return rows, failures


def observe(root: Path, name: str, key: str) -> Tree:
    """Look at a folder of ``third_party/``, whose recipe has this key; reads only, and runs one ``git status``."""
    place = root / "third_party" / name
    if not os.path.lexists(place):
        return Tree("missing")
    record = None if place.is_symlink() else fetch.read_record(place)
    if record is None:
        return Tree("unknown")
    try:
        with git.open_repo(place) as repo:
            head = git.find_object(repo, "HEAD") or ""
            lines = git.run(repo, "status", "--porcelain", "-z", "--no-renames").split("\0")
            refs = git.run(repo, "for_each_ref", "--format=%(refname)", "refs/heads", "refs/stash").split()
    except errors.SourceError:
        return Tree("unknown", record=record)
    changed = tuple(line[3:] for line in lines if line)
    branches = tuple(ref for ref in refs if ref != f"refs/heads/{git.BRANCH}")
    state = "clean" if record.key == key else "outdated"
    return Tree("dirty" if changed else state if head == record.commit else "commits", head, record, changed, branches)


def _bring(root: Path, recipe: Recipe, folder: Path, args: argparse.Namespace) -> Row:
    """Build one component in ``folder``, and move it into place."""
    name, place = recipe.component.name, root / "third_party" / recipe.component.name
    tree = observe(root, name, recipe.key)
    if not args.force:
        _refuse(place, tree, recipe)
    record = fetch.build(root, recipe, folder, args.mirror)
    if tree.state != "missing":
        place.rename(folder / f"{name}.old")
    (folder / name).rename(place)
    detail = f"{record.version[:12]}, {len(recipe.series)} patches, from {record.source}"
    return (name, "created" if tree.state == "missing" else "replaced", detail, record.commit[:12])


def _refuse(place: Path, tree: Tree, recipe: Recipe) -> None:
    """Raise ``SourceError`` where a place has content that nobody could make again."""
    reason = "was not made by this tooling"
    if tree.state == "dirty":
        more = f" and {len(tree.changed) - 3} more" if len(tree.changed) > 3 else ""
        reason = f"has changes that no commit holds ({', '.join(tree.changed[:3])}{more})"
    elif tree.branches:
        reason = f"has branches or a stash of yours ({', '.join(tree.branches[:3])})"
    elif tree.state == "commits":
        with git.open_repo(place) as repo:
            if git.find_object(repo, "HEAD^{tree}") == (recipe.pin.patched_tree or ""):
                return  # the patches give the same files
        reason = f"is at {tree.head[:12]}, which nobody locked"
    elif tree.state != "unknown":
        return
    raise errors.SourceError(
        f"third_party/{place.name}: {reason}; make a patch of it (CONTRIBUTING.md, 'Add a patch'), move it away, or "
        "drop it with --force"
    )


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
    sources, pins, rows = manifest.load(ROOT / "sources.yaml"), manifest.load_lock(ROOT / "sources.lock"), []
    for name, component in sources.items():
        key, fault = "", ""
        try:
            key = make_recipe(ROOT, component, pins).key
        except errors.SourceError as error:
            fault = str(error)
        tree = observe(ROOT, name, key)
        state, record = tree.state, tree.record
        if fault and (state != "missing" or not component.follows):  # else it follows the tree that names its commit
            console.note(fault)
            state = "unlocked"
        if record and record.override:
            state = "overridden"
        version, count = component.version or (record.version if record else "-"), len(fetch.load_series(ROOT, name))
        state += f" ({len(tree.changed)} files)" if tree.changed else ""
        rows.append((name, ",".join(component.groups), version[:12], state, str(count), (tree.head or "-")[:12]))
    print(console.table(("component", "groups", "version", "state", "patches", "commit"), rows))
    return int(any(row[3] not in ("clean", "missing") for row in rows))
