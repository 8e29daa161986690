"""How fast this machine's CPU is, measured in place with NumPy."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_SIZE, _BYTES, _TURNS = 768, 2**26, 3


class Machine(NamedTuple):
    """A CPU device of this machine: its operations per second in float32, bytes per second, and bytes."""

    product: float
    bandwidth: float
    memory: float


@functools.cache
def machine() -> Machine:
    """Measure this machine, once in a process; it takes about 0.2 s.

    The best of a few turns counts, because other programs only make turns longer.
    """
    square = np.ones((_SIZE, _SIZE), np.float32)
    array = np.ones(_BYTES // 8)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(2.0 * _SIZE**3 / _best(lambda: square @ square), 2.0 * _BYTES / _best(array.copy), float(pages))


def _best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
