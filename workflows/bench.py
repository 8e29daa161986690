"""``bench``: runs a benchmark of ``tests/benchmarks/``; the rest of the command line is the benchmark's."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from workflows import errors

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "benchmarks"
BENCHMARKS = ("sources",)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("bench", help="run a benchmark: sources", add_help=False)
    parser.add_argument("name", choices=BENCHMARKS, help="which one")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its options; see `bench NAME --help`")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run one benchmark in this process."""
    script = FOLDER / f"{args.name}.py"
    if not script.is_file():
        raise errors.UsageError(f"{script}: not found; benchmarks need a whole clone")
    sys.path.insert(0, str(FOLDER))
    namespace = runpy.run_path(str(script), run_name=f"benchmarks.{args.name}")
    code: int = namespace["main"](args.rest)
    return code
