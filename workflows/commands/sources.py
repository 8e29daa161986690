"""The commands that bring sources in and look at them: ``sync``, ``status``, ``diff``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from workflows import console, errors, helping
from workflows.sources import safety
from workflows.sources.quick import ALL_GROUPS, CUDA, GROUPS
from workflows.sources.workspace import workspace

if TYPE_CHECKING:
    from workflows.sources.sync import Override

MAX_JOBS = 64


def add_sync_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``sync`` and ``bootstrap`` share."""
    parser.add_argument(
        "--group", action="append", choices=ALL_GROUPS, dest="groups",
        help="only this group; may be repeated (default: run, source and dev); run: for MaxText; cuda12: run, and the "
        "packages with which JAX uses NVIDIA GPUs (5 GB); cuda13: the same for drivers of 580 or later; source: for "
        "jaxlib; dev: to work here",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="components at a time (default: %(default)s)")
    parser.add_argument("--offline", action="store_true", help="use only what is on this disk")
    parser.add_argument(
        "--mirror", metavar="URL", help="fetch NAME.git and archives from URL/ instead of their upstreams"
    )
    parser.add_argument(
        "--override", action="append", default=[], metavar="NAME=PATH|URL@SHA",
        help="for this run take a component from a folder (as a link) or from a commit of another repository",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would change, change nothing")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--stash", action="store_true", help="put changed or unknown trees aside in third_party/.stash/"
    )
    choice.add_argument("--force", action="store_true", help="drop changed or unknown trees")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    parser = subparsers.add_parser(
        "sync",
        **helping.shown(
            "bring third_party/ to what sources.lock says",
            "python -m workflows sync",
            "python -m workflows sync --override multimesh=../multimesh",
        ),
    )
    add_sync_options(parser)
    parser.set_defaults(func=run_sync)
    parser = subparsers.add_parser(
        "status", **helping.shown("show every component against its pin", "python -m workflows status")
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run_status)
    parser = subparsers.add_parser(
        "diff",
        **helping.shown(
            "show what was changed in third_party/ since the last sync", "python -m workflows diff maxtext"
        ),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="components (default: all)")
    parser.set_defaults(func=run_diff)


def chosen(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the groups that were asked for; packages for GPUs are of no use without what runs on them."""
    groups = tuple(args.groups or GROUPS)
    return ("run", *groups) if set(groups) & set(CUDA) and "run" not in groups else groups


def run_sync(args: argparse.Namespace) -> int:
    """Bring components in; print what happened."""
    from workflows.sources import sync

    if not 1 <= args.jobs <= MAX_JOBS:
        raise errors.UsageError(f"--jobs {args.jobs}: must be from 1 to {MAX_JOBS}")
    if args.mirror and (fault := safety.url_fault(args.mirror)):
        raise errors.UsageError(f"--mirror '{safety.shown(args.mirror)}': {fault}")
    if args.offline and args.mirror:
        raise errors.UsageError("--offline and --mirror exclude each other: leave one out")
    options = sync.Options(
        groups=chosen(args),
        jobs=args.jobs,
        offline=args.offline,
        dry_run=args.dry_run,
        stash=args.stash,
        force=args.force,
        mirror=args.mirror,
        overrides=dict(_override(text) for text in args.override),
    )
    with console.Reporter(quiet=args.json) as reporter:
        outcomes = sync.sync(workspace(), options, reporter)
    if args.json:
        print(json.dumps(sync.as_json(outcomes), indent=1))
    else:
        verbs = {"created": "would create", "replaced": "would replace", "failed": "would fail"} if args.dry_run else {}
        rows = [
            (each.name, verbs.get(each.action, each.action), each.detail, (each.commit or "-")[:12])
            for each in outcomes
        ]
        print(console.table(("component", "action", "detail", "commit"), rows))
    if error := sync.failure(outcomes):
        raise error
    return 0


def _override(text: str) -> tuple[str, Override]:
    """Read one ``--override``."""
    from workflows.sources.sync import Override

    name, found, value = text.partition("=")
    if not found or not name or not value:
        raise errors.UsageError(f"--override '{text}': write NAME=PATH or NAME=URL@SHA")
    url, at, commit = value.rpartition("@")
    if "://" not in value and "::" not in value and not value.startswith("-"):
        folder = Path(os.path.abspath(os.path.expanduser(value)))
        if not folder.is_dir():
            raise errors.UsageError(f"--override {name}: {folder} is not a folder")
        return name, Override(folder=folder)
    if not at or not safety.COMMIT.fullmatch(commit):
        raise errors.UsageError(
            f"--override {name}: '{safety.shown(value)}' needs a full commit after the url: URL@40-hex-digits"
        )
    if fault := safety.url_fault(url):
        raise errors.UsageError(f"--override {name}: '{safety.shown(url)}' {fault}")
    return name, Override(url=url, commit=commit)


def run_status(args: argparse.Namespace) -> int:
    """Print a table, or JSON, of all components; exit 0 if all that is here is as locked."""
    from workflows.sources import status

    lines = status.survey(workspace())
    if args.json:
        print(json.dumps(status.as_json(lines), indent=1))
    else:
        print(status.as_table(lines))
    return 0 if status.clean(lines) else 1


def run_diff(args: argparse.Namespace) -> int:
    """Print the difference of each tree to what the last sync left."""
    from workflows.sources import status

    print(status.diff(workspace(), args.names), end="")
    return 0
