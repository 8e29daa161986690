"""Wavefronts: tasks in the order in which the dependencies alone would let them start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.table import Cell, Schedule


@dataclass(frozen=True)
class Wavefront(Schedule):
    """Front by front; the front of a task is its stage plus its microbatch, backward stages counted on after the last.

    Of one front the forwards come first. A transfer is issued in the front of the task that reads it. Submesh ``r``
    holds at most ``2 (p - r)`` microbatches (of one stage a submesh): no task waits for another of its submesh as
    long as all take the same time.
    """

    name: ClassVar[str] = "wavefront"
    ahead: ClassVar[int | None] = 0

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """Cells by front, then forwards first, then the older microbatch."""
        stages = submeshes * chunks
        cells = [
            Cell(phase, chunk * submeshes + rank, i)
            for phase in "FB"
            for chunk in range(chunks)
            for i in range(microbatches)
        ]
        return sorted(cells, key=lambda c: (self.front(c, stages), c.phase == "B", c.microbatch))

    def front(self, cell: Cell, stages: int) -> int:
        """Stage (of the backward: ``2 stages - 1 - stage``) plus microbatch."""
        return cell.microbatch + (cell.stage if cell.phase == "F" else 2 * stages - 1 - cell.stage)


@dataclass(frozen=True)
class PrefetchWavefront(Wavefront):
    """`Wavefront` with every transfer issued one front ahead of the task that reads it."""

    name: ClassVar[str] = "prefetch-wavefront"
    ahead: ClassVar[int | None] = 1
