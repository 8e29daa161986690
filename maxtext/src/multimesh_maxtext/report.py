"""What people and machines see of a run: progress, a table, JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from multimesh.errors import MultiMeshError
from multimesh_maxtext.metrics import Evaluation, Step
from multimesh_maxtext.verify import Pair, largest

_ROWS = 12  # of the table


class Show(Protocol):
    """Called with every step that has completed."""

    def __call__(self, step: Step, /) -> None:
        """Take note of the step."""


@contextmanager
def progress(console: Console, total: int, *, quiet: bool) -> Iterator[Show]:
    """Show steps as they come: a bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        yield lambda _step: None
    elif console.is_terminal:
        yield from _bar(console, total)
    else:
        console.print("starting MaxText; it compiles before the first step", highlight=False)
        yield lambda step: console.print(
            f"step {step.number + 1}/{total}  loss {step.loss:.4f}  {step.seconds:.2f} s", highlight=False
        )


def _bar(console: Console, total: int) -> Iterator[Show]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("MaxText starts and compiles", total=total)
        yield lambda step: bar.update(task, completed=step.number + 1, description=f"loss {step.loss:.4f}")


def table(steps: Sequence[Step]) -> Table:
    """Return step, loss, step time and tokens/s of at most a dozen steps, the first and the last among them."""
    result = Table(box=None, pad_edge=False)
    for name in ("step", "loss", "gradient norm", "step time", "tokens/s"):
        result.add_column(name, justify="right")
    for step in (steps[i] for i in _shown(len(steps))):
        note = " (compiles)" if step.number == 0 else ""
        result.add_row(
            f"{step.number + 1}",
            f"{step.loss:.4f}",
            f"{step.gradient_norm:.4f}",
            f"{step.seconds:.3f} s",
            note.strip() or f"{step.tokens_per_second:,.0f}",
        )
    return result


def comparison(pairs: Sequence[Pair]) -> Table:
    """Return a pipeline's steps with losses and gradient norms beside those of one program; at most a dozen."""
    result = Table(box=None, pad_edge=False)
    for name in ("step", "loss", "spmd", "grad norm", "spmd", "diff", "step time", "tokens/s"):
        result.add_column(name, justify="right")
    for pair in (pairs[i] for i in _shown(len(pairs))):
        ours, theirs = pair.step, pair.reference
        result.add_row(
            f"{ours.number + 1}",
            f"{ours.loss:.6f}",
            f"{theirs.loss:.6f}",
            f"{ours.gradient_norm:.6f}",
            f"{theirs.gradient_norm:.6f}",
            f"{pair.difference:.1e}",
            f"{ours.seconds:.3f} s",
            "compiles" if ours.number == 0 else f"{ours.tokens_per_second:,.0f}",
        )
    return result


def _shown(count: int) -> Sequence[int]:
    """Rows of a table: all, or a dozen with the first and the last among them."""
    last = count - 1
    return range(count) if last < _ROWS else sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)})


def plan_text(command: Sequence[str], environment: Mapping[str, str], configuration: Mapping[str, Any]) -> str:
    """Return what ``--dry-run`` prints: lines to paste into a shell, then the configuration."""
    lines = ["# environment", *(f"export {key}={shlex.quote(value)}" for key, value in environment.items())]
    lines += ["# command", shlex.join(command)]
    lines += ["# configuration", *(f"#   {key}: {json.dumps(value)}" for key, value in configuration.items())]
    return "\n".join(lines)


def summary(
    steps: Sequence[Step],
    evaluations: Sequence[Evaluation],
    pairs: Sequence[Pair],
    paths: Mapping[str, Path],
    error: MultiMeshError | None,
) -> dict[str, Any]:
    """Return what ``--json`` prints after a run; JSON has no NaN, so a number that is not finite is null."""
    verified = {"reference": _records([pair.reference for pair in pairs]), "difference": _finite(largest(pairs))}
    return {
        "steps": _records(steps),
        "evaluations": _records(evaluations),
        **(verified if pairs else {}),
        **{name: str(path) for name, path in paths.items()},
        "error": str(error) if error else None,
        "exit_code": error.exit_code if error else 0,
    }


def _records(steps: Sequence[Step | Evaluation]) -> list[dict[str, float | None]]:
    return [{key: _finite(value) for key, value in asdict(step).items()} for step in steps]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
