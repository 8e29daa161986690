"""Whether a finished run is a success. A trainer that raises, diverges, stops early or learns nothing is not."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path

from multimesh.errors import LossNotFallingError, LossNotFiniteError, StoppedEarlyError, TrainerFailedError
from multimesh_maxtext.metrics import Step


def judge(
    steps: Sequence[Step], *, expected: int, returncode: int, log: Path, before: Sequence[Step] = (), first: int = 0
) -> None:
    """Return if every step ran and the loss is finite and falling.

    Falling means that the mean loss of the last third of the steps is below that of the first third; a run of one step
    is only asked for a finite loss, and so is a resumed run of whose earlier steps nothing is known.

    Parameters
    ----------
    expected
        How many steps the whole training has.
    before
        Steps of the run that this one resumed, as far as they are known.
    first
        The step that this run began with.

    Raises
    ------
    LossNotFiniteError, TrainerFailedError, StoppedEarlyError, LossNotFallingError
        In this order: a diverged run also ends with an error, but the loss is why.
    """
    for step in steps:
        if not math.isfinite(step.loss):
            raise LossNotFiniteError(
                f"the loss of step {step.number} is {step.loss}; lower learning_rate= or look at {log}"
            )
    complete = [step.number for step in steps] == list(range(first, expected))
    if returncode:
        raise TrainerFailedError(f"the trainer {_ending(returncode)} after {_count(steps, expected, first)}; see {log}")
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


def _ending(returncode: int) -> str:
    if returncode > 0:
        return f"failed with exit code {returncode}"
    hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-returncode).name}{hint}"
