"""Cuts of a chain of operations into stages of similar cost with few bytes between. Nothing here imports JAX.

Where layers of equal operations repeat, stages begin with them, unless a cut inside of one gains more than `SLACK`.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from multimesh.core.grouping import group
from multimesh.stages.partitioning import best_ends

SLACK = 0.05
"""How much longer than needed the slowest stage may take where fewer bytes are sent for it."""

WIDE_SLACK = 0.1
"""How much longer it may take where that at least halves the bytes: a cut inside of a block must gain more."""

_ALL, _BINS = 64, 16  # places that are all tried; bins of a stage's cost, in each of which the best place is tried
_PER_BIN = 2
_PERIODS = 8  # distances between equal operations that are tried, those with the most work first
_LEAST = 0.5  # share of a chain's work that its layers have


@dataclass(frozen=True)
class Chain:
    """A chain of operations to cut into stages, in the order in which they run."""

    times: tuple[float, ...]  # of each operation
    # reads, makes: values that each operation reads and makes. A value that none makes is given, and lies where it is
    # first read
    reads: tuple[tuple[Hashable, ...], ...]
    makes: tuple[tuple[Hashable, ...], ...]
    size: Mapping[Hashable, float]  # bytes of each value

    @functools.cached_property
    def ends(self) -> tuple[float, ...]:
        """The time from the start of the chain to that of each operation, and to the end."""
        return tuple(itertools.accumulate(self.times, initial=0.0))

    @functools.cached_property
    def uses(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Of each operation: for what it reads and an earlier one had, the last that had it, and the bytes."""
        last: dict[Hashable, int] = {}
        uses = []
        for i, (read, makes) in enumerate(zip(self.reads, self.makes, strict=True)):
            uses.append(tuple((last[v], self.size[v]) for v in read if v in last))
            last.update(dict.fromkeys((*read, *makes), i))
        return tuple(uses)

    @functools.cached_property
    def alive(self) -> list[float]:
        """The bytes of values that are made before each operation, or the end, and read by it or later."""
        change = [0.0] * (len(self.times) + 1)
        for i, uses in enumerate(self.uses):
            for before, size in uses:
                change[before + 1] += size
                change[i + 1] -= size
        return list(itertools.accumulate(change))

    def received(self, start: int, end: int) -> float:
        """Return the bytes that a stage of the operations from ``start`` to ``end`` gets from stages before it."""
        return sum(size for uses in self.uses[start:end] for before, size in uses if before < start)

    def measure(self, ends: Sequence[int]) -> ChainCut:
        """Return the cut with these ends of stages."""
        parts = list(itertools.pairwise(ends))
        slowest = max(self.ends[b] - self.ends[a] for a, b in parts)
        return ChainCut(tuple(ends), slowest, sum(self.received(a, b) for a, b in parts))


@dataclass(frozen=True)
class ChainCut:
    """A cut of a chain: the ends of its stages, from 0, and measures of its quality."""

    ends: tuple[int, ...]  # operation numbers: stage ``s`` has the operations from ``ends[s]`` to ``ends[s + 1]``
    slowest: float  # time of the stage that takes longest
    sent: float  # bytes that stages get from stages before them


def cut_chain(chain: Chain, stages: int, places: Sequence[int] | None = None) -> ChainCut:
    """Cut a chain into stages of at least one operation.

    Of the cuts whose slowest stage takes at most ``1 + SLACK`` times the least possible, take one that sends fewest
    bytes; of equal ones the most even. Take one within ``1 + WIDE_SLACK`` if it sends at most half of that.
    ``places`` are the operations before which a stage may start, with both ends of the chain; None: see `_places`.
    """
    places = places or _places(chain, stages)
    times, last = [chain.ends[place] for place in places], len(places) - 1
    sent = _list_transfers(chain, places)
    # No cut has to be longer than a stage of the mean that goes on to the next place.
    longest = times[-1] / stages + max(b - a for a, b in itertools.pairwise(times))

    def length(_: int, start: int, end: int) -> float | None:
        took = times[end] - times[start]
        return took if took <= longest else None

    least, _ = best_ends(stages, last, length, max)

    def cheapest(slack: float) -> ChainCut:
        def price(_: int, start: int, end: int) -> tuple[float, float] | None:
            took = times[end] - times[start]
            return (sent[start][end] - sent[start][start], took**2) if took <= least * (1 + slack) else None

        _, ends = best_ends(stages, last, price, lambda one, more: (one[0] + more[0], one[1] + more[1]))
        return chain.measure([places[i] for i in ends])

    even, wide = cheapest(SLACK), cheapest(WIDE_SLACK)
    return wide if 2 * wide.sent <= even.sent and wide.sent < even.sent else even


def _list_transfers(chain: Chain, places: Sequence[int]) -> list[list[float]]:
    """Return a table of two places: the bytes that are had before the first one and read again before the second."""
    at = np.searchsorted(places, range(len(chain.times)), "right")
    sent = np.zeros((len(places), len(places)))
    for i, uses in enumerate(chain.uses):
        for before, size in uses:
            sent[at[before], at[i]] += size
    table: list[list[float]] = sent.cumsum(0).cumsum(1).tolist()
    return table


def _places(chain: Chain, stages: int) -> list[int]:
    """Return all operations of a short chain; of a long one, for speed, those in bins where few bytes are alive."""
    number, before = len(chain.times), chain.ends
    if number <= max(_ALL, stages):
        return list(range(number + 1))
    share = [time / before[-1] if before[-1] else i / number for i, time in enumerate(before)]
    bins = group((int(share[i] * _BINS * stages), i) for i in range(1, number))
    few = (i for members in bins.values() for i in sorted(members, key=chain.alive.__getitem__)[:_PER_BIN])
    chosen = {0, number, *few}
    spare = (i for i in range(1, number) if i not in chosen)
    chosen.update(itertools.islice(spare, max(0, stages + 1 - len(chosen))))
    return sorted(chosen)


Layers = tuple[int, ...]
"""A run of layers of equal operations: the first operation of each, then the end of the last."""


def find_layers(chain: Chain, kinds: Sequence[Hashable]) -> tuple[Layers, ...]:
    """Return the runs of layers in a chain, in order; none if they have less than half of its work.

    Operations of one of the ``kinds`` have the same cost and types. A layer starts where the fewest bytes are alive.
    """
    times = chain.ends
    runs: list[tuple[int, int, int]] = []
    gaps = [(0, len(kinds))]
    while gaps:
        first, last = gaps.pop()
        run = _longest_run(kinds, times, first, last)
        if run is not None:
            runs.append(run)
            gaps += [(first, run[0]), (run[1], last)]
    if sum(times[end] - times[start] for start, end, _ in runs) < _LEAST * times[-1]:
        return ()
    return tuple(_starts(start, end, period, chain.alive) for start, end, period in sorted(runs))


def _longest_run(
    kinds: Sequence[Hashable], times: Sequence[float], first: int, last: int
) -> tuple[int, int, int] | None:
    """Return start, end and period of the repetition with the most work between two operations."""
    weights: collections.Counter[int] = collections.Counter()
    for at in group((kinds[i], i) for i in range(first, last)).values():
        for a, b in itertools.pairwise(at):
            weights[b - a] += times[a + 1] - times[a]  # type: ignore[assignment]
    best: tuple[float, int, int, int] | None = None
    for period, _ in weights.most_common(_PERIODS):
        repeats = (kinds[i] == kinds[i + period] for i in range(first, last - period))
        start = first
        for equal, repeated in itertools.groupby(repeats):
            count = len(list(repeated))
            if equal and count >= period:
                work = times[start + count + period] - times[start]
                if work > 0 and (best is None or (work, -period) > (best[0], -best[3])):
                    best = work, start, start + count + period, period
            start += count
    return None if best is None else best[1:]


def _starts(start: int, end: int, period: int, alive: Sequence[float]) -> Layers:
    """Return where layers start: of the places in a period, where the fewest bytes are alive and the most are whole."""

    def starts(phase: int) -> range:
        return range(start + phase, end - period + 1, period)

    def rank(phase: int) -> tuple[float, int]:
        inner = starts(phase)[1:] or starts(phase)
        return sum(alive[i] for i in inner) / len(inner), -len(starts(phase))

    at = starts(min(range(min(period, end - period - start + 1)), key=rank))
    return (*at, at[-1] + period)


def cut_between_layers(chain: Chain, stages: int, layers: Sequence[Layers], best: ChainCut) -> ChainCut | None:
    """Cut a chain where layers start, unless ``best``, a cut anywhere, makes the slowest stage more than 5 % faster.

    Of such cuts take one with the most stages of equally many layers; of these one that sends the fewest bytes.
    """
    limit = (1 + SLACK) * best.slowest
    last = len(chain.times)
    candidates = []
    if len(layers) == 1:
        starts, times = layers[0], chain.ends
        for counts in _counts(len(starts) - 1, stages):
            ends = (0, *(starts[n] for n in itertools.accumulate(counts[:-1])), last)
            if all(a < b and times[b] - times[a] <= limit for a, b in itertools.pairwise(ends)):
                cut = chain.measure(ends)
                candidates.append((-max(collections.Counter(counts).values()), cut.sent, cut.slowest, cut))
    if candidates:
        return min(candidates, key=lambda ranked: ranked[:3])[3]
    places = sorted({0, last, *(i for run in layers for i in run)})
    if len(places) <= stages:
        return None
    cut = cut_chain(chain, stages, places)
    return cut if cut.slowest <= limit else None


def _counts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of layers of the stages such that all but the first and the last have as many."""
    if stages == 1:
        yield (layers,)
        return
    for inner in range(1, layers // (stages - 2) + 1) if stages > 2 else (0,):
        outer = layers - inner * (stages - 2)
        yield from ((first, *(inner for _ in range(stages - 2)), outer - first) for first in range(outer + 1))


def split_stages(ends: Sequence[int], layers: Sequence[Layers], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Return the ends of the parts of each stage: layers that another stage has as well are a part by themselves."""
    bounds = sorted({i for run in layers for i in (run[0], run[-1])})
    stages = [[a, *(i for i in bounds if a < i < b), b] for a, b in itertools.pairwise(ends)]
    count = collections.Counter(tuple(kinds[a:b]) for stage in stages for a, b in itertools.pairwise(stage))

    def parts(stage: list[int]) -> list[int]:
        shared = [count[tuple(kinds[a:b])] > 1 for a, b in itertools.pairwise(stage)]
        inner = (i for i, sides in zip(stage[1:], itertools.pairwise(shared), strict=False) if any(sides))
        return [stage[0], *inner, stage[-1]]

    return [*map(parts, stages)]


def equal_stages(stages: Sequence[tuple[Hashable, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return groups of at least two stages with the same kinds of operations, by their numbers."""
    groups = group((kinds, number) for number, kinds in enumerate(stages))
    return tuple(tuple(numbers) for numbers in groups.values() if len(numbers) > 1)
