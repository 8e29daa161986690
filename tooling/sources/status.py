"""Compares ``third_party/`` with the lock."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from tooling.core import console
from tooling.core.console import Subparsers, command
from tooling.sources import lock, manifest, patch
from tooling.sources.lock import Pin
from tooling.sources.manifest import Component
from tooling.sources.workspace import Observed, Workspace, observe

CLEAN, _COMMAND = "clean", "python -m tooling"


@dataclass(frozen=True)
class Line:
    """One component: its pin, its tree, and how the two compare.

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


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    examples = ["python -m tooling status"]
    parser = command(subparsers, "status", run, "show every component against its pin", examples)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print a table, or JSON, of all components; exit 0 if all that is here is as locked."""
    lines = survey(Workspace())
    right = clean(lines)
    if args.json:
        print(json.dumps({"clean": right, "components": [asdict(line) for line in lines]}, indent=1))
    else:
        print(as_table(lines))
    return 0 if right else 1


def survey(here: Workspace) -> list[Line]:
    """Look at every component of the manifest."""
    components, pins = manifest.load(here.manifest).components, lock.load(here.lock)
    with ThreadPoolExecutor(max(1, len(components))) as pool:
        looks = pool.map(lambda each: observe(here.place(each.name)), components)
    return [
        _line(here, component, pins.get(component.name), look)
        for component, look in zip(components, looks, strict=True)
    ]


def _line(here: Workspace, component: Component, pin: Pin | None, look: Observed) -> Line:
    name, groups = component.name, component.groups
    if component.link:
        right = look.state == "link" and (here.third_party / look.target).resolve() == here.root / component.link
        state = CLEAN if right else "missing" if look.state == "missing" else "overridden"
        source, remedy = f"link to {look.target}" if look.state == "link" else "-", "" if right else f"{_COMMAND} sync"
        return Line(name, groups, "-", state, source, look.head, 0, look.changed, (), remedy)
    patches = patch.load_series(here.root, name)
    state, remedy = _compare(component, pin, patches, look)
    source, unpinned = look.record.source if look.record else "-", pin.missing if pin else ("everything",)
    remedy = remedy and f"{_COMMAND} {remedy}"
    return Line(name, groups, component.version, state, source, look.head, len(patches), look.changed, unpinned, remedy)


def _compare(component: Component, pin: Pin | None, patches: Sequence[patch.Patch], look: Observed) -> tuple[str, str]:
    """Return the state of a fetched component and the command that would make it clean."""
    name = component.name
    if pin is None or pin.version != component.version:
        return "unlocked", f"bump {name} {component.version}"
    if patch.digests(patches) != pin.patches:
        return "patches changed", f"lock {name}"
    if look.state in ("dirty", "commits"):
        return look.state, f"refresh {name}"
    if look.state in ("unknown", "link"):
        return look.state, "sync --stash"
    if look.record is not None and look.record.override is not None:
        return "overridden", "sync"
    if look.state == "missing" or look.head != pin.patched_commit:
        return "missing" if look.state == "missing" else "outdated", f"sync --group {component.groups[0]}"
    return CLEAN, ""


def clean(lines: Iterable[Line]) -> bool:
    """Say whether all trees here are as locked. A component that was not fetched does not count."""
    return all(line.state in (CLEAN, "missing") for line in lines)


def as_table(lines: Sequence[Line]) -> str:
    """Return one table, and below it the pins that the lock lacks."""
    rows = []
    for line in lines:
        state = line.state + (f" ({len(line.changed)} files)" if line.changed else "")
        held = (str(line.patches), (line.commit or "-")[:12], line.source, line.remedy or "-")
        rows.append((line.name, ",".join(line.groups), line.version[:12], state, *held))
    table = console.table(("component", "groups", "version", "state", "patches", "commit", "from", "to do"), rows)
    notes = [f"{line.name}: sources.lock has no {', '.join(line.unpinned)}" for line in lines if line.unpinned]
    return "\n".join([table, *notes])
