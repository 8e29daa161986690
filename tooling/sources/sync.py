"""Brings ``third_party/`` to the state of the lock: looks, decides, builds in a stage, moves into place."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tooling.core import console, errors, proc
from tooling.core.console import Subparsers, command
from tooling.sources import assemble, git, manifest, patch
from tooling.sources.assemble import Means, Recipe
from tooling.sources.manifest import Component, Pin
from tooling.sources.named import resolve
from tooling.sources.workspace import Observed, Workspace, observe, read_record

_AT_ONCE = 4  # components
Override = Path | tuple[str, str]
"""The user's replacement of a component: a folder of this machine, or a url and a commit."""


class Options(NamedTuple):
    """The components to sync, by name or else of groups, and how."""

    groups: tuple[str, ...]
    names: tuple[str, ...] = ()
    offline: bool = False
    force: bool = False
    mirror: str | None = None
    overrides: Mapping[str, Override] = MappingProxyType({})


class Wish(NamedTuple):
    """The wanted content of one place: the tree of a recipe, or a link.

    ``fault`` where neither is known yet: the tree that names its commit is not there.
    """

    name: str
    recipe: Recipe | None = None
    target: str = ""
    fault: errors.ToolingError | None = None


class Outcome(NamedTuple):
    """The outcome for one component."""

    name: str
    action: str  # kept, created, replaced or failed
    detail: str
    commit: str | None = None
    tree: str | None = None
    source: str | None = None
    error: str | None = None
    exit_code: int = 0


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = command(
        subparsers, "sync", run, "bring third_party/ to what sources.lock says",
        ["python -m tooling sync", "python -m tooling sync jax", "python -m tooling sync --override multimesh=../mm"],
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="components, in place of those of groups")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``sync`` and ``bootstrap`` share."""
    add = parser.add_argument
    add("--group", action="append", choices=manifest.ALL_GROUPS, dest="groups",
        help="only this group; may be repeated (default: run, source and dev); run: for MaxText; image: for images; "
        "cuda12: run, and the packages with which JAX uses NVIDIA GPUs (5 GB); cuda13: the same for drivers of 580 or "
        "later; compile-gpu: run, and what compiles for GPUs without having one (1.7 GB); data: run, and what reads "
        "Parquet files and datasets of Hugging Face and TensorFlow (2 GB); source: for jaxlib; dev: here")  # fmt: skip
    add("--offline", action="store_true", help="use only what is on this disk")
    add("--mirror", metavar="URL", help="fetch NAME.git from URL/ instead of its upstream")
    text = "for this run take a component from a folder (as a link) or from a commit of another repository"
    add("--override", action="append", default=[], metavar="NAME=PATH|URL@SHA", help=text)
    add("--json", action="store_true", help="print the outcome as JSON")
    add("--force", action="store_true", help="drop changed or unknown trees")


def choose_groups(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the groups that were asked for. With packages for GPUs come those that run on them."""
    found = tuple(args.groups or manifest.GROUPS)
    return ("run", *found) if set(found) & {*manifest.CUDA, manifest.COMPILER, "data"} and "run" not in found else found


def run(args: argparse.Namespace) -> None:
    """Bring components in; print the outcomes."""
    if args.mirror and (fault := git.url_fault(args.mirror)):
        raise errors.UsageError(f"--mirror '{git.hide_password(args.mirror)}': {fault}")
    if args.offline and args.mirror:
        raise errors.UsageError("--offline and --mirror exclude each other: leave one out")
    plain = {key: getattr(args, key) for key in ("offline", "force", "mirror")}
    names = tuple(getattr(args, "names", ()))
    if names and args.groups:
        raise errors.UsageError("--group and names of components exclude each other: leave one out")
    options = Options(choose_groups(args), names, overrides=dict(_override(text) for text in args.override), **plain)
    with console.Reporter() as reporter:
        outcomes = sync(Workspace(), options, reporter)
    if args.json:
        print(json.dumps({"components": [each._asdict() for each in outcomes]}, indent=1))
    else:
        rows = [(each.name, each.action, each.detail, (each.commit or "-")[:12]) for each in outcomes]
        print(console.table(("component", "action", "detail", "commit"), rows))
    if failed := [each for each in outcomes if each.error]:
        raise errors.SeveralErrors([str(each.error) for each in failed], failed[0].exit_code)


def _override(text: str) -> tuple[str, Override]:
    """Read one ``--override``."""
    name, found, value = text.partition("=")
    if not found or not name or not value:
        raise errors.UsageError(f"--override '{text}': write NAME=PATH or NAME=URL@SHA")
    url, at, commit = value.rpartition("@")
    if "://" not in value and "::" not in value and not value.startswith("-"):
        folder = Path(os.path.abspath(os.path.expanduser(value)))
        if not folder.is_dir():
            raise errors.UsageError(f"--override {name}: {folder} is not a folder")
        return name, folder
    if not at or not git.COMMIT.fullmatch(commit):
        raise errors.UsageError(
            f"--override {name}: '{git.hide_password(value)}' needs a full commit after the url: URL@40-hex-digits"
        )
    if fault := git.url_fault(url):
        raise errors.UsageError(f"--override {name}: '{git.hide_password(url)}' {fault}")
    return name, (url, commit)


def sync(here: Workspace, options: Options, reporter: console.Reporter) -> list[Outcome]:
    """Bring every component of the wanted groups into place; failures are outcomes, so that the others still arrive."""
    wanted, pins = manifest.load(here.manifest), manifest.load_lock(here.lock)
    named = tuple(map(wanted.named, dict.fromkeys(options.names))) or wanted.of(options.groups)
    for name in options.overrides:
        if wanted.named(name) not in named:
            raise errors.UsageError(f"--override {name}: is not among {', '.join(each.name for each in named)}; add it")

    def wishes(*, follow: bool) -> list[Wish]:
        mine = [each for each in named if follow == bool(each.follows and each.name not in options.overrides)]
        return [_wish(here, each, pins, options.overrides.get(each.name)) for each in mine]

    first = wishes(follow=False)
    if all(_right(wish, observe(here.place(wish.name))) for wish in (*first, *wishes(follow=True))):
        return [_keep(here, each.name) for each in named]  # looking needs no writing
    with here.exclusive(), here.stage() as stage:
        means = Means(stage, reporter, offline=options.offline, mirror=options.mirror)
        bring = partial(_outcome, here, options=options, means=means)
        outcomes = proc.together(*(partial(bring, wish) for wish in first), at_once=_AT_ONCE)
        second = wishes(follow=True)  # when the trees that name their commits are there
        outcomes += proc.together(*(partial(bring, wish) for wish in second), at_once=_AT_ONCE)
    return outcomes


def _wish(here: Workspace, component: Component, pins: Mapping[str, Pin], override: Override | None) -> Wish:
    """Return the wanted content of each place."""
    name = component.name
    if isinstance(override, Path):
        return Wish(name, target=str(override))
    if override is not None:
        url, commit = override
        fork = Component(name, component.groups, url, commit, path=component.path)
        patches = patch.load_series(here.root, name)
        return Wish(name, Recipe(fork, Pin(commit, commit, None), patches, f"{url}@{commit}"))
    if not component.link:
        try:
            return Wish(name, make_recipe(here, component, pins))
        except errors.ToolingError as error:
            if not component.follows:
                raise
            return Wish(name, fault=error)
    folder = here.root / component.link
    if not folder.is_dir() or folder.resolve() != here.root.resolve() / component.link:
        raise errors.ManifestError(f"sources.yaml: {name}: link '{component.link}' is no folder of this repository")
    return Wish(name, target=os.path.relpath(folder, here.third_party))


def make_recipe(here: Workspace, component: Component, pins: Mapping[str, Pin]) -> Recipe:
    """Return the recipe of a component, if the lock and its patches agree."""
    component, pin = resolve(here, component, pins)
    name = component.name
    patches = patch.load_series(here.root, name)
    found = patch.digests(patches)
    if found != pin.patches:
        names = sorted({file for file, _ in set(found) ^ set(pin.patches)}) or ["their order"]
        raise errors.PinError(
            f"patches/{name}: sources.lock does not have {', '.join(names)} as on disk; "
            f"run `python -m tooling lock {name}` if the change is meant"
        )
    if pin.patched_commit is None and not component.follows:
        raise errors.PinError(f"{name}: sources.lock has no patched_commit; run `python -m tooling lock {name}`")
    return Recipe(component, pin, patches)


def _right(wish: Wish, look: Observed) -> bool:
    """Say whether a place has its wanted content."""
    if wish.fault is not None:
        return False
    if wish.recipe is None:
        return look.state == "link" and look.target == wish.target
    record, recipe = look.record, wish.recipe
    if look.state != "clean" or record is None or record.override != recipe.override:
        return False
    if recipe.override is not None or recipe.component.follows:
        return (record.version, record.series) == (recipe.component.version, patch.digest(recipe.patches))
    return record.commit == recipe.pin.patched_commit


def _refusal(look: Observed) -> str | None:
    """Say why the content of a place may not simply be replaced, or return None. A link holds nothing itself."""
    if look.state == "dirty":
        more = f" and {len(look.changed) - 3} more" if len(look.changed) > 3 else ""
        return f"has changes that no commit holds ({', '.join(look.changed[:3])}{more})"
    if look.state == "commits":
        return f"is at {(look.head or 'no commit')[:12]}, which nobody locked"
    if look.state == "unknown":
        return "was not made by this tooling"
    return None


def _keep(here: Workspace, name: str) -> Outcome:
    place = here.place(name)
    if place.is_symlink():
        return Outcome(name, "kept", f"link to {os.readlink(place)}")
    record = read_record(place)
    return Outcome(name, "kept", "in place", *((record.commit, None, record.source) if record else ()))


def _outcome(here: Workspace, wish: Wish, options: Options, means: Means) -> Outcome:
    """Bring one component into place."""
    try:
        look = observe(here.place(wish.name))
        if _right(wish, look):
            return _keep(here, wish.name)
        refusal = _refusal(look)
        if refusal and not options.force:
            raise errors.DirtyTreeError(
                f"third_party/{wish.name}: {refusal}; keep it with `python -m tooling refresh {wish.name}`, "
                "move it away, or drop it with --force"
            )
        action = "created" if look.state == "missing" else "replaced"
        if wish.fault is not None:
            raise wish.fault
        return _place(here, wish, action, means.seeded(here, wish.name))
    except errors.ToolingError as error:
        message, code = str(error), error.exit_code
    except OSError as error:
        message, code = f"{wish.name}: {errors.disk_message(error)}", errors.DiskError.exit_code
    means.reporter.done(wish.name, "failed")
    return Outcome(wish.name, "failed", "left as it was", error=message, exit_code=code)


def _place(here: Workspace, wish: Wish, action: str, means: Means) -> Outcome:
    if wish.recipe is None:
        new = means.stage / wish.name
        new.symlink_to(wish.target)
        here.swap(new, wish.name, means.stage)
        return Outcome(wish.name, action, f"link to {wish.target}")
    built = assemble.build(wish.recipe, means)
    here.swap(means.stage / wish.name, wish.name, means.stage)
    detail = f"{wish.recipe.component.version[:12]}, {len(wish.recipe.patches)} patches"
    means.reporter.done(wish.name, f"{action} {detail}")
    return Outcome(wish.name, action, detail, built.commit, built.tree, built.source)
