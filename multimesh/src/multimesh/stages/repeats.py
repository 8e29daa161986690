"""Layers that repeat in a chain of operations, and stages that begin where they do. Nothing here imports JAX."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterator, Sequence

from multimesh.stages.cuts import SLACK, Chain, ChainCut, count_alive, cut_chain

_PERIODS = 8  # distances between equal operations that are tried, those with the most work first
_LEAST = 0.5  # share of a chain's work that its layers have


Layers = tuple[int, ...]
"""A run of layers of equal operations: the first operation of each, then the end of the last."""


def find_layers(chain: Chain, kinds: Sequence[Hashable]) -> tuple[Layers, ...]:
    """Return the runs of layers in a chain, in order; none if they have less than half of its work.

    Operations of one of the ``kinds`` have the same cost and types. A layer starts where the fewest bytes are alive.
    """
    times, alive = chain.ends, count_alive(chain)
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
    return tuple(_starts(start, end, period, alive) for start, end, period in sorted(runs))


def _longest_run(
    kinds: Sequence[Hashable], times: Sequence[float], first: int, last: int
) -> tuple[int, int, int] | None:
    """Return start, end and period of the repetition with the most work between two operations."""
    places: dict[Hashable, list[int]] = collections.defaultdict(list)
    for i in range(first, last):
        places[kinds[i]].append(i)
    weights: collections.Counter[int] = collections.Counter()
    for at in places.values():
        for a, b in itertools.pairwise(at):
            weights[b - a] += times[a + 1] - times[a]  # type: ignore[assignment]
    best: tuple[float, int, int, int] | None = None
    for period, _ in weights.most_common(_PERIODS):
        repeats = (kinds[i] == kinds[i + period] for i in range(first, last - period))
        start = first
        for equal, group in itertools.groupby(repeats):
            count = len(list(group))
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


def equal_stages(stages: Sequence[tuple[Hashable, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return groups of at least two stages with the same kinds of operations, by their numbers."""
    groups: dict[tuple[Hashable, ...], list[int]] = collections.defaultdict(list)
    for number, kinds in enumerate(stages):
        groups[kinds].append(number)
    return tuple(tuple(numbers) for numbers in groups.values() if len(numbers) > 1)
