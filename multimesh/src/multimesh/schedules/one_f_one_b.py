"""1F1B, plain, eager and interleaved: in the steady state every submesh alternates between a forward and a backward.

Plain: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, in its synchronous form.
Eager: Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2023.
Interleaved: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
Kimi K2: Moonshot AI, "Kimi K2: Open Agentic Intelligence", 2025, in the form of JaxPP.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.table import Cell, Schedule


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B with ``v`` stages on each submesh: fill and drain take ``1 / v`` of the time, for more transfers.

    Microbatches go through the stages of a submesh in groups of ``p``. If ``p`` does not divide ``m``, the groups have
    ``m // (m // p)`` microbatches or one more. The published idle time, ``(p - 1) (tF + tB) / v``, holds for equal
    groups of ``p``. Submesh ``r`` holds at most ``2 (p - r - 1) + (v - 1) p + 1`` activations of one stage each. With
    one stage on each submesh this is `OneFOneB`.
    """

    name: ClassVar[str] = "interleaved"
    usual: ClassVar[int] = 2

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterator[Cell]:
        """By groups and chunks: `warm` forwards, then pairs of a forward and a backward, then the backwards left."""
        forwards, backwards, group = in_groups(rank, submeshes, chunks, microbatches)
        warm = self.warm(submeshes - rank - 1, chunks, group)
        yield from forwards[:warm]
        for pair in itertools.zip_longest(forwards[warm:], backwards):
            yield from (cell for cell in pair if cell is not None)

    def warm(self, behind: int, chunks: int, group: int) -> int:
        """Forwards before the first backward, on a submesh with so many ``behind`` it."""
        return 2 * behind + (chunks - 1) * group if chunks > 1 else behind


@dataclass(frozen=True)
class KimiK2(Interleaved):
    """`Interleaved` with one more forward before the first backward.

    In the steady state a cell ends one cell before its reader starts. That is the time for a transfer, or for an
    exchange of tokens between experts. Submesh ``r`` holds one activation more.
    """

    name: ClassVar[str] = "kimi-k2"

    def warm(self, behind: int, chunks: int, group: int) -> int:
        """One more than `EagerOneFOneB`."""
        return 2 * behind + (chunks - 1) * group + 1


@dataclass(frozen=True)
class OneFOneB(Interleaved):
    """One forward, one backward in the steady state: submesh ``r`` of ``p`` holds at most ``p - r`` microbatches.

    With several stages on each submesh this is `Interleaved`.
    """

    name: ClassVar[str] = "1f1b"
    usual: ClassVar[int] = 1


@dataclass(frozen=True)
class EagerOneFOneB(OneFOneB):
    """1F1B with twice the warm-up: a transfer has the time of a microbatch before its reader waits for it.

    Submesh ``r`` of ``p`` holds at most ``2 (p - r) - 1`` microbatches; under 1F1B it holds ``p - r``. If transfers
    take no time, it waits as long as 1F1B. With several stages on each submesh this is `Interleaved`, which has that
    warm-up already.
    """

    name: ClassVar[str] = "eager-1f1b"

    def warm(self, behind: int, chunks: int, group: int) -> int:
        """Twice as many as 1F1B."""
        return 2 * behind + (chunks - 1) * group


def in_groups(rank: int, submeshes: int, chunks: int, microbatches: int) -> tuple[list[Cell], list[Cell], int]:
    """Forwards and backwards of a submesh, both in groups of ``p`` microbatches, and the size of the first group."""
    groups = _groups(submeshes, microbatches)

    def cells(phase: str, order: Sequence[int]) -> list[Cell]:
        return [Cell(phase, c * submeshes + rank, i) for group in groups for c in order for i in group]

    return cells("F", range(chunks)), cells("B", range(chunks)[::-1]), len(groups[0])


def _groups(size: int, microbatches: int) -> list[range]:
    """Microbatches in groups of ``size``, or of a few more if need be; the larger groups first."""
    count = max(1, microbatches // size)
    starts = [-(-microbatches * g // count) for g in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]
