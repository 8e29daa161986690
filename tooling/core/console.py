"""Output for a terminal: commands and their help, tables, and progress: bars, elsewhere a line a phase."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

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
    """Shows how far each of several named pieces of work is; safe to call from their threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._started: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None

    def __enter__(self) -> Reporter:
        if sys.stderr.isatty() and importlib.util.find_spec("rich"):  # which the first packages bring
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            terminal = Console(stderr=True)
            if terminal.is_interactive:  # one with TERM=dumb cannot draw a line anew
                text = TextColumn("{task.description}", markup=False)
                self._bars = Progress(text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=terminal)
                self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars:
            self._bars.stop()

    def phase(self, name: str, text: str) -> None:
        """Begin a phase of a piece of work, e.g. ``phase("jax", "fetching")``."""
        with self._guard:
            self._started.setdefault(name, time.monotonic())
            self._show(name, text)

    def advance(self, name: str, done: float, total: float | None) -> None:
        """Say how much of the present phase is done; shown on a terminal only."""
        with self._guard:
            if self._bars and name in self._tasks:
                self._bars.update(self._tasks[name], completed=done, total=total)

    def done(self, name: str, text: str) -> None:
        """Show that a piece of work is done, with the seconds that it took."""
        with self._guard:
            now = time.monotonic()
            self._show(name, f"{text} ({now - self._started.get(name, now):.1f} s)", total=1)

    def _show(self, name: str, text: str, total: float | None = None) -> None:
        """Show a line; ``total`` is set where nothing is left to do."""
        if not self._bars:
            note(f"{name}: {text}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=None)
        task = self._bars.tasks[self._tasks[name]]
        task.total, task.completed, task.finished_time = None, 0, None  # of this phase nothing is told yet
        self._bars.update(task.id, description=f"{name}: {text}", completed=total, total=total)


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
