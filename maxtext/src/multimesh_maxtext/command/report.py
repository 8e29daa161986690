"""Prints a run: a headline, its progress, tables of its steps, or one JSON object; and never blocks on a reader."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from multimesh_maxtext.command.job import Job
from multimesh_maxtext.command.steps import Evaluation, Pair, Step, largest
from multimesh_maxtext.errors import LauncherError

Row = TypeVar("Row")

_ROWS = 12  # of the table
_PATIENCE = 2.0  # seconds without any progress after which a reader is given up, at the end
_writing = threading.RLock()  # rich has threads that write


class Output(Console):
    """Rich's console. Where nobody reads it any more it raises the `BrokenPipeError`, and does not end the program."""

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise


def headline(job: Job) -> str:
    """Return the job in a line: its backend, devices, grid, layers and batch."""
    o = job.flags
    use = "in the pipeline" if o.pp > 1 else "accumulated"
    sizes = job.pieces if o.staged else ()
    dealt = f" dealt {' '.join(map(str, sizes))}" if len(set(sizes)) > 1 else ""
    return (
        f"MaxText, backend {o.backend}, {job.devices} {o.platform} devices: {o.grid}; "
        f"{job.model.layers} layers{dealt}; batch {job.batch} = {job.microbatches} microbatches {use}"
    )


@contextmanager
def progress(console: Console, total: int, *, quiet: bool) -> Iterator[Callable[[Step], object]]:
    """Show steps as they come: a bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        yield lambda _step: None
    elif console.is_terminal:
        yield from _bar(console, total)
    else:
        console.print("starting MaxText; it compiles before the first step")
        yield lambda step: console.print(f"step {step.number} of {total}  loss {step.loss:.4f}  {step.seconds:.2f} s")


def _bar(console: Console, total: int) -> Iterator[Callable[[Step], object]]:
    shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown, console=console, transient=True) as bar:
        task = bar.add_task("MaxText starts and compiles", total=total)
        yield lambda step: bar.update(task, completed=step.number + 1, description=f"loss {step.loss:.4f}")


def make_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines, its cells to the right."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def step_table(steps: Sequence[Step]) -> Table:
    """Return step, loss, step time and tokens/s of at most a dozen steps, the first and the last among them."""
    return make_table(
        ("step", "loss", "gradient norm", "step time", "tokens/s"),
        [(f"{x.number}", f"{x.loss:.4f}", f"{x.gradient_norm:.4f}", *_speed(x)) for x in _some(steps)],
    )


def comparison(pairs: Sequence[Pair]) -> Table:
    """Return a pipeline's steps with losses and gradient norms beside those of one program; at most a dozen."""
    rows = []
    for pair in _some(pairs):
        ours, theirs = pair.step, pair.reference
        numbers = (ours.loss, theirs.loss, ours.gradient_norm, theirs.gradient_norm)
        rows.append((f"{ours.number}", *(f"{x:.6f}" for x in numbers), f"{pair.difference:.1e}", *_speed(ours)))
    return make_table(("step", "loss", "spmd", "grad norm", "spmd", "diff", "step time", "tokens/s"), rows)


def _speed(step: Step) -> tuple[str, str]:
    """Return the time of a step and its tokens a second; the first also compiles."""
    return f"{step.seconds:.3f} s", f"{step.tokens_per_second:,.0f}" if step.number else "compiles"


def _some(rows: Sequence[Row]) -> list[Row]:
    """Return all rows, or a dozen with the first and the last among them."""
    last = len(rows) - 1
    numbers = range(len(rows)) if last < _ROWS else sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)})
    return [rows[number] for number in numbers]


def plan_text(command: Sequence[str], environment: Mapping[str, str], configuration: Mapping[str, Any]) -> str:
    """Return the text of ``--dry-run``: lines to paste into a shell, then the configuration."""
    lines = ["# environment", *(f"export {key}={shlex.quote(value)}" for key, value in environment.items())]
    lines += ["# command", shlex.join(command)]
    lines += ["# configuration", *(f"#   {key}: {json.dumps(value)}" for key, value in configuration.items())]
    return "\n".join(lines)


def summary(
    steps: Sequence[Step],
    evaluations: Sequence[Evaluation],
    pairs: Sequence[Pair],
    paths: Mapping[str, Path],
    error: LauncherError | None,
) -> dict[str, Any]:
    """Return the object that ``--json`` prints after a run. JSON has no NaN: a number that is not finite is null."""
    verified = {"reference": _records([pair.reference for pair in pairs]), "difference": _finite(largest(pairs))}
    return {
        "steps": _records(steps),
        "evaluations": _records(evaluations),
        **(verified if pairs else {}),
        **{name: str(path) for name, path in paths.items()},
        "error": str(error) if error else None,
        "exit_code": error.exit_code if error else 0,
    }


def schedule_choice(file: Path) -> dict[str, Any]:
    """Return the choice of ``--schedule auto`` for `summary`; nothing under another schedule."""
    return {"schedule": json.loads(file.read_text())} if file.exists() else {}


def _records(steps: Sequence[Step | Evaluation]) -> list[dict[str, float | None]]:
    return [{key: _finite(value) for key, value in asdict(step).items()} for step in steps]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class UnblockedOutput(io.TextIOBase):
    """A text stream in place of another one. What its reader does not take yet is written with what follows."""

    def __init__(self, stream: TextIO) -> None:
        """Write with a descriptor of its own, as all that have the stream's would get errors else."""
        super().__init__()
        self._encoding, self._waiting = stream.encoding, bytearray()
        self.fileno, self.isatty, self.writable = stream.fileno, stream.isatty, stream.writable  # type: ignore[method-assign]
        self._descriptor = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def write(self, text: str) -> int:
        """Write text now or later. Raises ``BrokenPipeError`` where nobody reads any more."""
        with _writing, suppress(BlockingIOError):
            self._waiting += text.encode(self._encoding, "backslashreplace")
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        return len(text)

    def drain(self) -> None:
        """Wait until all is written, or the reader takes nothing for a while."""
        length, since = len(self._waiting), time.monotonic()
        while self._waiting and time.monotonic() - since < _PATIENCE:
            time.sleep(0.01)
            self.write("")
            if len(self._waiting) < length:
                length, since = len(self._waiting), time.monotonic()


@contextmanager
def unblock_output() -> Iterator[None]:
    """Let stdout and stderr not block where they are pipes or terminals; at the end wait for readers who still read."""
    streams, outputs = (sys.stdout, sys.stderr), dict[tuple[int, int], UnblockedOutput]()

    def replace(stream: TextIO) -> TextIO:
        status = os.fstat(stream.fileno())
        reader = status.st_dev, status.st_ino
        with suppress(OSError):  # a terminal of another user
            if reader not in outputs and (stat.S_ISFIFO(status.st_mode) or stream.isatty()):
                outputs[reader] = UnblockedOutput(stream)
        return outputs.get(reader, stream)  # type: ignore[return-value]

    try:
        sys.stdout, sys.stderr = map(replace, streams)
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for output in outputs.values():
            output.drain()
