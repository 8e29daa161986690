"""The steps of a run: read from its metrics file as they are written, judged, and compared with another run's."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multimesh_maxtext.command.job import Job, make_job
from multimesh_maxtext.errors import (
    MORE_MEMORY,
    CheckpointError,
    DisagreementError,
    DoesNotFitError,
    FlagError,
    LossNotFallingError,
    LossNotFiniteError,
    ProcessKilledError,
    ProcessLostError,
    StoppedEarlyError,
    TrainerFailedError,
)
from multimesh_maxtext.handoff import SECONDS
from multimesh_maxtext.outcome import Outcome

TOLERANCE = 1e-5
"""Largest relative difference of a loss or a gradient norm at which two runs agree; float32 needs less."""

_NO_MEMORY = b"std::bad_alloc"
"""The C++ library's word for a lack of memory, by which it ends a process."""

Tell = Callable[[Mapping[str, float]], object]
"""Called with the record of each step and evaluation."""


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


class Follower:
    """Reads the steps of a run, and its ``evaluations``, as they are written."""

    def __init__(self, metrics: Path, *, skip: int = 0, tell: Sequence[Tell] = ()) -> None:
        """Follow the metrics, of which ``skip`` bytes are an earlier run's; each of ``tell`` gets the other records."""
        self._metrics, self._tell = Tail(metrics, skip), tell
        self.evaluations: list[Evaluation] = []

    def poll(self) -> list[Step]:
        """Return the steps completed since the last poll."""
        steps = []
        for record in filter(None, map(_parse, self._metrics.lines())):
            is_step = "learning/loss" in record
            # MaxText also writes the running means of an evaluation, which have no total.
            if not is_step and "eval/total_loss" not in record:
                continue
            for tell in self._tell:
                tell(record)
            number = int(record["step"])
            if not is_step:
                self.evaluations.append(Evaluation(number, record["eval/avg_loss"]))
                continue
            norm = record.get("learning/raw_grad_norm", record.get("learning/grad_norm", math.nan))
            seconds, tokens = record.get(SECONDS, math.nan), record["learning/total_weights"]
            steps.append(Step(number, record["learning/loss"], norm, seconds, tokens))
        return steps


def keep_before(metrics: Path, step: int) -> list[Step]:
    """Cut a step and all that comes after it off a metrics file; return the steps that remain."""
    end = position = 0
    if metrics.exists():
        for line in metrics.read_bytes().splitlines(keepends=True):
            position += len(line)
            record = _parse(line.decode("utf-8", "replace")) or {}
            if record.keys() & {"learning/loss", "eval/total_loss"} and record["step"] < step:
                end = position
        os.truncate(metrics, end)
    return Follower(metrics).poll()


def _parse(line: str) -> dict[str, float] | None:
    """Return a record; ``None`` for a torn line, which MaxText leaves where it empties the file."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


class Tail:
    """Complete lines that were appended to a file since the last look; the file may not exist yet, or be emptied."""

    def __init__(self, path: Path, skip: int = 0) -> None:
        self._path, self._offset = path, skip

    def lines(self) -> Iterator[str]:
        """Yield the lines that are complete now."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        yield from data[:end].decode("utf-8", "replace").splitlines()


def judge(
    steps: Sequence[Step],
    returncode: int,
    ended: Outcome | None,
    *,
    expected: int,
    log: Path,
    before: Sequence[Step] = (),
    first: int = 0,
    several: bool = False,
) -> None:
    """Return if every step ran and the loss fell: the mean of the last third of the steps is below that of the first.

    A run of one step only needs a finite loss, and so does a resumed run whose earlier steps are not known.

    ``returncode``, ``ended``: of the trainer: its exit code, and the outcome that it wrote, if it did.
    ``expected``, ``first``: how many steps the whole training has, and the one that this run began with.
    ``before``: steps of the run that this one resumed, as far as they are known.

    Raises the ``LauncherError`` of the first class that fits; a diverged run may also end with an error.
    """
    for step in steps:
        if not math.isfinite(step.loss):
            raise LossNotFiniteError(
                f"the loss of step {step.number} is {step.loss}; lower learning_rate= or look at {log}"
            )
    complete = [step.number for step in steps] == list(range(first, expected))
    after = f"after {len(steps)} of {expected - first} steps"
    if ended and not (complete and returncode == 0) and (error := ended.error()):
        shown = "" if isinstance(error, FlagError | CheckpointError) else f" {after}"
        see = f"; see {log}" if isinstance(error, TrainerFailedError) else ""
        raise type(error)("; ".join(filter(None, (f"{ended.message}{shown}", ended.remedy))) + see)
    if returncode == -signal.SIGABRT and _NO_MEMORY in log.read_bytes():
        raise DoesNotFitError(
            f"the memory of this machine did not suffice {after} ({_NO_MEMORY.decode()}); {MORE_MEMORY}"
        )
    if returncode < 0:
        hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
        kind = ProcessKilledError if several else TrainerFailedError
        raise kind(f"the trainer was killed by {signal.Signals(-returncode).name}{hint} {after}; see {log}")
    if returncode:
        kind = ProcessLostError if several and returncode == ProcessLostError.exit_code else TrainerFailedError
        raise kind(f"the trainer failed with exit code {returncode} {after}; see {log}")
    if not complete:
        raise StoppedEarlyError(f"the trainer ended {after} without an error; see {log}")
    losses = [step.loss for step in (*before, *steps)]
    third = max(1, len(losses) // 3)
    if len(losses) > 1 and (before or not first) and sum(losses[-third:]) >= sum(losses[:third]):
        raise LossNotFallingError(
            f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}; "
            "train longer with --num-steps or change learning_rate="
        )


def reference_job(job: Job) -> Job:
    """Return the job that a pipeline is compared with: one program in one process, on the devices of one stage."""
    o = job.flags
    single = replace(
        o,
        backend="spmd",
        pp=1,
        batch_size=job.batch,
        num_layers=job.model.layers,
        schedule=None,
        custom_schedule_path=None,
        interleave=1,
        partition=None,
        scan_layers=bool(o.scan_layers),
        cpus=None if o.gpus else job.mesh_devices,
        gpus=job.mesh_devices if o.gpus else 0,
        nodes=1,
        zero=0,  # MaxText's own form of it rounds parameters and gradients to bfloat16
    )
    return make_job(single, job.model)


@dataclass(frozen=True)
class Pair:
    """A step of both runs, and the larger of the relative differences of loss and gradient norm."""

    step: Step
    reference: Step
    difference: float


def compare(steps: Sequence[Step], reference: Sequence[Step]) -> list[Pair]:
    """Return the steps of two complete runs side by side."""
    pairs = []
    for ours, theirs in zip(steps, reference, strict=True):
        values = ((ours.loss, theirs.loss), (ours.gradient_norm, theirs.gradient_norm))
        differences = [0.0 if a == b else abs(a - b) / abs(b) if b else math.inf for a, b in values]
        pairs.append(Pair(ours, theirs, max(x if math.isfinite(x) else math.inf for x in differences)))
    return pairs


def largest(pairs: Sequence[Pair]) -> float:
    """Return the largest difference of all steps."""
    return max((pair.difference for pair in pairs), default=0.0)


def check_agreement(pairs: Sequence[Pair], *, dtype: str) -> None:
    """Raise ``DisagreementError``, which names the step, where the runs differ by more than `TOLERANCE`."""
    for pair in (pair for pair in pairs if pair.difference > TOLERANCE):
        hint = "report it with both logs" if dtype == "float32" else f"{dtype} rounds; compare with dtype=float32"
        raise DisagreementError(
            f"step {pair.step.number}: loss {pair.step.loss:.7f} and gradient norm {pair.step.gradient_norm:.7f}, "
            f"but {pair.reference.loss:.7f} and {pair.reference.gradient_norm:.7f} without the pipeline: "
            f"a relative difference of {pair.difference:.1e}, more than {TOLERANCE:.0e}; {hint}"
        )
