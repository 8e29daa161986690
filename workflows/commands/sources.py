"""The commands about ``third_party/``: bring sources in, look at them and change their pins and patches."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from workflows import console, errors, groups
from workflows.helping import Subparsers, command
from workflows.sources import safety
from workflows.sources.workspace import ROOT, Workspace

if TYPE_CHECKING:
    from workflows.sources.sync import Override

MAX_JOBS = 64


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    parser = command(
        subparsers, "bootstrap", run_bootstrap, "bring in sources and install the Python packages of the groups",
        ["./bootstrap.sh --group run                 # what training MaxText needs: 2 minutes, 3 GB",
         "./bootstrap.sh --group run --group dev     # and what tests need",
         "./bootstrap.sh --group image               # what building an image needs: seconds",
         "./bootstrap.sh                             # everything, with the sources of jax and xla"],
        prog="./bootstrap.sh",
    )  # fmt: skip
    _add_sync_options(parser)
    parser = command(
        subparsers, "sync", run_sync, "bring third_party/ to what sources.lock says",
        ["python -m workflows sync", "python -m workflows sync --override multimesh=../multimesh"],
    )  # fmt: skip
    _add_sync_options(parser)
    examples = ["python -m workflows status"]
    parser = command(subparsers, "status", run_status, "show every component against its pin", examples)
    parser.add_argument("--json", action="store_true", help="print JSON")
    text, examples = "record the patches as they are on disk, and what they give", ["python -m workflows lock maxtext"]
    parser = command(subparsers, "lock", run_lock, text, examples)
    parser.add_argument("names", nargs="*", metavar="NAME", help="components (default: all whose patches changed)")
    text = "turn the commits in third_party/NAME into its patch series"
    parser = command(subparsers, "refresh", run_refresh, text, ["python -m workflows refresh maxtext"])
    parser.add_argument("names", nargs="+", metavar="NAME", help="components")
    text = "move a component to another version, with its patches; or fill images.lock"
    examples = ["python -m workflows bump maxtext 0.2.5", "python -m workflows bump images"]
    parser = command(subparsers, "bump", run_bump, text, examples)
    parser.add_argument("name", metavar="NAME", help="component, or `images` for the base images")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="its new version; a commit where it has no tags")
    parser.add_argument("--mirror", metavar="URL", help="ask URL/ instead of the upstream")


def _add_sync_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``sync`` and ``bootstrap`` share."""
    add = parser.add_argument
    add("--group", action="append", choices=groups.ALL_GROUPS, dest="groups",
        help="only this group; may be repeated (default: run, source and dev); run: for MaxText; image: for images; "
        "cuda12: run, and the packages with which JAX uses NVIDIA GPUs (5 GB); cuda13: the same for drivers of 580 or "
        "later; data: run, and what reads Parquet files and datasets of Hugging Face and TensorFlow (2 GB); source: "
        "for jaxlib; dev: to work here")  # fmt: skip
    add("--jobs", type=int, default=4, metavar="N", help="components at a time (default: %(default)s)")
    add("--offline", action="store_true", help="use only what is on this disk")
    add("--mirror", metavar="URL", help="fetch NAME.git and archives from URL/ instead of their upstreams")
    text = "for this run take a component from a folder (as a link) or from a commit of another repository"
    add("--override", action="append", default=[], metavar="NAME=PATH|URL@SHA", help=text)
    add("--dry-run", action="store_true", help="say what would change, change nothing")
    add("--json", action="store_true", help="print the outcome as JSON")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--stash", action="store_true", help="put changed or unknown trees aside in third_party/.stash/")
    add("--force", action="store_true", help="drop changed or unknown trees")


def _chosen(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the groups that were asked for. With packages for GPUs come those that run on them."""
    chosen = tuple(args.groups or groups.GROUPS)
    return ("run", *chosen) if set(chosen) & {*groups.CUDA, "data"} and "run" not in chosen else chosen


def run_bootstrap(args: argparse.Namespace) -> None:
    """Sync the sources, then install; a failed source does not keep the packages from coming."""
    from workflows.sources import environment

    failed = None
    try:
        run_sync(args)
    except errors.UsageError:
        raise
    except errors.WorkflowsError as error:
        failed = error
    if not args.dry_run:
        environment.install(ROOT, _chosen(args), offline=args.offline, quiet=args.json)
    if failed is not None:
        raise failed


def run_sync(args: argparse.Namespace) -> None:
    """Bring components in; print the outcomes."""
    from workflows.sources import sync

    if not 1 <= args.jobs <= MAX_JOBS:
        raise errors.UsageError(f"--jobs {args.jobs}: must be from 1 to {MAX_JOBS}")
    if args.mirror and (fault := safety.url_fault(args.mirror)):
        raise errors.UsageError(f"--mirror '{safety.shown(args.mirror)}': {fault}")
    if args.offline and args.mirror:
        raise errors.UsageError("--offline and --mirror exclude each other: leave one out")
    plain = {key: getattr(args, key) for key in ("jobs", "offline", "dry_run", "stash", "force", "mirror")}
    options = sync.Options(_chosen(args), overrides=dict(_override(text) for text in args.override), **plain)
    with console.Reporter(quiet=args.json) as reporter:
        outcomes = sync.sync(Workspace(), options, reporter)
    if args.json:
        print(json.dumps({"components": [asdict(each) for each in outcomes]}, indent=1))
    else:
        verbs = {"created": "would create", "replaced": "would replace", "failed": "would fail"} if args.dry_run else {}
        rows = [(o.name, verbs.get(o.action, o.action), o.detail, (o.commit or "-")[:12]) for o in outcomes]
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
    if not at or not safety.COMMIT.fullmatch(commit):
        raise errors.UsageError(
            f"--override {name}: '{safety.shown(value)}' needs a full commit after the url: URL@40-hex-digits"
        )
    if fault := safety.url_fault(url):
        raise errors.UsageError(f"--override {name}: '{safety.shown(url)}' {fault}")
    return name, (url, commit)


def run_status(args: argparse.Namespace) -> int:
    """Print a table, or JSON, of all components; exit 0 if all that is here is as locked."""
    from workflows.sources import status

    lines = status.survey(Workspace())
    clean = status.clean(lines)
    if args.json:
        print(json.dumps({"clean": clean, "components": [asdict(line) for line in lines]}, indent=1))
    else:
        print(status.as_table(lines))
    return 0 if clean else 1


def run_lock(args: argparse.Namespace) -> None:
    """Rewrite the patch entries of ``sources.lock``; the pins of upstreams stay."""
    from workflows.sources import lock, manifest, pins

    here = Workspace()
    wanted, held = manifest.load(here.manifest), lock.load(here.lock)
    with here.exclusive(), console.Reporter() as reporter:
        for component in [wanted[name] for name in args.names] or wanted.components:
            if not component.link:
                pin = lock.pin_of(component, held)
                held[component.name] = pins.relock(here, component, pin, reporter, always=bool(args.names))
                lock.save(here.lock, wanted, held)


def run_refresh(args: argparse.Namespace) -> None:
    """Write the patch series of components anew from their commits, and lock it."""
    from workflows.sources import lock, manifest, pins

    here = Workspace()
    wanted = manifest.load(here.manifest)
    with here.exclusive():
        for name in args.names:
            component, held = wanted[name], lock.load(here.lock)
            if component.link:
                raise errors.UsageError(f"{name}: is a link to {component.link}; there is nothing to refresh")
            pin, series = pins.refresh(here, component, lock.pin_of(component, held))
            lock.save(here.lock, wanted, held | {name: pin})
            print(f"{name}: {len(series)} patches, {(pin.patched_commit or '-')[:12]}")
            print("".join(f"  {each.file}\n" for each in series), end="")


def run_bump(args: argparse.Namespace) -> int:
    """Pin another version, if its patches apply there."""
    here = Workspace()
    if args.name == "images":
        from workflows.image import bump

        if args.version or args.mirror:
            raise errors.UsageError("bump images: takes no version and no --mirror; it asks where images.lock points")
        return bump.run(here.root)
    from workflows.sources import pins

    if args.version is None:
        raise errors.UsageError(f"bump {args.name}: to which version? Give it after the name")
    with here.exclusive(), console.Reporter() as reporter:
        pin = pins.bump(here, args.name, args.version, args.mirror, reporter)
    print(f"{args.name}: {args.version} is {pin.commit}; run `python -m workflows sync` to bring it in")
    for missing in pin.missing:
        print(f"{args.name}: sources.lock has no {missing}")
    return 0
