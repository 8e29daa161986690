"""Cuts of a chain of operations into stages of similar cost with few bytes between. Nothing here imports JAX."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from multimesh.stages.partitioning import least_largest

SLACK = 0.05
"""How much longer than needed the slowest stage may take where fewer bytes are sent for it."""

WIDE_SLACK = 0.1
"""How much longer it may take where that at least halves the bytes: a cut inside of a block must gain more."""

_ALL, _BINS = 64, 16  # places that are all tried; bins of a stage's cost, in each of which the best place is tried
_PER_BIN = 2


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
    def home(self) -> Mapping[Hashable, int]:
        """The operation at which each value lies."""
        home: dict[Hashable, int] = {}
        for i, (read, makes) in enumerate(zip(self.reads, self.makes, strict=True)):
            for value in (*read, *makes):
                home.setdefault(value, i)
        return home

    @functools.cached_property
    def ends(self) -> tuple[float, ...]:
        """The time from the start of the chain to that of each operation, and to the end."""
        return tuple(itertools.accumulate(self.times, initial=0.0))

    def received(self, start: int, end: int) -> float:
        """Return the bytes that a stage of the operations from ``start`` to ``end`` gets from stages before it."""
        values = {v for read in self.reads[start:end] for v in read}
        return sum(self.size[v] for v in values if self.home[v] < start)

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
    times = [chain.ends[place] for place in places]
    least, _ = least_largest(stages, len(places) - 1, lambda stage, a, b: times[b] - times[a])

    def cheapest(slack: float) -> ChainCut:
        return chain.measure([places[i] for i in _fewest_bytes(chain, stages, places, least * (1 + slack))])

    even, wide = cheapest(SLACK), cheapest(WIDE_SLACK)
    return wide if 2 * wide.sent <= even.sent and wide.sent < even.sent else even


def _places(chain: Chain, stages: int) -> list[int]:
    """Return all operations of a short chain; of a long one, for speed, those in bins where few bytes are alive."""
    number, before = len(chain.times), chain.ends
    if number <= max(_ALL, stages):
        return list(range(number + 1))
    alive = count_alive(chain)
    bins: dict[int, list[int]] = collections.defaultdict(list)
    for i in range(1, number):
        bins[int(before[i] / before[-1] * _BINS * stages) if before[-1] else i * _BINS * stages // number].append(i)
    chosen = {0, number, *(i for members in bins.values() for i in sorted(members, key=alive.__getitem__)[:_PER_BIN])}
    spare = (i for i in range(1, number) if i not in chosen)
    chosen.update(itertools.islice(spare, max(0, stages + 1 - len(chosen))))
    return sorted(chosen)


def count_alive(chain: Chain) -> list[float]:
    """Return for each operation the bytes of values that are made before it and read by it or later."""
    last: dict[Hashable, int] = {}
    for i, read in enumerate(chain.reads):
        last.update(dict.fromkeys(read, i))
    change = [0.0] * (len(chain.times) + 1)
    for value, end in last.items():
        if chain.home[value] < end:
            change[chain.home[value] + 1] += chain.size[value]
            change[end + 1] -= chain.size[value]
    return list(itertools.accumulate(change))


def _fewest_bytes(chain: Chain, stages: int, places: Sequence[int], limit: float) -> list[int]:
    """Return the ends of stages, as numbers of places, that send fewest bytes with no stage above a limit."""
    number = len(places) - 1
    times = [chain.ends[place] for place in places]
    best: list[dict[int, tuple[tuple[float, float], int]]] = [{0: ((0.0, 0.0), 0)}]
    received = [_Receipts(chain, places, start) for start in range(number)]
    for stage in range(stages):
        new: dict[int, tuple[tuple[float, float], int]] = {}
        after = stages - stage - 1
        for start, (value, _) in best[-1].items():
            for end in range(start + 1, number - after + 1) if after else (number,):
                took = times[end] - times[start]
                if took > limit:
                    break  # a longer stage takes no less
                here = (value[0] + received[start].until(end), value[1] + took**2)
                if end not in new or here < new[end][0]:
                    new[end] = here, start
        best.append(new)
    ends = [number]
    for starts in reversed(best[1:]):
        ends.append(starts[ends[-1]][1])
    return ends[::-1]


class _Receipts:
    """The bytes that stages from one place on get from before it, counted only as far as was asked for."""

    def __init__(self, chain: Chain, places: Sequence[int], start: int):
        self._chain, self._places, self._start = chain, places, start
        self._values: set[Hashable] = set()
        self._sums = [0.0]

    def until(self, end: int) -> float:
        """Return the bytes of a stage that ends at a place."""
        chain, places = self._chain, self._places
        while len(self._sums) <= end - self._start:
            at = self._start + len(self._sums)
            reads = chain.reads[places[at - 1] : places[at]]
            new = {v for read in reads for v in read if chain.home[v] < places[self._start]} - self._values
            self._values |= new
            self._sums.append(self._sums[-1] + sum(chain.size[v] for v in new))
        return self._sums[end - self._start]
