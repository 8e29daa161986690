"""Makes ``third_party/`` hold what the lock says: looks, decides, builds in a stage, moves into place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from workflows import console, errors, proc
from workflows.sources import assemble, lock, manifest, patch, quick, tree
from workflows.sources.assemble import Means, Recipe
from workflows.sources.manifest import Component
from workflows.sources.workspace import Workspace


@dataclass(frozen=True)
class Override:
    """What the user wants in place of a component: a folder of this machine, or a commit of some url."""

    folder: Path | None = None
    url: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Options:
    """What to sync and how."""

    groups: tuple[str, ...]
    jobs: int = 4
    offline: bool = False
    dry_run: bool = False
    stash: bool = False
    force: bool = False
    mirror: str | None = None
    overrides: Mapping[str, Override] = field(default_factory=dict)


@dataclass(frozen=True)
class Wish:
    """What should lie at one place: the tree of a recipe, or a link."""

    component: Component
    recipe: Recipe | None = None
    target: str = ""


@dataclass(frozen=True)
class Outcome:
    """What happened to one component, or in a dry run: what would."""

    name: str
    action: Literal["kept", "created", "replaced", "failed"]
    detail: str
    commit: str | None = None
    tree: str | None = None
    source: str | None = None
    error: str | None = None
    exit_code: int = 0


def sync(workspace: Workspace, options: Options, reporter: console.Reporter) -> list[Outcome]:
    """Bring every component of the wanted groups into place; failures are outcomes, so that the others still arrive."""
    if not options.overrides and (kept := quick.in_place(str(workspace.root), list(options.groups))) is not None:
        return [_kept(workspace, name) for name in kept]
    wishes = decide(workspace, options)
    if options.dry_run:
        return [_forecast(workspace, wish, options) for wish in wishes]
    with workspace.exclusive(), workspace.stage() as (stage, left):
        quick.forget(str(workspace.root))
        inputs = quick.signature(str(workspace.root), quick.SOURCES)
        outcomes = _run_all(workspace, wishes, options, stage, left, reporter)
        if not options.overrides:
            _remember(workspace, inputs, wishes, outcomes)
    return outcomes


def decide(workspace: Workspace, options: Options) -> list[Wish]:
    """Read manifest, lock and patches, and say what should lie where."""
    wanted = manifest.load(workspace.manifest)
    pins = lock.load(workspace.lock)
    for name in options.overrides:
        if wanted[name] not in wanted.of(options.groups):
            raise errors.UsageError(f"--override {name}: not in the groups {', '.join(options.groups)}; add its group")
    return [_wish(workspace, component, pins, options) for component in wanted.of(options.groups)]


def _wish(workspace: Workspace, component: Component, pins: Mapping[str, lock.Pin], options: Options) -> Wish:
    override = options.overrides.get(component.name)
    if override is not None and override.folder is not None:
        return Wish(component, target=str(override.folder))
    if override is not None:
        blank = Recipe(component, lock.Pin("", None, None), patch.load_series(workspace.root, component.name))
        return Wish(component, assemble.overridden(blank, override.url, override.commit))
    if component.link:
        folder = workspace.root / component.link
        if not folder.is_dir() or folder.resolve() != workspace.root.resolve() / component.link:
            raise errors.ManifestError(
                f"sources.yaml: {component.name}: link '{component.link}' is no folder of this repository"
            )
        return Wish(component, target=os.path.relpath(folder, workspace.third_party))
    return Wish(component, locked_recipe(workspace, component, pins))


def locked_recipe(workspace: Workspace, component: Component, pins: Mapping[str, lock.Pin]) -> Recipe:
    """Return the recipe of a component, if the lock and its patches agree."""
    pin = lock.pin_of(component, pins)
    patches = patch.load_series(workspace.root, component.name)
    found = tuple((each.file, each.sha256) for each in patches)
    if found != pin.patches:
        names = sorted({file for file, _ in set(found) ^ set(pin.patches)}) or ["their order"]
        raise errors.PinError(
            f"patches/{component.name}: sources.lock does not have {', '.join(names)} as on disk; "
            f"run `python -m workflows lock {component.name}` if the change is meant"
        )
    if pin.patched_commit is None:
        raise errors.PinError(
            f"{component.name}: sources.lock has no patched_commit; run `python -m workflows lock {component.name}`"
        )
    return Recipe(component, pin, patches)


def _right(workspace: Workspace, wish: Wish, look: tree.Observed) -> bool:
    """Say whether what lies there is what should."""
    if wish.recipe is None:
        return look.state == "link" and look.target == wish.target
    record, recipe = look.record, wish.recipe
    if look.state != "clean" or record is None or record.override != recipe.override:
        return False
    if recipe.override is not None:
        return record.series == patch.digest(recipe.patches)
    return record.commit == recipe.pin.patched_commit


def _refusal(workspace: Workspace, wish: Wish, look: tree.Observed) -> str | None:
    """Say why what lies there may not simply be replaced, or return None."""
    where = f"third_party/{wish.component.name}"
    if look.state == "dirty":
        more = f" and {len(look.changed) - 3} more" if len(look.changed) > 3 else ""
        return f"{where}: has changes that no commit holds ({', '.join(look.changed[:3])}{more})"
    if look.state == "commits":
        return f"{where}: is at {(look.head or 'no commit')[:12]}, which nobody locked"
    if look.state == "unknown":
        return f"{where}: was not made by this tooling"
    if look.state == "link" and workspace.links().get(wish.component.name) != look.target:
        return f"{where}: is a link to {look.target} that this tooling did not make"
    return None


def _choices(name: str) -> str:
    return f"keep it with `python -m workflows refresh {name}`, put it aside with --stash, or drop it with --force"


def _forecast(workspace: Workspace, wish: Wish, options: Options) -> Outcome:
    """Say what a sync would do."""
    name, look = wish.component.name, tree.observe(workspace.place(wish.component.name))
    if _right(workspace, wish, look):
        return _kept(workspace, name)
    refusal = _refusal(workspace, wish, look)
    if refusal and not (options.stash or options.force):
        message = f"{refusal}; {_choices(name)}"
        return Outcome(name, "failed", "refused", error=message, exit_code=errors.DirtyTreeError.exit_code)
    action: Literal["created", "replaced"] = "created" if look.state == "missing" else "replaced"
    if wish.recipe is None:
        return Outcome(name, action, f"link to {wish.target}")
    pin, component = wish.recipe.pin, wish.recipe.component
    ways = " or ".join(transport.kind for transport in component.transports)
    return Outcome(
        name,
        action,
        f"{component.version} by {ways}, {len(wish.recipe.patches)} patches",
        pin.patched_commit,
        pin.patched_tree,
    )


def _kept(workspace: Workspace, name: str) -> Outcome:
    place = workspace.place(name)
    if place.is_symlink():
        return Outcome(name, "kept", f"link to {os.readlink(place)}")
    record = tree.read_record(place)
    return Outcome(
        name, "kept", "in place", record.commit if record else None, source=record.source if record else None
    )


def _run_all(
    workspace: Workspace,
    wishes: list[Wish],
    options: Options,
    stage: Path,
    left: tuple[Path, ...],
    reporter: console.Reporter,
) -> list[Outcome]:
    """Work on all components, some at a time; an interrupt stops them all and leaves what is finished."""
    done: dict[str, Outcome] = {}
    with ThreadPoolExecutor(options.jobs, thread_name_prefix="sync") as pool:
        running: dict[Future[Outcome], str] = {
            pool.submit(_guarded, workspace, wish, options, stage, left, reporter): wish.component.name
            for wish in wishes
        }
        try:
            pending = set(running)
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                done |= {running[future]: future.result() for future in finished}
        except BaseException:
            proc.stop_all()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    links = workspace.links() | {
        wish.component.name: wish.target
        for wish in wishes
        if wish.recipe is None and done[wish.component.name].action != "failed"
    }
    if links != workspace.links():
        workspace.save_links(links)
    return [done[wish.component.name] for wish in wishes]


def _guarded(
    workspace: Workspace,
    wish: Wish,
    options: Options,
    stage: Path,
    left: tuple[Path, ...],
    reporter: console.Reporter,
) -> Outcome:
    name = wish.component.name
    try:
        return _sync_one(workspace, wish, options, stage, left, reporter)
    except errors.WorkflowsError as error:
        message, code = str(error), error.exit_code
    except OSError as error:
        message, code = f"{name}: {errors.disk_message(error)}", errors.DiskError.exit_code
    reporter.done(name, "failed")
    return Outcome(name, "failed", "left as it was", error=message, exit_code=code)


def _sync_one(
    workspace: Workspace,
    wish: Wish,
    options: Options,
    stage: Path,
    left: tuple[Path, ...],
    reporter: console.Reporter,
) -> Outcome:
    name = wish.component.name
    place = workspace.place(name)
    look = tree.observe(place)
    if _right(workspace, wish, look):
        return _kept(workspace, name)
    refusal = _refusal(workspace, wish, look)
    if refusal and not (options.stash or options.force):
        raise errors.DirtyTreeError(f"{refusal}; {_choices(name)}")
    stash = bool(refusal) and options.stash
    action: Literal["created", "replaced"] = "created" if look.state == "missing" else "replaced"
    if wish.recipe is None:
        new = stage / name
        new.symlink_to(wish.target)
        kept = workspace.swap(new, name, stage, stash=stash)
        return Outcome(name, action, f"link to {wish.target}" + (f"; the old one is at {kept}" if kept else ""))
    seeds = assemble.seeds(workspace, name, left)
    built = assemble.build(wish.recipe, stage, Means(seeds, options.offline, options.mirror), reporter)
    kept = workspace.swap(built.folder, name, stage, stash=stash)
    detail = f"{wish.recipe.component.version[:12]}, {len(wish.recipe.patches)} patches"
    reporter.done(name, f"{action} {detail}" + (f"; the old tree is at {kept}" if kept else ""))
    return Outcome(name, action, detail, built.record.commit, built.tree, built.record.source)


def _remember(workspace: Workspace, inputs: str, wishes: list[Wish], outcomes: list[Outcome]) -> None:
    """Leave the note for ``quick``; components that failed, or of other groups, hold nothing yet."""
    holds = {wish.component.name: f"->{wish.target}" for wish in wishes if wish.recipe is None}
    holds |= {outcome.name: outcome.commit for outcome in outcomes if outcome.commit}
    failed = {outcome.name for outcome in outcomes if outcome.action == "failed"}
    components = manifest.load(workspace.manifest).components
    lines = [(each.name, each.groups, "" if each.name in failed else holds.get(each.name, "")) for each in components]
    quick.remember(str(workspace.root), inputs, lines)


def failure(outcomes: list[Outcome]) -> errors.WorkflowsError | None:
    """Return one error for all failed components; its exit code is that of the first."""
    failed = [outcome for outcome in outcomes if outcome.error]
    if not failed:
        return None
    return errors.SeveralErrors([str(outcome.error) for outcome in failed], failed[0].exit_code)


def as_json(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return outcomes as plain data."""
    return {"components": [asdict(outcome) for outcome in outcomes]}
