"""Wavefronts: the order of the original MultiMesh, in effect interleaved 1F1B with starts in groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.table import Cell, Schedule


@dataclass(frozen=True)
class Wavefront(Schedule):
    """Groups of ``p`` microbatches, front by front; a group starts half of its cells behind the one before.

    Microbatch ``i`` passes its ``2 p v - 1`` cells one per front: the forwards of stages 0, 1, ..., then the backwards
    down from the last stage, whose two cells share a front. It starts in front ``(i // p) p v + i % p``: a group of
    ``p`` comes half of the cells behind the one before. So in each front a submesh has at most one forward and one
    backward, of different stages; the later cell of a microbatch comes first.

    If ``p`` divides ``m``, submesh ``r`` runs ``w = p (v + 1) - 2 (r + 1)`` forwards before its first backward. It
    holds at most ``w`` activations of one stage each, the last submesh ``w + 1``, and none more than ``m v``. With
    stages of equal cost it waits as long as `Interleaved`.

    A transfer is issued in the front of the cell that reads it.
    """

    name: ClassVar[str] = "wavefront"
    ahead: ClassVar[int | None] = 0

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """The cells by front; within a front, the cell that is further on comes first."""
        stages = submeshes * chunks

        def key(cell: Cell) -> tuple[int, int, int]:
            return self.front(cell, submeshes, chunks), -_way(cell, stages), -ord(cell.phase)

        own = range(rank, stages, submeshes)
        return sorted((Cell(phase, s, i) for phase in "FB" for s in own for i in range(microbatches)), key=key)

    def front(self, cell: Cell, submeshes: int, chunks: int) -> int:
        """``(i // p) p v + i % p``, and one more for each cell of the microbatch before it."""
        group, place = divmod(cell.microbatch, submeshes)
        stages = submeshes * chunks
        return group * stages + place + _way(cell, stages)


def _way(cell: Cell, stages: int) -> int:
    """The number of cells of a microbatch before this one; the two of the last stage count as one."""
    return cell.stage if cell.phase == "F" else 2 * stages - 2 - cell.stage


@dataclass(frozen=True)
class PrefetchWavefront(Wavefront):
    """`Wavefront`, with every transfer issued one front before its reader."""

    name: ClassVar[str] = "prefetch-wavefront"
    ahead: ClassVar[int | None] = 1
