"""The steps of a run: read from its metrics file as they are written, judged, and compared with another run's."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multimesh_maxtext import errors
from multimesh_maxtext.command.job import Job, Paths, make_job
from multimesh_maxtext.handoff import SECONDS

TOLERANCE = 1e-5
"""Largest relative difference of a loss or a gradient norm at which two runs agree; float32 needs less."""

Tell = Callable[[Mapping[str, float]], object]
"""Called with the record of each step and evaluation."""

Listeners = Mapping[str, Tell]
"""Whom a run tells, by the names that warnings have."""


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
    """A training, whose records are read from its metrics file as the trainer writes them."""

    error: errors.LauncherError | None = None  # why it ended; None for a success
    # reference, differences: with --verify the steps of one program, and for each step the larger of the relative
    # differences of loss and gradient norm
    reference: Sequence[Step] = ()
    differences: Sequence[float] = ()

    def __init__(self, paths: Paths, planned: range = range(0), listeners: Listeners | None = None) -> None:
        """Cut the first planned step and all after it off the file; listeners get copies of the records from then on.

        What one of them raises is told once, with its name, and ends nothing.
        """
        metrics, self.paths, self.planned = paths.metrics, paths, planned
        self._lines, self._failed, self._listeners = tail(metrics), set[str](), dict[str, Tell]()
        # evaluations: for each the optimizer ``step`` that it came after, and its mean ``loss`` in nats
        self.steps, self.evaluations = list[Step](), list[dict[str, float]]()
        end = position = 0
        for line in metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else ():
            position += len(line)
            record = _parse(line.decode("utf-8", "replace"))
            if record.keys() & {"learning/loss", "eval/total_loss"} and record["step"] < planned.start:
                end = position
        if position > end:
            os.truncate(metrics, end)
        self.before = self.read()  # steps of the run that this one resumes, as far as they are known
        self.steps, self.evaluations, self._listeners = [], [], dict(listeners or {})

    def read(self) -> list[Step]:
        """Return the steps that were completed since the last call."""
        count = len(self.steps)
        for record in map(_parse, next(self._lines)):
            is_step = "learning/loss" in record
            # MaxText also writes the running means of an evaluation, which have no total.
            if not is_step and "eval/total_loss" not in record:
                continue
            for name, listener in self._listeners.items():
                try:
                    listener(dict(record))
                except Exception as error:  # noqa: BLE001 - whatever a user's code raises, training goes on
                    if name not in self._failed:
                        said = f"{type(error).__name__} at step {record['step']:g}: {error}"
                        print(f"warning: {name}: {said}; training goes on with its next record", file=sys.stderr)
                    self._failed.add(name)
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


def judge(run: Run, ends: Sequence[errors.LauncherError | None]) -> errors.LauncherError | None:
    """Return why a run is no success; None if every step ran and the loss fell.

    It falls if the mean of the last third of the steps is below that of the first. A run of one step only needs a
    finite loss, and so does a resumed run whose earlier steps are not known.

    ``ends``: why each of its trainers ended, None for a success.
    """
    for step in run.steps:
        if not math.isfinite(step.loss):
            return errors.LossNotFiniteError(
                f"the loss of step {step.number} is {step.loss}; lower learning_rate= or look at {run.paths.log}"
            )
    complete = [step.number for step in run.steps] == list(run.planned)
    early = errors.PreemptedError | errors.StoppedEarlyError if complete else ()  # what came too late to end it so
    causes = [end for end in ends if end and not isinstance(end, early)]
    after = f"after {len(run.steps)} of {len(run.planned)} steps"
    if causes:
        error = min(causes, key=lambda end: end.doubt)
        if not isinstance(error, errors.FlagError | errors.CheckpointError):
            message, separator, remedy = str(error).partition("; ")
            error.args = (f"{message} {after}{separator}{remedy}",)
        return error
    if not complete:
        return errors.StoppedEarlyError(f"the trainer ended without an error {after}; see {run.paths.log}")
    losses = [step.loss for step in (*run.before, *run.steps)]
    third = max(1, len(losses) // 3)
    if len(losses) > 1 and (run.before or not run.planned.start) and sum(losses[-third:]) >= sum(losses[:third]):
        return errors.LossNotFallingError(
            f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}; "
            "train longer with --num-steps or change learning_rate="
        )
    return None


def reference_job(job: Job) -> Job:
    """Return the job that a pipeline is compared with: one program in one process, on the devices of one stage."""
    o = job.flags
    usual: dict[str, Any] = dict.fromkeys(("pp", "interleave", "nodes"), 1)
    usual |= dict.fromkeys(("schedule", "custom_schedule_path", "partition"))
    single = replace(
        o,
        **usual,
        backend="spmd",
        batch_size=job.batch,
        num_layers=job.model.layers,
        scan_layers=bool(o.scan_layers),
        cpus=None if o.gpus else job.mesh_devices,
        gpus=job.mesh_devices if o.gpus else 0,
        zero=0,  # MaxText's own form of it rounds parameters and gradients to bfloat16
    )
    return make_job(single, job.model)


def compare(run: Run, reference: Sequence[Step], dtype: str) -> errors.DisagreementError | None:
    """Note the differences of two complete runs; return an error with the first step that differs by too much.

    ``dtype``: of the activations of both.
    """

    def differ(ours: float, theirs: float) -> float:
        difference = 0.0 if ours == theirs else abs(ours - theirs) / abs(theirs) if theirs else math.inf
        return difference if math.isfinite(difference) else math.inf

    pairs = list(zip(run.steps, reference, strict=True))
    run.reference = reference
    run.differences = [max(differ(a.loss, b.loss), differ(a.gradient_norm, b.gradient_norm)) for a, b in pairs]
    for (step, other), difference in zip(pairs, run.differences, strict=True):
        if difference > TOLERANCE:
            hint = "report it with both logs" if dtype == "float32" else f"{dtype} rounds; compare with dtype=float32"
            return errors.DisagreementError(
                f"step {step.number}: loss {step.loss:.7f} and gradient norm {step.gradient_norm:.7f}, "
                f"but {other.loss:.7f} and {other.gradient_norm:.7f} without the pipeline: "
                f"a relative difference of {difference:.1e}, more than {TOLERANCE:.0e}; {hint}"
            )
    return None
