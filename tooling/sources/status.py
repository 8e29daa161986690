"""``status``: compares ``third_party/`` with the lock."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tooling.core import console, errors, proc
from tooling.core.console import Subparsers, command
from tooling.sources import manifest, patch
from tooling.sources.manifest import Component, Pin
from tooling.sources.named import resolve
from tooling.sources.workspace import Observed, Workspace, observe


class Line(NamedTuple):
    """One component: its pin, its tree, and how the two compare.

    ``state`` is ``clean`` where the tree is as locked, else ``missing``, ``dirty``, ``commits``, ``unknown``,
    ``unlocked``, ``patches changed``, ``outdated`` or ``overridden``; ``remedy`` is then the command that makes it
    clean.
    """

    name: str
    groups: tuple[str, ...]
    version: str
    state: str
    source: str
    commit: str | None
    patches: int
    changed: tuple[str, ...]
    remedy: str


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    examples = ["python -m tooling status"]
    parser = command(subparsers, "status", run, "show every component against its pin", examples)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print a table, or JSON, of all components; exit 0 if all trees that are here are as locked."""
    here = Workspace()
    components, pins = manifest.load(here.manifest).components, manifest.load_lock(here.lock)
    lines = proc.together(*(partial(_line, here, each, pins) for each in components))
    clean = all(line.state in ("clean", "missing") for line in lines)
    if args.json:
        print(json.dumps({"clean": clean, "components": [line._asdict() for line in lines]}, indent=1))
        return 0 if clean else 1
    rows = []
    for line in lines:
        state = line.state + (f" ({len(line.changed)} files)" if line.changed else "")
        held = (str(line.patches), (line.commit or "-")[:12], line.source, line.remedy or "-")
        rows.append((line.name, ",".join(line.groups), line.version[:12], state, *held))
    print(console.table(("component", "groups", "version", "state", "patches", "commit", "from", "to do"), rows))
    return 0 if clean else 1


def _line(here: Workspace, component: Component, pins: Mapping[str, Pin]) -> Line:
    look = observe(here.place(component.name))
    if component.link:
        right = look.state == "link" and (here.third_party / look.target).resolve() == here.root / component.link
        state, remedy = ("clean", "") if right else ("missing" if look.state == "missing" else "overridden", "sync")
        version, count = "-", 0
        source = f"link to {look.target}" if look.state == "link" else "-"
    else:
        patches = patch.load_series(here.root, component.name)
        state, remedy = _compare(here, component, pins, patches, look)
        version = component.version or (look.record.version if look.record else "-")
        count = len(patches)
        source = look.record.source if look.record else "-"
    todo = remedy and f"python -m tooling {remedy}"
    return Line(component.name, component.groups, version, state, source, look.head, count, look.changed, todo)


def _compare(
    here: Workspace, component: Component, pins: Mapping[str, Pin], patches: Sequence[patch.Patch], look: Observed
) -> tuple[str, str]:
    """Return the state of a fetched component and the command that would make it clean."""
    name = component.name
    try:
        pin = resolve(here, component, pins)[1]
    except errors.PinError:
        if component.follows:
            return ("missing" if look.state == "missing" else "outdated"), f"sync {component.follows} {name}"
        return "unlocked", f"bump {name} {component.version}"
    if patch.digests(patches) != pin.patches:
        return "patches changed", f"lock {name}"
    if look.state in ("dirty", "commits"):
        return look.state, f"refresh {name}"
    if look.state in ("unknown", "link"):
        return look.state, f"sync {name}"
    if look.record is not None and look.record.override is not None:
        return "overridden", f"sync {name}"
    if look.state == "missing" or look.record is None:
        return "missing", f"sync {name}"
    current = look.head == pin.patched_commit
    if component.follows:
        current = (look.record.version, look.record.series) == (pin.version, patch.digest(patches))
    return ("clean", "") if current else ("outdated", f"sync {name}")
