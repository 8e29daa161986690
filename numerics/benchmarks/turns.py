"""CPU time of contenders that take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def measure(
    contenders: Mapping[str, Callable[[], Any]], runs: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """CPU milliseconds of each contender in ``runs`` rounds, after a round that is not counted; of another clock's."""
    table: dict[str, list[float]] = {name: [] for name in contenders}
    for count in range(runs + 1):
        for name, run in contenders.items():
            start = clock()
            jax.block_until_ready(run())
            if count:
                table[name].append(1000 * (clock() - start))
    return table
