"""``bootstrap``: sources and Python packages, so that this clone can be worked with."""

from __future__ import annotations

import argparse

from workflows import errors, helping
from workflows.commands import sources
from workflows.sources import quick
from workflows.sources.workspace import workspace


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bootstrap",
        prog="./bootstrap.sh",
        **helping.shown(
            "bring in sources and install the Python packages of the groups",
            "./bootstrap.sh --group run                 # what training MaxText needs: 2 minutes, 3 GB",
            "./bootstrap.sh --group run --group dev     # and what tests need",
            "./bootstrap.sh                             # everything, with the sources of jax and xla",
        ),
    )
    sources.add_sync_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Sync the sources, then install; a failed source does not keep the packages from coming."""
    from workflows.sources import environment

    code, failed = 0, None
    try:
        code = sources.run_sync(args)
    except errors.WorkflowsError as error:
        if isinstance(error, errors.UsageError):
            raise
        failed = error
    if not args.dry_run:
        root = workspace().root
        environment.install(root, sources.chosen(args), offline=args.offline, quiet=args.json)
        inputs = quick.signature(str(root), quick.PACKAGES)
        quick.remember_packages(
            str(root), inputs, [each for each in quick.ALL_GROUPS if environment.ready(root, [each])]
        )
    if failed is not None:
        raise failed
    return code
