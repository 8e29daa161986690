"""The command line: parses the options of a command, and turns errors into exit codes.

Each of ``MODULES`` has ``register(subparsers)``, which adds its commands. It imports libraries where it uses them:
a command starts fast, and ``bootstrap`` before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tooling.core import errors, proc

MODULES = ("environment.install", "sources.sync", "image.bazel_cache", "image.pipeline", "ci.steps")
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog=".venv/bin/python -m tooling",
        description="  .venv/bin/python -m tooling status\n  .venv/bin/python -m tooling lock maxtext 0.2.5\n\n"
        "Sources, images and releases of MultiMesh for JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in MODULES:
        importlib.import_module(f"tooling.{module}").register(subparsers)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command with its options; leaves by ``SystemExit`` after help, or where they are wrong."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:  # said by the command's own parser: its name is the door that was called, as docker/build.py
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main_inner(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; errors pass through."""
    args = parse(argv)
    return args.func(args) or 0


def main(argv: Sequence[str] | None = None, inner: Callable[[Sequence[str]], int] = main_inner) -> int:
    """Run one command by ``inner``; print its error, if any, as one line on stderr."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, _interrupt)
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = inner(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", code=INTERRUPTED)
    except BrokenPipeError:
        _drop_output()  # its reader is gone (`... | head`)
        return 128 + signal.SIGPIPE
    except (errors.ToolingError, ExceptionGroup, OSError) as error:
        several = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        return _fail(*map(errors.describe, several), code=getattr(several[0], "exit_code", 1))


def _interrupt(signum: int, frame: object) -> NoReturn:
    proc.end_children()
    raise KeyboardInterrupt


def _drop_output() -> None:
    """Drop the output that cannot be written. Python would complain once more while closing stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(*messages: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # most often the error that follows
        _drop_output()
    for message in messages:
        # Names from a server, an archive or a patch must not reach the terminal as control sequences.
        shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
        with contextlib.suppress(OSError):  # the terminal is closed
            print(f"error: {shown}", file=sys.stderr, flush=True)
    return code
