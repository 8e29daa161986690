"""Cuts of a chain of operations into stages of similar cost with few bytes between. Nothing here imports JAX."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from multimesh.schedules.partitioning import LayerCosts, least_largest

SLACK = 0.05
"""How much longer than needed the slowest stage may take where fewer bytes are sent for it."""

WIDE_SLACK = 0.1
"""How much longer it may take where that at least halves the bytes: a cut inside of a block must gain more."""

_ALL, _BINS = 64, 16  # places that are all tried; bins of a stage's cost, in each of which the best place is tried
_PER_BIN = 2


class Need(NamedTuple):
    """The bytes of a value that a stage holds once if any of its operations needs the value."""

    value: Hashable  # which; a stage has it once
    # held, copied: all the time: in the first stage that reads it, and in each later one
    held: float
    copied: float
    kept: float  # of each microbatch in flight


@dataclass(frozen=True)
class Chain:
    """Operations in the order in which they run."""

    costs: tuple[LayerCosts, ...]  # of each operation
    # reads, makes: values that each operation reads and makes. A value that none makes is given, and lies where it is
    # first read
    reads: tuple[tuple[Hashable, ...], ...]
    makes: tuple[tuple[Hashable, ...], ...]
    size: Mapping[Hashable, float]  # bytes of each value
    # needs of memory that each operation adds to its stage, beside its ``costs``; empty: nothing
    needs: tuple[tuple[Need, ...], ...] = ()
    home: Mapping[Hashable, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Find the operation at which each value lies."""
        home: dict[Hashable, int] = {}
        for i, (read, made) in enumerate(zip(self.reads, self.makes, strict=True)):
            for value in (*read, *made):
                home.setdefault(value, i)
        object.__setattr__(self, "home", home)

    def costs_of(self, start: int, end: int) -> LayerCosts:
        """Return the costs of a stage of the operations from ``start`` to ``end``."""
        costs, seen = self.costs[start:end], dict[Hashable, tuple[float, float]]()
        held, kept = self.needed(start, range(start, end), seen)
        return LayerCosts(
            sum(c.time for c in costs), sum(c.held for c in costs) + held, sum(c.activation for c in costs) + kept
        )

    def needed(self, start: int, more: range, seen: dict[Hashable, tuple[float, float]]) -> tuple[float, float]:
        """Return the bytes held all the time and kept of a microbatch that ``more`` operations add to a stage.

        The stage begins at ``start``; ``seen`` has what its operations so far hold and keep of each value.
        """
        added = [0.0, 0.0]
        for i in more if self.needs else ():
            for value, held, copied, kept in self.needs[i]:
                before = seen.get(value, (0.0, 0.0))
                now = max(before[0], held if self.home[value] >= start else copied), max(before[1], kept)
                seen[value] = now
                added = [total + new - old for total, new, old in zip(added, now, before, strict=True)]
        return added[0], added[1]

    def received(self, start: int, end: int) -> float:
        """Return the bytes that a stage of the operations from ``start`` to ``end`` gets from stages before it."""
        values = {v for read in self.reads[start:end] for v in read}
        return sum(self.size[v] for v in values if self.home[v] < start)


@dataclass(frozen=True)
class ChainCut:
    """Ends of the stages, from 0, and how good they are."""

    ends: tuple[int, ...]  # operation numbers: stage ``s`` has the operations from ``ends[s]`` to ``ends[s + 1]``
    slowest: float  # time of the stage that takes longest
    sent: float  # bytes that stages get from stages before them


Fits = Callable[[int, LayerCosts], bool]
"""Whether a stage of this number may hold an interval with these costs."""


def cut_chain(chain: Chain, stages: int, fits: Fits | None = None) -> ChainCut | None:
    """Cut a chain into stages of at least one operation.

    Of the cuts whose slowest stage takes at most ``1 + SLACK`` times the least possible, take one that sends fewest
    bytes; of equal ones the most even. Take one within ``1 + WIDE_SLACK`` if it sends at most half of that. Dynamic
    programming does it, for all places in a short chain. In a long one it tries places where few bytes are alive,
    ``_BINS`` for each stage and more, so that time grows with the number of stages and not with that of operations.

    Parameters
    ----------
    chain
        With at least as many operations as stages.
    stages
        How many.
    fits
        Whether a stage can hold its costs; None: it always can.

    Returns
    -------
    ChainCut
        None if no cut fits.
    """
    sums = {name: [0.0, *itertools.accumulate(getattr(c, name) for c in chain.costs)] for name in vars(LayerCosts(0.0))}
    times = sums["time"]
    places = _places(chain, stages, times)
    needed = _Walk(places, _needs_of(chain))

    def time(stage: int, a: int, b: int) -> float:
        start, end = places[a], places[b]
        if fits is not None:
            costs = [max(0.0, total[end] - total[start]) for total in sums.values()]
            costs = [cost + more for cost, more in zip(costs, (0.0, *needed(a, b)), strict=True)]
            return costs[0] if fits(stage, LayerCosts(*costs)) else math.inf
        return times[end] - times[start]

    least, _ = least_largest(stages, len(places) - 1, time)
    if math.isinf(least):
        return None

    def cheapest(slack: float) -> ChainCut:
        ends = tuple(places[i] for i in _fewest_bytes(chain, stages, places, time, least * (1 + slack)))
        pieces = list(itertools.pairwise(ends))
        slowest = max(times[b] - times[a] for a, b in pieces)
        return ChainCut(ends, slowest, sum(chain.received(a, b) for a, b in pieces))

    even, wide = cheapest(SLACK), cheapest(WIDE_SLACK)
    return wide if 2 * wide.sent <= even.sent and wide.sent < even.sent else even


def _places(chain: Chain, stages: int, before: Sequence[float]) -> list[int]:
    """Return the operations before which a stage may start, with both ends of the chain."""
    number = len(chain.costs)
    if number <= max(_ALL, stages):
        return list(range(number + 1))
    alive = _alive(chain)
    bins: dict[int, list[int]] = collections.defaultdict(list)
    for i in range(1, number):
        bins[int(before[i] / before[-1] * _BINS * stages) if before[-1] else i * _BINS * stages // number].append(i)
    kept = {0, number, *(i for found in bins.values() for i in sorted(found, key=alive.__getitem__)[:_PER_BIN])}
    spare = (i for i in range(1, number) if i not in kept)
    kept.update(itertools.islice(spare, max(0, stages + 1 - len(kept))))
    return sorted(kept)


def _alive(chain: Chain) -> list[float]:
    """Return for each operation the bytes of values made before it and read from it on."""
    last: dict[Hashable, int] = {}
    for i, read in enumerate(chain.reads):
        last.update(dict.fromkeys(read, i))
    change = [0.0] * (len(chain.costs) + 1)
    for value, end in last.items():
        if chain.home[value] < end:
            change[chain.home[value] + 1] += chain.size[value]
            change[end + 1] -= chain.size[value]
    return list(itertools.accumulate(change))


def _fewest_bytes(
    chain: Chain, stages: int, places: Sequence[int], time: Callable[[int, int, int], float], limit: float
) -> list[int]:
    """Return the ends of stages, as numbers of places, that send fewest bytes with no stage above a limit."""
    number = len(places) - 1
    best: list[dict[int, tuple[tuple[float, float], int]]] = [{0: ((0.0, 0.0), 0)}]
    received = _Walk(places, _receipts_of(chain))
    for stage in range(stages):
        new: dict[int, tuple[tuple[float, float], int]] = {}
        after = stages - stage - 1
        for start, (value, _) in best[-1].items():
            for end in range(start + 1, number - after + 1) if after else (number,):
                took = time(stage, start, end)
                if took > limit:
                    break  # a longer stage takes no less
                here = (value[0] + received(start, end)[0], value[1] + took**2)
                if end not in new or here < new[end][0]:
                    new[end] = here, start
        best.append(new)
    ends = [number]
    for found in reversed(best[1:]):
        ends.append(found[ends[-1]][1])
    return ends[::-1]


class _Walk:
    """Sums over a stage between two places. Each start is walked once, as far as it was asked for."""

    def __init__(self, places: Sequence[int], adds: Callable[[int], Callable[[range], tuple[float, ...]]]):
        self._places, self._adds = places, adds
        self._found: dict[int, list[tuple[float, ...]]] = {}
        self._of: dict[int, Callable[[range], tuple[float, ...]]] = {}

    def __call__(self, start: int, end: int) -> tuple[float, ...]:
        places = self._places
        if start not in self._of:
            self._of[start] = self._adds(places[start])
            self._found[start] = [self._of[start](range(0))]
        found = self._found[start]
        while len(found) <= end - start:
            at = start + len(found)
            more = self._of[start](range(places[at - 1], places[at]))
            found.append(tuple(a + b for a, b in zip(found[-1], more, strict=True)))
        return found[end - start]


def _needs_of(chain: Chain) -> Callable[[int], Callable[[range], tuple[float, float]]]:
    def adds(start: int) -> Callable[[range], tuple[float, float]]:
        seen: dict[Hashable, tuple[float, float]] = {}
        return lambda more: chain.needed(start, more, seen)

    return adds


def _receipts_of(chain: Chain) -> Callable[[int], Callable[[range], tuple[float]]]:
    def adds(start: int) -> Callable[[range], tuple[float]]:
        seen: set[Hashable] = set()

        def more(operations: range) -> tuple[float]:
            new = {v for i in operations for v in chain.reads[i] if chain.home[v] < start} - seen
            seen.update(new)
            return (sum(chain.size[v] for v in new),)

        return more

    return adds
