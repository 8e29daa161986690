"""Published schedules: forwards first, 1F1B, zero bubble, V shapes, wavefronts.

GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
Looped BFS: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.

1F1B: in the steady state every submesh alternates between a forward and a backward.
Plain: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, in its synchronous form.
Eager: Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2023.
Interleaved: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
Kimi K2: Moonshot AI, "Kimi K2: Open Agentic Intelligence", 2025, in the form of JaxPP.

Zero bubble: no stage waits for weight gradients, so they fill the idle time.
ZB-H1, ZB-H2, ZB-V: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with Controllable
Memory", 2024.
DualPipeV: DualPipe of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, cut in half: Sea AI Lab, "DualPipe could be
better without the Dual", 2025.

Wavefronts: the order of the original MultiMesh, in effect interleaved 1F1B with starts in groups.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from multimesh.schedules.costs import UNIT_COSTS, PhaseCosts
from multimesh.schedules.table import Cell, PublishedIdle, Schedule


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards (also called fill-drain). Every microbatch is alive at once."""

    name: ClassVar[str] = "gpipe"
    summary: ClassVar[str] = "all forwards, then all backwards (also called fill-drain)"

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterator[Cell]:
        """Yield the cells chunk by chunk, microbatch by microbatch."""
        for chunk in range(chunks):
            yield from (Cell("F", chunk * submeshes + rank, i) for i in range(microbatches))
        for chunk in reversed(range(chunks)):
            yield from (Cell("B", chunk * submeshes + rank, i) for i in range(microbatches))

    def idle(self, submeshes: int, chunks: int, microbatches: int, costs: PhaseCosts = UNIT_COSTS) -> PublishedIdle:
        """``(p - 1) (tF + tB + tW) / v``, for at least ``p`` microbatches (Huang et al. 2019, Lamy-Poirier 2022)."""
        return _fill_and_drain(submeshes, chunks, costs, "m < p" if microbatches < submeshes and chunks > 1 else "")


@dataclass(frozen=True)
class LoopedBFS(GPipe):
    """`GPipe` with ``v`` stages on each submesh, which runs all microbatches of a stage before its next stage.

    Fill and drain take ``1 / v`` of the time, as in `Interleaved`. A submesh needs the weights of one stage at a time,
    which suits weights that are gathered or loaded for each use. Every microbatch is alive at once.
    """

    name: ClassVar[str] = "looped-bfs"
    summary: ClassVar[str] = "gpipe with two stages on each submesh"
    usual: ClassVar[int] = 2


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B with ``v`` stages on each submesh: fill and drain take ``1 / v`` of the time, for more transfers.

    Microbatches go through the stages of a submesh in groups of ``p``. If ``p`` does not divide ``m``, the groups have
    ``m // (m // p)`` microbatches or one more. The published idle time, ``(p - 1) (tF + tB) / v``, holds for equal
    groups of ``p``. Submesh ``r`` holds at most ``2 (p - r - 1) + (v - 1) p + 1`` activations of one stage each. With
    one stage on each submesh this is `OneFOneB`.
    """

    name: ClassVar[str] = "interleaved"
    summary: ClassVar[str] = "1f1b with two stages on each submesh"
    sends_ahead: ClassVar[bool] = True
    usual: ClassVar[int] = 2

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterator[Cell]:
        """Yield the cells by groups and chunks: `warm` forwards, then forward-backward pairs, then other backwards."""
        forwards, backwards, group = _in_groups(rank, submeshes, chunks, microbatches)
        return _in_turn(forwards, backwards, self.warm(submeshes - rank - 1, chunks, group))

    def warm(self, behind: int, chunks: int, group: int) -> int:
        """Return the number of forwards before the first backward, on a submesh that ``behind`` others follow."""
        return 2 * behind + (chunks - 1) * group if chunks > 1 else behind

    def idle(self, submeshes: int, chunks: int, microbatches: int, costs: PhaseCosts = UNIT_COSTS) -> PublishedIdle:
        """``(p - 1) (tF + tB + tW) / v``, if ``p`` divides ``m`` (Narayanan et al. 2019, 2021)."""
        return _fill_and_drain(submeshes, chunks, costs, _uneven(submeshes, chunks, microbatches))


@dataclass(frozen=True)
class KimiK2(Interleaved):
    """`Interleaved` with one more forward before the first backward.

    In the steady state a cell ends one cell before its reader starts. That is the time for a transfer, or for an
    exchange of tokens between experts. Submesh ``r`` holds one activation more.
    """

    name: ClassVar[str] = "kimi-k2"
    summary: ClassVar[str] = "interleaved with one forward more first"

    def warm(self, behind: int, chunks: int, group: int) -> int:
        """Return one more than `EagerOneFOneB`."""
        return 2 * behind + (chunks - 1) * group + 1


@dataclass(frozen=True)
class OneFOneB(Interleaved):
    """One forward, one backward in the steady state: submesh ``r`` of ``p`` holds at most ``p - r`` microbatches.

    With several stages on each submesh this is `Interleaved`.
    """

    name: ClassVar[str] = "1f1b"
    summary: ClassVar[str] = "one forward, one backward, which keeps fewer activations"
    usual: ClassVar[int] = 1


@dataclass(frozen=True)
class EagerOneFOneB(OneFOneB):
    """1F1B with twice the warm-up: a transfer may take as long as a microbatch before its reader waits.

    Submesh ``r`` of ``p`` holds at most ``2 (p - r) - 1`` microbatches; under 1F1B it holds ``p - r``. If transfers
    take no time, it waits as long as 1F1B. With several stages on each submesh this is `Interleaved`, which has that
    warm-up already.
    """

    name: ClassVar[str] = "eager-1f1b"
    summary: ClassVar[str] = "1f1b with more forwards first, so that transfers take place beside kernels"

    def warm(self, behind: int, chunks: int, group: int) -> int:
        """Return twice as many as 1F1B."""
        return 2 * behind + (chunks - 1) * group


@dataclass(frozen=True)
class InterleavedZB(Schedule):
    """`Interleaved` with split backwards: the stage before waits for B, and W makes the weight gradients.

    Submesh ``r`` of ``p`` runs its W ``r`` backwards late. It begins with fewer forwards than `Interleaved`; every
    submesh holds at most ``p v`` activations of one stage each. With one stage on each submesh this is `ZBH1`.
    """

    name: ClassVar[str] = "interleaved-zb"
    summary: ClassVar[str] = "zb-h1 with two stages on each submesh"
    splits: ClassVar[bool] = True
    usual: ClassVar[int] = 2

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """Yield ``(v - 1) p + p - r - 1`` forwards, then in turn a forward, a backward and the W ``r`` backwards
        behind.
        """
        forwards, backwards, group = _in_groups(rank, submeshes, chunks, microbatches)
        return _in_turn(forwards, backwards, (chunks - 1) * group + submeshes - rank - 1, rank)

    def idle(self, submeshes: int, chunks: int, microbatches: int, costs: PhaseCosts = UNIT_COSTS) -> PublishedIdle:
        """``(p - 1) (tF + tB - tW) / v``, for at least ``p`` microbatches and ``tW <= tF`` (Qi et al. 2023).

        The paper assumes equal times: longer weight gradients do not fit into the gaps.
        """
        unless = "m < p" if microbatches < submeshes else _uneven(submeshes, chunks, microbatches)
        unless = unless or ("tW > tF" if costs["W"] > costs["F"] else "")
        idle = (submeshes - 1) * (costs["F"] + costs["B"] - costs["W"]) / chunks
        return PublishedIdle(idle, f"(p-1)(tF+tB-tW){_over(chunks)}", unless)


@dataclass(frozen=True)
class ZBH1(InterleavedZB):
    """1F1B with split backwards: the stage before waits for B, and W makes the weight gradients.

    Submesh ``r`` of ``p`` runs its W ``r`` microbatches late. So every submesh holds at most ``p`` microbatches, as
    submesh 0 does under 1F1B.
    """

    name: ClassVar[str] = "zb-h1"
    summary: ClassVar[str] = "1f1b with the weight gradients apart, to fill idle time"
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
    summary: ClassVar[str] = "zb-h1 that fills all idle time, in more memory"
    splits: ClassVar[bool] = True
    chunks: ClassVar[int | None] = 1

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """Yield ``2 (p - r - 1)`` forwards, then in turn a forward, a backward and the W ``2 r`` backwards behind."""
        forwards, backwards, _ = _in_groups(rank, submeshes, chunks, microbatches)
        return _in_turn(forwards, backwards, 2 * (submeshes - rank - 1), 2 * rank)

    def idle(self, submeshes: int, chunks: int, microbatches: int, costs: PhaseCosts = UNIT_COSTS) -> PublishedIdle:
        """``(p - 1) (tF + tB - 2 tW)`` of steps in a row, for ``2 tW <= tF + tB`` (Qi et al. 2023)."""
        gap = costs["F"] + costs["B"] - 2 * costs["W"]
        unless = "m < 2p-1" if microbatches < 2 * submeshes - 1 else "2 tW > tF+tB" if gap < 0 else ""
        return PublishedIdle((submeshes - 1) * gap, "(p-1)(tF+tB-2tW)", unless, in_a_row=True)


@dataclass(frozen=True)
class VShaped(Schedule):
    """Base class of the V shapes: submesh ``s`` has stage ``s`` and, across from it, stage ``2 p - 1 - s``.

    A microbatch goes down the submeshes and comes back up. Its backward begins where its forward began: submesh 0 has
    the first and the last stage, and all submeshes hold about as many activations. ``words`` make a row for enough
    microbatches; those beyond ``m`` are left out.
    """

    splits: ClassVar[bool] = True
    chunks: ClassVar[int | None] = 2
    usual: ClassVar[int] = 2

    def placement(self, submeshes: int) -> tuple[int, ...]:
        """Return the way down and up again: ``0, 1, ..., p - 1, p - 1, ..., 1, 0``."""
        return (*range(submeshes), *reversed(range(submeshes)))

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterator[Cell]:
        """Yield the cells of the words: ``F0`` is a forward of the first stage, ``B1`` a backward of the last."""
        stage = {"0": rank, "1": 2 * submeshes - 1 - rank}
        times: collections.Counter[str] = collections.Counter()
        for word in self.words(rank, submeshes, max(microbatches, 2 * submeshes)):
            if times[word] < microbatches:
                yield Cell(word[0], stage[word[1]], times[word])
            times[word] += 1

    def words(self, rank: int, submeshes: int, microbatches: int) -> Iterable[str]:
        """Return the row of a submesh, for at least ``2 p`` microbatches."""
        raise NotImplementedError


@dataclass(frozen=True)
class ZBV(VShaped):
    """No submesh waits once it has begun, if F, B and W take the same time; in the memory of 1F1B's first submesh.

    Every submesh holds at most ``p`` microbatches: ``2 p`` activations of its two half-sized stages. As in `ZBH2` the
    next step fills the gaps before the begin and after the end.
    """

    name: ClassVar[str] = "zb-v"
    summary: ClassVar[str] = "zb-h2 with the first and the last stage on one submesh, and so on inwards"

    def words(self, rank: int, submeshes: int, microbatches: int) -> Iterable[str]:
        """Return forwards until the V is full; then in turn a forward, a backward and its W of either stage; then W."""
        up = submeshes - rank
        extra = microbatches - 2 * submeshes + rank + 1  # forwards of the first stage that the fill leaves
        fill = ["F0"] * (2 * up - 1) + ["F1", "F0"] * rank + ["F1", "B1", "W1"] * up
        turns = ["F0", "B0", "W0", "F1", "B1", "W1"] * extra + ["B0", "W0", "F1", "B1", "W1"] * (up - 1)
        return fill + turns + ["B0", "B1"] * rank + ["B0", "W0"] * up + ["W1"] * rank + ["W0"] * rank

    def idle(self, submeshes: int, chunks: int, microbatches: int, costs: PhaseCosts = UNIT_COSTS) -> PublishedIdle:
        """None of steps in a row, for equal times (Qi et al. 2024)."""
        equal = costs["F"] == costs["B"] == costs["W"]
        unless = "m < 2p" if microbatches < 2 * submeshes else "" if equal else "tF, tB and tW differ"
        return PublishedIdle(0.0, "0", unless, in_a_row=True)


@dataclass(frozen=True)
class DualPipeV(VShaped):
    """A forward of one stage beside a backward of the other, in turn, so that experts have time to exchange tokens.

    Every submesh holds at most ``p + 1/2`` microbatches. `ZBV` waits less if F, B and W take the same time. In the
    steady state this schedule splits no backward, and starts fewer kernels.
    """

    name: ClassVar[str] = "dualpipe-v"
    summary: ClassVar[str] = "zb-v with forwards beside backwards"

    def words(self, rank: int, submeshes: int, microbatches: int) -> Iterable[str]:
        """Fill the V, run forwards beside backwards of the other stage, drain it; the last W come late."""
        behind = submeshes - rank - 1
        one, other = ["F0", "B1", "W1"], ["F1", "B0", "W0"]
        fill = ["F0"] * (2 * behind) + ["F0", "F1"] * (rank + 1) + ["B1", "W1", "F1"] * behind
        turns = (one + other) * (microbatches - 2 * submeshes + rank + 1) + ["B1", "W1", *other] * behind
        pairs = ["B1", "B0"] * (rank + 1)
        drain = [word for b in pairs[: rank + 1] for word in (b, b.replace("B", "W"))] + pairs[rank + 1 :]
        late = [b.replace("B", "W") for b in pairs[rank + 1 :] + ["B0"] * behind]
        drain += [word for w in late[:behind] for word in (w, "B0")] + late[behind:]
        return fill + turns + drain

    def idle(self, submeshes: int, chunks: int, microbatches: int, costs: PhaseCosts = UNIT_COSTS) -> PublishedIdle:
        """At most ``(p - 1) (tF + 2 tB - tW) / v``, after ``(p - 1) (tF&B + tB - 3 tW)`` of the paper.

        That is in times of a stage and of a whole backward, and joins a forward and the backward beside it. In our
        tables each hands on its result at once.
        """
        most = (submeshes - 1) * (costs["F"] + 2 * costs["B"] - costs["W"]) / chunks
        return PublishedIdle(
            most, "(p-1)(tF+2tB-tW)/v at most", "m < 2p" if microbatches < 2 * submeshes else "", bound=True
        )


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
    summary: ClassVar[str] = "interleaved with microbatches that start in groups"
    ahead: ClassVar[int | None] = 0

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """Return the cells by front. Within a front, the cell that is further on comes first."""
        stages = submeshes * chunks

        def key(cell: Cell) -> tuple[int, int, int]:
            return self.front(cell, submeshes, chunks), -_way(cell, stages), -ord(cell.phase)

        stages_here = range(rank, stages, submeshes)
        return sorted((Cell(phase, s, i) for phase in "FB" for s in stages_here for i in range(microbatches)), key=key)

    def front(self, cell: Cell, submeshes: int, chunks: int) -> int:
        """Return ``(i // p) p v + i % p``, and one more for each cell of the microbatch before it."""
        group, place = divmod(cell.microbatch, submeshes)
        stages = submeshes * chunks
        return group * stages + place + _way(cell, stages)


@dataclass(frozen=True)
class PrefetchWavefront(Wavefront):
    """`Wavefront`, with every transfer issued one front before its reader."""

    name: ClassVar[str] = "prefetch-wavefront"
    summary: ClassVar[str] = "wavefront with transfers issued ahead"
    ahead: ClassVar[int | None] = 1


def _over(chunks: int) -> str:
    return "/v" if chunks > 1 else ""


def _uneven(submeshes: int, chunks: int, microbatches: int) -> str:
    return "p does not divide m" if microbatches % submeshes and chunks > 1 else ""


def _fill_and_drain(submeshes: int, chunks: int, costs: PhaseCosts, unless: str) -> PublishedIdle:
    """Return the idle time of a fill and a drain by whole microbatches."""
    return PublishedIdle((submeshes - 1) * sum(costs.values()) / chunks, f"(p-1)(tF+tB+tW){_over(chunks)}", unless)


def _in_turn(forwards: Sequence[Cell], backwards: Sequence[Cell], warm: int, late: int | None = None) -> Iterator[Cell]:
    """Yield ``warm`` forwards, then in turn a forward, a backward, and the W of ``late`` backwards ago."""
    yield from forwards[:warm]
    weights = [Cell("W", c.stage, c.microbatch) for c in backwards] if late is not None else []
    late = late or 0
    for n, pair in enumerate(itertools.zip_longest(forwards[warm:], backwards)):
        yield from (cell for cell in pair if cell is not None)
        yield from weights[n - late : n - late + 1] if n >= late else ()
    yield from weights[max(len(weights) - late, 0) :]


def _in_groups(rank: int, submeshes: int, chunks: int, microbatches: int) -> tuple[list[Cell], list[Cell], int]:
    """Return forwards and backwards of a submesh, both in groups of ``p`` microbatches, and the first group's size."""
    groups = _groups(submeshes, microbatches)

    def cells(phase: str, order: Sequence[int]) -> list[Cell]:
        return [Cell(phase, c * submeshes + rank, i) for group in groups for c in order for i in group]

    return cells("F", range(chunks)), cells("B", range(chunks)[::-1]), len(groups[0])


def _groups(size: int, microbatches: int) -> list[range]:
    """Return microbatches in groups of ``size``, or of a few more if need be; the larger groups first."""
    count = max(1, microbatches // size)
    starts = [-(-microbatches * g // count) for g in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def _way(cell: Cell, stages: int) -> int:
    """Return the number of cells of a microbatch before this one. The two of the last stage count as one."""
    return cell.stage if cell.phase == "F" else 2 * stages - 2 - cell.stage


PUBLISHED: tuple[Schedule, ...] = (
    *(GPipe(), LoopedBFS(), OneFOneB(), EagerOneFOneB(), Interleaved(), KimiK2()),
    *(ZBH1(), ZBH2(), InterleavedZB(), ZBV(), DualPipeV(), Wavefront(), PrefetchWavefront()),
)
"""Every published schedule, in the order in which they are compared."""

AHEAD = frozenset(schedule.name for schedule in PUBLISHED if schedule.sends_ahead)
"""Names of schedules whose cotangents leave before weight gradients that they have no phase for."""
