"""The commands that change pins and patches: ``lock``, ``refresh``, ``bump``, ``gc``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from workflows import console
from workflows.sources import build, lock, manifest, patch
from workflows.sources.commands import workspace
from workflows.sources.lock import Pin
from workflows.sources.manifest import Component
from workflows.sources.workspace import Workspace


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    parser = subparsers.add_parser("lock", help="record the patches as they are on disk, and what they give")
    parser.add_argument("names", nargs="*", metavar="NAME", help="components (default: all whose patches changed)")
    parser.set_defaults(func=run_lock)


def run_lock(args: argparse.Namespace) -> int:
    """Rewrite the patch entries of ``sources.lock``; the pins of upstreams stay."""
    here = workspace()
    wanted, pins = manifest.load(here.manifest), lock.load(here.lock)
    names = args.names or [each.name for each in wanted.components if not each.link]
    with here.exclusive(), console.Reporter() as reporter:
        for name in names:
            component = wanted[name]
            pins[name] = repin(here, component, lock.pin_of(component, pins), reporter, always=bool(args.names))
            lock.save(here.lock, wanted, pins)
    return 0


def repin(here: Workspace, component: Component, pin: Pin, reporter: console.Reporter, *, always: bool) -> Pin:
    """Return the pin with the patches on disk and what they give, built aside from bytes on this disk or else fetched."""
    patches = patch.load_series(here.root, component.name)
    files = tuple((each.file, each.sha256) for each in patches)
    if files == pin.patches and pin.patched_commit and not always:
        return pin
    pin = replace(pin, patches=files)
    if not patches and component.keeps_upstream_commit:
        return replace(pin, patched_commit=pin.commit, patched_tree=pin.tree)
    recipe = build.Recipe(component, pin, patches)
    with here.stage() as (stage, left):
        seeds = build.seeds(here, component.name, left)
        built = build.build(recipe, stage, build.Means(seeds, False, None), reporter, verify=False)
    reporter.done(component.name, f"locked {len(patches)} patches, {built.record.commit[:12]}")
    return replace(pin, patched_commit=built.record.commit, patched_tree=built.tree)
