"""Clocks of several processes, compared with that of process 0."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import jax

from multimesh.core import _compat
from multimesh.processes import agree

ROUNDS = 40  # questions to process 0
_BEST = 10  # of them, those with the fastest answers count


def now() -> float:
    """Seconds on the clock of this process."""
    return time.perf_counter()


@dataclass(frozen=True)
class Offset:
    """Seconds to add to `now` for the time of process 0, and their possible error."""

    seconds: float = 0.0
    error: float = 0.0


def offset(name: str) -> Offset:
    """Compare clocks; all processes call it, with a name that is used once.

    A process asks process 0 for its time through JAX's key-value store. It assumes that process 0 read its clock in the
    middle between question and answer; the error is at most half of the time between them.
    """
    store, patience = _compat.key_value_store(), int(1000 * agree.patience())
    me, key = jax.process_index(), f"multimesh/clock/{name}"
    agree.barrier(f"clock/{name}")
    found: list[tuple[float, float]] = []
    if me == 0:
        for asking in (f"{key}/{rank}/{i}" for rank in range(1, jax.process_count()) for i in range(ROUNDS)):
            store.blocking_key_value_get(f"{asking}/asked", patience)
            store.key_value_set(f"{asking}/time", repr(now()))
    else:
        for asking in (f"{key}/{me}/{i}" for i in range(ROUNDS)):
            start = now()
            store.key_value_set(f"{asking}/asked", "")
            theirs = float(store.blocking_key_value_get(f"{asking}/time", patience))
            end = now()
            found.append((end - start, theirs - (start + end) / 2))
    best = sorted(found)[:_BEST] or [(0.0, 0.0)]
    agree.forget(f"clock/{name}")
    return Offset(statistics.median(ahead for _, ahead in best), best[-1][0] / 2)
