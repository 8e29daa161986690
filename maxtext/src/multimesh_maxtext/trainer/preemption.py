"""A notice that this process is about to end: MaxText asks for it after every step, saves, and stops."""

from __future__ import annotations

import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


class Notice:
    """SIGTERM as a notice, in a run of one process. JAX's preemption service needs several and a coordinator."""

    def __init__(self) -> None:
        """Take SIGTERM from now on."""
        self._came = False
        self._step, self._ends = -1, False
        signal.signal(signal.SIGTERM, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True

    def reached(self, step: int) -> bool:
        """Return whether this step is the last one: the same for all questions about a step."""
        if step != self._step:
            self._step, self._ends = step, self._came
        return self._ends


def listen() -> None:
    """Let a signal end the training with a checkpoint."""
    if jax.process_count() == 1:
        multihost_utils.reached_preemption_sync_point = Notice().reached
