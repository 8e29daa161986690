"""The result of a run: its steps, the verdict, and the tables and JSON that tell of it."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from multimesh_maxtext.command.checks import Job, make_job
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.errors import (
    DisagreementError,
    LauncherError,
    LossNotFallingError,
    LossNotFiniteError,
    ProcessLostError,
    StoppedEarlyError,
    TrainerFailedError,
)

TOLERANCE = 1e-5
"""Largest relative difference of a loss or a gradient norm at which two runs agree; float32 needs less."""

_ROWS = 12  # of the table
_ENDED = re.compile(r"^multimesh: process \d+ of \d+ \([^)]*\) has been (?:stopped|((?:in|after) step)) ", re.MULTILINE)
"""The last line of a process that was ended because it was stopped, or (group 1) hung."""


class Output(Console):
    """Rich's console. Where nobody reads it any more it raises the `BrokenPipeError`, and does not end the program."""

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    number: int  # from 0
    loss: float  # mean cross entropy of the step's tokens, in nats
    gradient_norm: float  # global norm of the gradient before clipping
    seconds: float  # from the completion of the step before; of step 0: compilation and the step
    tokens: float  # tokens of the step over all devices

    @property
    def tokens_per_second(self) -> float:
        """Tokens over all devices per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: the optimizer step that it came after, and the mean loss over its tokens in nats."""

    step: int
    loss: float


def judge(
    steps: Sequence[Step],
    *,
    expected: int,
    returncode: int,
    log: Path,
    before: Sequence[Step] = (),
    first: int = 0,
    several: bool = False,
) -> None:
    """Return if every step ran and the loss is finite and falling.

    Falling means that the mean loss of the last third of the steps is below that of the first third. A run of one step
    only needs a finite loss, and so does a resumed run whose earlier steps are not known.

    Parameters
    ----------
    expected
        How many steps the whole training has.
    before
        Steps of the run that this one resumed, as far as they are known.
    first
        The step that this run began with.
    several
        Whether the trainer is one of several processes.

    Raises
    ------
    LossNotFiniteError, ProcessLostError, TrainerFailedError, StoppedEarlyError, LossNotFallingError
        In this order: a diverged run also ends with an error, but the loss is why.
    """
    for step in steps:
        if not math.isfinite(step.loss):
            raise LossNotFiniteError(
                f"the loss of step {step.number} is {step.loss}; lower learning_rate= or look at {log}"
            )
    complete = [step.number for step in steps] == list(range(first, expected))
    if several and (returncode < 0 or returncode == ProcessLostError.exit_code):
        raise ProcessLostError(
            f"the trainer {_ending(returncode, log)} after {_count(steps, expected, first)}; see {log}"
        )
    if returncode:
        raise TrainerFailedError(
            f"the trainer {_ending(returncode, log)} after {_count(steps, expected, first)}; see {log}"
        )
    if not complete:
        raise StoppedEarlyError(f"the trainer ended after {_count(steps, expected, first)} without an error; see {log}")
    every = [step.loss for step in (*before, *steps)]
    judged = len(every) > 1 and (before or not first)
    if judged and not falling(every):
        raise LossNotFallingError(
            f"the loss went from {every[0]:.4f} to {every[-1]:.4f}; "
            "train longer with --num-steps or change learning_rate="
        )


def _count(steps: Sequence[Step], expected: int, first: int) -> str:
    return f"{len(steps)} of {expected - first} steps"


def falling(losses: Sequence[float]) -> bool:
    """Say whether the mean of the last third is below the mean of the first third."""
    third = max(1, len(losses) // 3)
    return sum(losses[-third:]) < sum(losses[:third])


def _ending(returncode: int, log: Path) -> str:
    if returncode == ProcessLostError.exit_code:
        return "ended because another process was lost"
    if returncode > 0:
        return f"failed with exit code {returncode}"
    hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
    if hint and log.exists() and (ended := _ENDED.search(log.read_text(errors="replace"))):
        hint = f", because it {'held up the others' if ended[1] else 'had been stopped (SIGSTOP)'}"
    return f"was killed by {signal.Signals(-returncode).name}{hint}"


@dataclass(frozen=True)
class Pair:
    """A step of both runs."""

    step: Step
    reference: Step

    @property
    def difference(self) -> float:
        """The larger of the relative differences of loss and gradient norm."""
        ours, theirs = self.step, self.reference
        return max(_relative(ours.loss, theirs.loss), _relative(ours.gradient_norm, theirs.gradient_norm))


def reference_job(job: Job) -> Job:
    """Return the job that a pipeline is compared with.

    One program in one process, on the devices of one stage, its layers unrolled like the pipeline's, accumulates the
    same microbatches.
    """
    o = job.options
    changes = {
        "backend": "spmd",
        "pp": 1,
        "batch_size": job.batch,
        "num_layers": job.model.layers,
        "schedule": None,
        "custom_schedule_path": None,
        "interleave": 1,
        "partition": None,
        "scan_layers": bool(o.scan_layers),
        "cpus": None if o.gpus else job.mesh_devices,
        "gpus": job.mesh_devices if o.gpus else 0,
        "nodes": 1,
        "zero": 0,  # MaxText's own form of it rounds parameters and gradients to bfloat16
    }
    return make_job(Options(**{**vars(o), **changes}), job.model)


def compare(steps: Sequence[Step], reference: Sequence[Step]) -> list[Pair]:
    """Return the steps of two complete runs side by side."""
    return [Pair(step, other) for step, other in zip(steps, reference, strict=True)]


def largest(pairs: Sequence[Pair]) -> float:
    """Return the largest difference of all steps."""
    return max((pair.difference for pair in pairs), default=0.0)


def check_agreement(pairs: Sequence[Pair], *, dtype: str) -> None:
    """Raise ``DisagreementError``, which names the step, where the runs differ by more than `TOLERANCE`."""
    for pair in pairs:
        if pair.difference > TOLERANCE:
            hint = "report it with both logs" if dtype == "float32" else f"{dtype} rounds; compare with dtype=float32"
            raise DisagreementError(
                f"step {pair.step.number}: loss {pair.step.loss:.7f} and gradient norm {pair.step.gradient_norm:.7f}, "
                f"but {pair.reference.loss:.7f} and {pair.reference.gradient_norm:.7f} without the pipeline: "
                f"a relative difference of {pair.difference:.1e}, more than {TOLERANCE:.0e}; {hint}"
            )


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    difference = abs(value - reference) / abs(reference) if reference else math.inf
    return difference if math.isfinite(difference) else math.inf


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
            f"step {step.number} of {total}  loss {step.loss:.4f}  {step.seconds:.2f} s", highlight=False
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


def step_table(steps: Sequence[Step]) -> Table:
    """Return step, loss, step time and tokens/s of at most a dozen steps, the first and the last among them."""
    result = Table(box=None, pad_edge=False)
    for name in ("step", "loss", "gradient norm", "step time", "tokens/s"):
        result.add_column(name, justify="right")
    for step in (steps[i] for i in _row_numbers(len(steps))):
        note = " (compiles)" if step.number == 0 else ""
        result.add_row(
            f"{step.number}",
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
    for pair in (pairs[i] for i in _row_numbers(len(pairs))):
        ours, theirs = pair.step, pair.reference
        result.add_row(
            f"{ours.number}",
            f"{ours.loss:.6f}",
            f"{theirs.loss:.6f}",
            f"{ours.gradient_norm:.6f}",
            f"{theirs.gradient_norm:.6f}",
            f"{pair.difference:.1e}",
            f"{ours.seconds:.3f} s",
            "compiles" if ours.number == 0 else f"{ours.tokens_per_second:,.0f}",
        )
    return result


def _row_numbers(count: int) -> Sequence[int]:
    """Rows of a table: all, or a dozen with the first and the last among them."""
    last = count - 1
    return range(count) if last < _ROWS else sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)})


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
