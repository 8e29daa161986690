"""The steps of a run: read from its metrics file as they are written, judged, and compared with another run's."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from multimesh_maxtext.command.job import Job, Paths, make_job
from multimesh_maxtext.errors import (
    MORE_MEMORY,
    CheckpointError,
    DisagreementError,
    DoesNotFitError,
    FlagError,
    LauncherError,
    LossNotFallingError,
    LossNotFiniteError,
    ProcessKilledError,
    ProcessLostError,
    StoppedEarlyError,
    TrainerFailedError,
)
from multimesh_maxtext.handoff import SECONDS

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


class Run:
    """A training, whose records are read from its metrics file as the trainer writes them.

    Attributes
    ----------
    before
        Steps of the run that this one resumes, as far as they are known.
    steps
        Steps of this run.
    evaluations
        Of each evaluation of this run the optimizer ``step`` that it came after, and its mean ``loss`` in nats.
    error
        Why it ended; None for a success.
    log
        Log of the trainer that failed.
    reference, differences
        With ``--verify``, the steps of one program, and by how much those of this run differ: see `compare`.
    """

    error: LauncherError | None = None
    reference: Sequence[Step] = ()
    differences: Sequence[float] = ()

    def __init__(self, paths: Paths, first: int = 0, tell: Sequence[Tell] = ()) -> None:
        """Cut the ``first`` step and all that comes after it off the file; ``tell`` gets the records from then on."""
        metrics, self.log = paths.metrics, paths.log
        self._lines, self._tell = tail(metrics), tuple[Tell, ...]()
        self.steps, self.evaluations = list[Step](), list[dict[str, float]]()
        end = position = 0
        for line in metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else ():
            position += len(line)
            record = _parse(line.decode("utf-8", "replace"))
            if record.keys() & {"learning/loss", "eval/total_loss"} and record["step"] < first:
                end = position
        if position > end:
            os.truncate(metrics, end)
        self.before = self.read()
        self.steps, self.evaluations, self._tell = [], [], tuple(tell)

    def read(self) -> list[Step]:
        """Return the steps that were completed since the last call."""
        count = len(self.steps)
        for record in map(_parse, next(self._lines)):
            is_step = "learning/loss" in record
            # MaxText also writes the running means of an evaluation, which have no total.
            if not is_step and "eval/total_loss" not in record:
                continue
            for tell in self._tell:
                tell(record)
            number = int(record["step"])
            if is_step:
                norm = record.get("learning/raw_grad_norm", record.get("learning/grad_norm", math.nan))
                seconds, tokens = record.get(SECONDS, math.nan), record["learning/total_weights"]
                self.steps.append(Step(number, record["learning/loss"], norm, seconds, tokens))
            else:
                self.evaluations.append({"step": number, "loss": record["eval/avg_loss"]})
        return self.steps[count:]


def _parse(line: str) -> dict[str, float]:
    """Return a record; an empty one for a torn line, which MaxText leaves where it empties the file."""
    with suppress(json.JSONDecodeError):
        return json.loads(line)
    return {}


def tail(file: Path) -> Iterator[list[str]]:
    """Yield, each time, the lines that were completed since the last; the file may not exist yet, or be emptied."""
    offset = 0
    while True:
        data = b""
        with suppress(FileNotFoundError), file.open("rb") as opened:
            offset = offset if os.fstat(opened.fileno()).st_size >= offset else 0
            opened.seek(offset)
            data = opened.read()
        end = data.rfind(b"\n") + 1
        offset += end
        yield data[:end].decode("utf-8", "replace").splitlines()


def judge(run: Run, returncode: int, ended: LauncherError | None, steps: range, *, several: bool = False) -> None:
    """Return if every step ran and the loss fell: the mean of the last third of the steps is below that of the first.

    A run of one step only needs a finite loss, and so does a resumed run whose earlier steps are not known.

    ``returncode``, ``ended``: of the trainer: its exit code, and the error that it wrote, if it did.
    ``steps``: numbers of the steps that this run was to do.

    Raises the ``LauncherError`` of the first class that fits; a diverged run may also end with an error.
    """
    for step in run.steps:
        if not math.isfinite(step.loss):
            raise LossNotFiniteError(
                f"the loss of step {step.number} is {step.loss}; lower learning_rate= or look at {run.log}"
            )
    complete = [step.number for step in run.steps] == list(steps)
    after, see = f"after {len(run.steps)} of {len(steps)} steps", f"; see {run.log}"
    if ended and not (complete and returncode == 0):
        message, separator, remedy = str(ended).partition("; ")
        shown = "" if isinstance(ended, FlagError | CheckpointError) else f" {after}"
        more = see if isinstance(ended, TrainerFailedError) else ""
        raise type(ended)(f"{message}{shown}{separator}{remedy}{more}")
    if returncode == -signal.SIGABRT and _NO_MEMORY in run.log.read_bytes():
        raise DoesNotFitError(
            f"the memory of this machine did not suffice {after} ({_NO_MEMORY.decode()}); {MORE_MEMORY}"
        )
    if returncode < 0:
        hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
        kind = ProcessKilledError if several else TrainerFailedError
        raise kind(f"the trainer was killed by {signal.Signals(-returncode).name}{hint} {after}{see}")
    if returncode:
        kind = ProcessLostError if several and returncode == ProcessLostError.exit_code else TrainerFailedError
        raise kind(f"the trainer failed with exit code {returncode} {after}{see}")
    if not complete:
        raise StoppedEarlyError(f"the trainer ended {after} without an error{see}")
    losses = [step.loss for step in (*run.before, *run.steps)]
    third = max(1, len(losses) // 3)
    if len(losses) > 1 and (run.before or not steps.start) and sum(losses[-third:]) >= sum(losses[:third]):
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


def compare(steps: Sequence[Step], reference: Sequence[Step]) -> list[float]:
    """Return, for each step of two complete runs, the larger of the relative differences of loss and gradient norm."""

    def differ(ours: float, theirs: float) -> float:
        difference = 0.0 if ours == theirs else abs(ours - theirs) / abs(theirs) if theirs else math.inf
        return difference if math.isfinite(difference) else math.inf

    return [
        max(differ(step.loss, other.loss), differ(step.gradient_norm, other.gradient_norm))
        for step, other in zip(steps, reference, strict=True)
    ]


def find_disagreement(run: Run, *, dtype: str) -> DisagreementError | None:
    """Return an error that names the first step where a run and its reference differ by more than `TOLERANCE`."""
    for step, other, difference in zip(run.steps, run.reference, run.differences, strict=True):
        if difference > TOLERANCE:
            hint = "report it with both logs" if dtype == "float32" else f"{dtype} rounds; compare with dtype=float32"
            return DisagreementError(
                f"step {step.number}: loss {step.loss:.7f} and gradient norm {step.gradient_norm:.7f}, "
                f"but {other.loss:.7f} and {other.gradient_norm:.7f} without the pipeline: "
                f"a relative difference of {difference:.1e}, more than {TOLERANCE:.0e}; {hint}"
            )
    return None
