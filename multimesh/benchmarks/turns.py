"""CPU time of contenders that take turns in one process."""

from __future__ import annotations

import os
import statistics
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


def show(table: Mapping[str, list[float]], base: str) -> None:
    """Print medians, ranges and ratios to ``base``: the ratio of the medians, and the median of the rounds' ratios."""
    print(f"{'CPU ms':34} median      range       x {base}   (load {os.getloadavg()[0]:.1f})")
    for name, times in table.items():
        each = statistics.median(t / b for t, b in zip(times, table[base], strict=True))
        ratio = statistics.median(times) / statistics.median(table[base])
        print(
            f"{name:34} {statistics.median(times):6.0f} {min(times):7.0f}-{max(times):<7.0f} {ratio:5.2f} ({each:.2f})"
        )
    print()
