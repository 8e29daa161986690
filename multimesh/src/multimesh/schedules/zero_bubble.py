"""ZB-H1: the weight gradients, which nobody waits for, fill what would be idle time.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.table import Cell, Schedule


@dataclass(frozen=True)
class ZBH1(Schedule):
    """1F1B whose backwards are split: B makes what the stage before waits for, W the gradients of the weights.

    Submesh ``r`` of ``p`` runs its W ``r`` microbatches late, so that every submesh holds at most ``p`` microbatches,
    what submesh 0 holds under 1F1B.
    """

    name: ClassVar[str] = "zb-h1"
    splits: ClassVar[bool] = True
    chunks: ClassVar[int | None] = 1

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterator[Cell]:
        """``p - r - 1`` forwards, then a forward, a backward and the weight gradients of ``r`` backwards ago."""
        warm = min(submeshes - rank - 1, microbatches)
        yield from (Cell("F", rank, i) for i in range(warm))
        for i in range(microbatches):
            if warm + i < microbatches:
                yield Cell("F", rank, warm + i)
            yield Cell("B", rank, i)
            if i >= rank:
                yield Cell("W", rank, i - rank)
        yield from (Cell("W", rank, i) for i in range(max(microbatches - rank, 0), microbatches))
