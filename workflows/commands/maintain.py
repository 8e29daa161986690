"""The commands that change pins and patches: ``lock``, ``refresh``, ``bump``, ``gc``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from workflows import console, errors, helping
from workflows.sources import assemble, lock, manifest, patch, quick, tidy
from workflows.sources.lock import Pin
from workflows.sources.manifest import Component
from workflows.sources.workspace import Workspace, workspace


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    parser = subparsers.add_parser(
        "lock",
        **helping.shown(
            "record the patches as they are on disk, and what they give", "python -m workflows lock maxtext"
        ),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="components (default: all whose patches changed)")
    parser.set_defaults(func=run_lock)
    parser = subparsers.add_parser(
        "refresh",
        **helping.shown(
            "turn the commits in third_party/NAME into its patch series", "python -m workflows refresh maxtext"
        ),
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="components")
    parser.set_defaults(func=run_refresh)
    parser = subparsers.add_parser(
        "bump",
        **helping.shown(
            "move a component to another version, with its patches; or fill images.lock",
            "python -m workflows bump maxtext 0.2.5",
            "python -m workflows bump images",
        ),
    )
    parser.add_argument("name", metavar="NAME", help="component, or `images` for the base images")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="its new version; a commit where it has no tags")
    parser.add_argument("--mirror", metavar="URL", help="ask URL/ instead of the upstream")
    parser.set_defaults(func=run_bump)
    parser = subparsers.add_parser(
        "gc", **helping.shown("remove what nothing needs from third_party/", "python -m workflows gc --dry-run")
    )
    parser.add_argument("--stashes", action="store_true", help="also the trees that --stash put aside")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")
    parser.set_defaults(func=run_gc)


def run_lock(args: argparse.Namespace) -> int:
    """Rewrite the patch entries of ``sources.lock``; the pins of upstreams stay."""
    here = workspace()
    wanted, pins = manifest.load(here.manifest), lock.load(here.lock)
    chosen = [wanted[name] for name in args.names] or list(wanted.components)
    with here.exclusive(), console.Reporter() as reporter:
        for component in chosen:
            if component.link:
                continue
            pin = lock.pin_of(component, pins)
            pins[component.name] = repin(here, component, pin, reporter, always=bool(args.names))
            lock.save(here.lock, wanted, pins)
    return 0


def repin(here: Workspace, component: Component, pin: Pin, reporter: console.Reporter, *, always: bool) -> Pin:
    """Return the pin with the patches on disk and what they give when built aside."""
    patches = patch.load_series(here.root, component.name)
    files = tuple((each.file, each.sha256) for each in patches)
    if files == pin.patches and pin.patched_commit and not always:
        return pin
    pin = replace(pin, patches=files)
    if not patches and component.keeps_upstream_commit:
        return replace(pin, patched_commit=pin.commit, patched_tree=pin.tree)
    with here.stage() as (stage, left):
        means = assemble.Means(assemble.seeds(here, component.name, left), False, None)
        built = assemble.build(assemble.Recipe(component, pin, patches), stage, means, reporter, verify=False)
    reporter.done(component.name, f"locked {len(patches)} patches, {built.record.commit[:12]}")
    return replace(pin, patched_commit=built.record.commit, patched_tree=built.tree)


def run_refresh(args: argparse.Namespace) -> int:
    """Write the patch series of components anew from their commits, and lock it."""
    from workflows.sources import refresh

    here = workspace()
    wanted = manifest.load(here.manifest)
    with here.exclusive():
        for name in args.names:
            component, pins = wanted[name], lock.load(here.lock)
            if component.link:
                raise errors.UsageError(f"{name}: is a link to {component.link}; there is nothing to refresh")
            pin, series = refresh.refresh(here, component, lock.pin_of(component, pins))
            lock.save(here.lock, wanted, pins | {name: pin})
            print(f"{name}: {len(series)} patches, {(pin.patched_commit or '-')[:12]}")
            for each in series:
                print(f"  {each.file}")
        quick.forget(str(here.root))
    return 0


def run_bump(args: argparse.Namespace) -> int:
    """Pin another version, if its patches apply there."""
    from workflows.sources import bump

    here = workspace()
    if args.name == "images":
        from workflows.image import digests as images

        if args.version or args.mirror:
            raise errors.UsageError("bump images: takes no version and no --mirror; it asks where images.lock points")
        return images.run(here.root)
    if args.version is None:
        raise errors.UsageError(f"bump {args.name}: to which version? Give it after the name")
    with here.exclusive(), console.Reporter() as reporter:
        pin = bump.bump(here, args.name, args.version, args.mirror, reporter)
    print(f"{args.name}: {args.version} is {pin.commit}; run `python -m workflows sync` to bring it in")
    for missing in pin.missing:
        print(f"{args.name}: sources.lock has no {missing}")
    return 0


def run_gc(args: argparse.Namespace) -> int:
    """Remove leftovers; print each with its size."""
    here = workspace()
    with here.exclusive():
        for path, size in tidy.collect(here, stashes=args.stashes, dry_run=args.dry_run):
            print(f"{'would remove' if args.dry_run else 'removed'} {path.relative_to(here.root)}: {size / 1e6:.1f} MB")
    return 0
