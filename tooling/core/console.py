"""Output for a terminal: tables, and bars, which are lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

Advance = Callable[[float, "float | None"], None]
"""Moves a bar to so much of a total, which may not be known."""


def note(text: str) -> None:
    """Tell the user something that needs no action."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def work(text: str) -> Iterator[Advance]:
    """Show a piece of work while it lasts: a bar on a terminal, a line elsewhere and where rich is yet to come."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        note(text)
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(text), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in aligned columns; no terminal's width cuts them."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
