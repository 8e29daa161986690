"""Zero bubble: no stage waits for weight gradients, so they fill the idle time.

ZB-H1 and ZB-H2: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.one_f_one_b import in_groups
from multimesh.schedules.table import Cell, Schedule


def split(forwards: Sequence[Cell], backwards: Sequence[Cell], warm: int, late: int) -> Iterator[Cell]:
    """``warm`` forwards, then in turn a forward, a backward, and the weight gradients of ``late`` backwards ago."""
    yield from forwards[:warm]
    weights = [Cell("W", c.stage, c.microbatch) for c in backwards]
    for n, pair in enumerate(itertools.zip_longest(forwards[warm:], backwards)):
        yield from (cell for cell in pair if cell is not None)
        yield from weights[n - late : n - late + 1] if n >= late else ()
    yield from weights[max(len(weights) - late, 0) :]


@dataclass(frozen=True)
class InterleavedZB(Schedule):
    """`Interleaved` with split backwards: the stage before waits for B, and W makes the weight gradients.

    Submesh ``r`` of ``p`` runs its W ``r`` backwards late. It begins with fewer forwards than `Interleaved`; every
    submesh holds at most ``p v`` activations of one stage each. With one stage on each submesh this is `ZBH1`.
    """

    name: ClassVar[str] = "interleaved-zb"
    splits: ClassVar[bool] = True
    usual: ClassVar[int] = 2

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """``(v - 1) p + p - r - 1`` forwards, then a forward, a backward and the W of ``r`` backwards ago in turn."""
        forwards, backwards, group = in_groups(rank, submeshes, chunks, microbatches)
        return split(forwards, backwards, (chunks - 1) * group + submeshes - rank - 1, rank)


@dataclass(frozen=True)
class ZBH1(InterleavedZB):
    """1F1B with split backwards: the stage before waits for B, and W makes the weight gradients.

    Submesh ``r`` of ``p`` runs its W ``r`` microbatches late. So every submesh holds at most ``p`` microbatches, as
    submesh 0 does under 1F1B.
    """

    name: ClassVar[str] = "zb-h1"
    chunks: ClassVar[int | None] = 1
    usual: ClassVar[int] = 1


@dataclass(frozen=True)
class ZBH2(Schedule):
    """`ZBH1` with twice the warm-up: once it has begun, no submesh waits, if F, B and W take the same time.

    Every submesh holds at most ``2 p - 1`` microbatches. Submesh ``r`` begins ``r`` forwards after the first and ends
    as much later. The next step fills these gaps, unless something waits for all submeshes, such as clipping by a
    global norm.
    """

    name: ClassVar[str] = "zb-h2"
    splits: ClassVar[bool] = True
    chunks: ClassVar[int | None] = 1

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """``2 (p - r - 1)`` forwards, then a forward, a backward and the W of ``2 r`` backwards ago in turn."""
        forwards, backwards, _ = in_groups(rank, submeshes, chunks, microbatches)
        return split(forwards, backwards, 2 * (submeshes - rank - 1), 2 * rank)
