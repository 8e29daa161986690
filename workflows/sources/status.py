"""What lies in ``third_party/`` against what the lock says; reads only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from workflows import console, errors
from workflows.sources import git, lock, manifest, patch, tree
from workflows.sources.lock import Pin
from workflows.sources.manifest import Component
from workflows.sources.workspace import Workspace

CLEAN = "clean"


@dataclass(frozen=True)
class Line:
    """One component: what is pinned, what is there, and how the two compare.

    Attributes
    ----------
    state
        ``clean`` is as locked; else ``missing``, ``dirty``, ``commits``, ``unknown``, ``outdated`` or ``overridden``.
    unpinned
        The names of pins that are null, because no source was read that says them.
    remedy
        What to run to make it clean; empty when it is.
    """

    name: str
    groups: tuple[str, ...]
    version: str
    state: str
    source: str
    commit: str | None
    patches: int
    changed: tuple[str, ...]
    unpinned: tuple[str, ...]
    remedy: str


def survey(workspace: Workspace) -> list[Line]:
    """Look at every component of the manifest."""
    wanted, pins = manifest.load(workspace.manifest), lock.load(workspace.lock)
    with ThreadPoolExecutor(max(1, len(wanted.components))) as pool:
        looks = list(pool.map(lambda each: tree.observe(workspace.place(each.name)), wanted.components))
    return [
        _link(workspace, component, look) if component.link else _fetched(workspace, component, look, pins)
        for component, look in zip(wanted.components, looks, strict=True)
    ]


def _link(workspace: Workspace, component: Component, look: tree.Observed) -> Line:
    right = look.state == "link" and (workspace.third_party / look.target).resolve() == workspace.root / component.link
    state = CLEAN if right else "missing" if look.state == "missing" else "overridden"
    remedy = "" if right else "python -m workflows sync"
    source = f"link to {look.target}" if look.state == "link" else "-"
    return Line(component.name, component.groups, "-", state, source, look.head, 0, look.changed, (), remedy)


def _fetched(workspace: Workspace, component: Component, look: tree.Observed, pins: dict[str, Pin]) -> Line:
    pin = pins.get(component.name)
    patches = patch.load_series(workspace.root, component.name)
    record = look.record
    state, remedy = _compare(component, pin, patches, look)
    return Line(
        component.name,
        component.groups,
        component.version,
        state,
        record.source if record else "-",
        look.head,
        len(patches),
        look.changed,
        pin.missing if pin else ("everything",),
        remedy,
    )


def _compare(
    component: Component, pin: Pin | None, patches: Sequence[patch.Patch], look: tree.Observed
) -> tuple[str, str]:
    """Return the state of a fetched component and what would make it clean."""
    name = component.name
    if pin is None or pin.version != component.version:
        return "unlocked", f"python -m workflows bump {name} {component.version}"
    if tuple((each.file, each.sha256) for each in patches) != pin.patches:
        return "patches changed", f"python -m workflows lock {name}"
    if look.state in ("dirty", "commits"):
        return look.state, f"python -m workflows refresh {name}"
    if look.state in ("unknown", "link"):
        return look.state, "python -m workflows sync --stash"
    if look.state == "clean" and look.record is not None and look.record.override is not None:
        return "overridden", "python -m workflows sync"
    if look.state == "missing" or look.head != pin.patched_commit:
        state = "missing" if look.state == "missing" else "outdated"
        return state, f"python -m workflows sync --group {component.groups[0]}"
    return CLEAN, ""


def clean(lines: Iterable[Line]) -> bool:
    """Say whether everything that is here is as locked; what was not fetched does not count."""
    return all(line.state in (CLEAN, "missing") for line in lines)


def as_table(lines: Sequence[Line]) -> str:
    """Return one table, and below it what is missing from the lock."""
    head = ("component", "groups", "version", "state", "patches", "commit", "from", "to do")
    rows = [
        (
            line.name,
            ",".join(line.groups),
            line.version[:12],
            line.state + (f" ({len(line.changed)} files)" if line.changed else ""),
            str(line.patches),
            (line.commit or "-")[:12],
            line.source,
            line.remedy or "-",
        )
        for line in lines
    ]
    notes = [f"{line.name}: sources.lock has no {', '.join(line.unpinned)}" for line in lines if line.unpinned]
    return "\n".join([console.table(head, rows), *notes])


def as_json(lines: Iterable[Line]) -> dict[str, Any]:
    """Return the table as plain data."""
    lines = list(lines)
    return {"clean": clean(lines), "components": [asdict(line) for line in lines]}


def diff(workspace: Workspace, names: Sequence[str]) -> str:
    """Return, as a patch, what was changed in these components (default: all) since the last sync, committed or not."""
    wanted = manifest.load(workspace.manifest)
    chosen = [wanted[name] for name in names] or [each for each in wanted.components if not each.link]
    parts = []
    for component in chosen:
        place = workspace.place(component.name)
        record = tree.read_record(place)
        if record is not None:
            parts.append(_diff_one(component.name, git.Repo(place), record))
        elif names:
            raise errors.UsageError(f"third_party/{component.name}: was not made by this tooling; run a sync first")
    return "".join(parts)


def _diff_one(name: str, repo: git.Repo, record: tree.Record) -> str:
    prefix = (f"--src-prefix=a/third_party/{name}/", f"--dst-prefix=b/third_party/{name}/")
    changed = repo("diff", "--binary", "--no-ext-diff", "--no-textconv", *prefix, record.commit, "--").stdout
    new = repo("ls-files", "--others", "--exclude-standard", "-z").stdout.decode("utf-8", "surrogateescape")
    untracked = "".join(f"# untracked: third_party/{name}/{path}\n" for path in new.split("\0") if path)
    return changed.decode("utf-8", "replace") + untracked
