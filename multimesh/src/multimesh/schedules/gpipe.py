"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
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
