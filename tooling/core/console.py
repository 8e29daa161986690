"""What a terminal gets: commands and their help, tables, and how far work is."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Subparsers = argparse._SubParsersAction


def command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    text: str,
    examples: Sequence[str] = (),
    **options: Any,
) -> argparse.ArgumentParser:
    """Add a command with its purpose ``text``; it calls ``run``, which may return an exit code. Return its parser."""
    shown = "\n".join([*(f"  {example}" for example in examples), "", f"{text[0].upper()}{text[1:]}."])
    formatter = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=text, description=shown, formatter_class=formatter, **options
    )
    parser.set_defaults(func=run)
    return parser


class Reporter:
    """Says how far each of several named pieces of work is: a line a phase, also from threads."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}

    def phase(self, name: str, text: str) -> None:
        """Begin a phase of a piece of work, e.g. ``phase("jax", "fetching")``."""
        self._started.setdefault(name, time.monotonic())
        note(f"{name}: {text}")

    def done(self, name: str, text: str) -> None:
        """End a piece of work."""
        now = time.monotonic()
        note(f"{name}: {text} ({now - self._started.get(name, now):.1f} s)")


def note(text: str) -> None:
    """Tell the user something that needs no action."""
    print(text, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in aligned columns."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
