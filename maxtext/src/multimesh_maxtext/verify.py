"""Whether a pipeline trains as one program does: ``--verify``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from multimesh.errors import DisagreementError
from multimesh_maxtext.checks import Job, check_job
from multimesh_maxtext.metrics import Step
from multimesh_maxtext.options import Options

TOLERANCE = 1e-5
"""Largest relative difference of a loss or a gradient norm at which two runs agree; float32 needs less."""


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

    One program on the devices of one stage, its layers unrolled like the pipeline's, accumulates the same microbatches.
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
        "scan_layers": bool(o.scan_layers),
        "cpus": None if o.gpus else job.mesh_devices,
        "gpus": job.mesh_devices if o.gpus else 0,
    }
    return check_job(Options(**{**vars(o), **changes}), job.model)


def compare(steps: Sequence[Step], reference: Sequence[Step]) -> list[Pair]:
    """Return the steps of two complete runs side by side."""
    return [Pair(step, other) for step, other in zip(steps, reference, strict=True)]


def largest(pairs: Sequence[Pair]) -> float:
    """Return the largest difference of all steps."""
    return max((pair.difference for pair in pairs), default=0.0)


def check_agreement(pairs: Sequence[Pair], *, dtype: str) -> None:
    """Raise where the runs differ by more than `TOLERANCE`.

    Raises
    ------
    DisagreementError
        Naming the first step that differs.
    """
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
