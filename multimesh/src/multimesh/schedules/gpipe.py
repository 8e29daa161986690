"""All forwards, then all backwards.

GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
Looped BFS: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.table import Cell, Schedule


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards (also called fill-drain). Every microbatch is alive at once."""

    name: ClassVar[str] = "gpipe"

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterator[Cell]:
        """Chunk by chunk, microbatch by microbatch."""
        for chunk in range(chunks):
            yield from (Cell("F", chunk * submeshes + rank, i) for i in range(microbatches))
        for chunk in reversed(range(chunks)):
            yield from (Cell("B", chunk * submeshes + rank, i) for i in range(microbatches))


@dataclass(frozen=True)
class LoopedBFS(GPipe):
    """`GPipe` with ``v`` stages on each submesh, which runs all microbatches of a stage before its next stage.

    Fill and drain take ``1 / v`` of the time, as in `Interleaved`. A submesh needs the weights of one stage at a time,
    which suits weights that are gathered or loaded for each use. Every microbatch is alive at once.
    """

    name: ClassVar[str] = "looped-bfs"
    usual: ClassVar[int] = 2
