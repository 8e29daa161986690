"""How far a forecast may be off: what published runs of sources that the fit did not see were off, nearest ones first.

``measured.csv`` has each published run with the error of a forecast whose constants were fitted without its source, and
of one that knows nothing of its software but the priors (``multimesh/benchmarks/loso.py`` writes it). A forecast takes
the errors of the runs that it resembles most; if none had its software, those of runs as if theirs were unknown.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from multimesh.planner.step import Step

UNKNOWN = 0.30
"""Half width of a band where sizes are guessed, or what runs is no transformer."""

_LEAST = (0.45, 0.30, 0.27, 0.16, 0.10)  # band at least, by the sources that have runs of the kind and generation
_LEAST_MEMORY, _MOST = 0.15, 0.80
_CALIBRATED, _REACH, _SOME = 0.03, 0.1, 40  # least band after a run; differences of distances; runs of a group
_INSIDE_FAR = 0.95  # share of pairs inside a band after a run that is not like the forecast
LIKE = 0.3
"""Distance up to which a run of the user's own is like a forecast, and narrows its band."""

_STRANGE, _ABOVE = 1.9, 1.1  # a distance; times the utilization of the best run of a kind
_TOO_FAST = 0.08  # logarithm by which the forecast of the nearest run is below what it took
_FAR = 1.0  # distance from which on a band grows with the distance
_SHARES = (
    "attention",
    "memory",
    "tensor parallelism",
    "expert parallelism",
    "sharded parameters",
    "gradients",
    "bubble",
)
_SIZES = (("hidden", 0.5), ("sequence", 0.4), ("tokens", 0.25), ("devices", 0.2))  # weights of a factor of two
_OF_SHARE = 3.0  # weight of a difference of shares of the step
_KINDS = (("experts", 3.0), ("generation", 2.0), ("software", 1.2), ("precision", 0.7), ("device", 0.4))


@dataclass(frozen=True)
class MeasuredStep:
    """The features by which runs are compared: sizes, kinds, and shares of the step."""

    id: str  # of the published run; empty: a forecast
    error: float  # logarithm of forecast over measured seconds, by a fit without the run's source
    unseen_error: float  # the same if the constants of its software are those of their priors
    memory_error: float  # the same of bytes; NaN: not published
    kinds: tuple[str, ...]  # whether it has experts, the generation of its device, its software, precision and device
    sizes: tuple[float, ...]  # logarithms to base 2 of width, sequence, tokens of a microbatch on a device, devices
    shares: tuple[float, ...]  # of the step, of the parts in ``_SHARES``
    utilization: float  # measured, or forecast where it is no run

    @property
    def source(self) -> str:
        """The beginning of the id."""
        return self.id.split("-")[0]


@dataclass(frozen=True)
class Rule:
    """How a band is made of the errors of similar runs."""

    inside: float  # share of these errors that it has inside
    growth: float  # by which it widens for each unit of the distance of the nearest run beyond 1


RULE = Rule(0.88, 2.0)
"""The narrowest that has 85 % of each source inside in bands of the others: ``multimesh/benchmarks/loso.py``."""


MEMORY_RULE = Rule(0.87, 0.25)
"""Of bytes, which three sources publish: too few to choose it by sources."""


@dataclass(frozen=True)
class Similar:
    """Errors of the runs that resemble a forecast."""

    errors: tuple[tuple[float, float], ...]  # relative, in ascending order, each with its weight
    first: float  # distance of the nearest run
    least: float  # half width of a band at least

    def error(self, inside: float) -> float:
        """Return the error that a share of them is below."""
        return _quantile(self.errors, inside)

    def widen(self, error: float, growth: float) -> float:
        """Return half of the width of the band, of an error at runs as near as the nearest can be."""
        return min(_MOST, max(self.least, error * (1 + growth * max(0.0, self.first - _FAR))))


@dataclass(frozen=True)
class Nearest:
    """The measured run that resembles a forecast most: its id, the error there, and the distance."""

    id: str
    error: float
    distance: float

    def __str__(self) -> str:
        return (
            f"{self.id}, forecast {100 * abs(math.expm1(self.error)):.0f} % too {'fast' if self.error < 0 else 'slow'}"
        )


@functools.cache
def load_runs() -> tuple[MeasuredStep, ...]:
    """Return the published runs with their errors."""
    text = resources.files("multimesh.planner").joinpath("measured.csv").read_text(encoding="utf-8")
    return tuple(read_row(row) for row in csv.reader(text.splitlines()))


def read_row(row: Sequence[str]) -> MeasuredStep:
    """Return a row of ``measured.csv``."""
    last = 5 + len(_KINDS)
    numbers = [float(value) for value in row[last:]]
    sizes, shares = tuple(numbers[: len(_SIZES)]), tuple(numbers[len(_SIZES) :])
    errors = float(row[1]), float(row[2]), float(row[3] or "nan")
    return MeasuredStep(row[0], *errors, tuple(row[5:last]), sizes, shares, float(row[4]))


def write(run: MeasuredStep) -> list[str]:
    """Return the row of ``measured.csv``."""
    memory = "" if math.isnan(run.memory_error) else f"{run.memory_error:.3f}"
    numbers = (*(f"{value:.2f}" for value in run.sizes), *(f"{value:.3f}" for value in run.shares))
    errors = f"{run.error:.3f}", f"{run.unseen_error:.3f}", memory
    return [run.id, *errors, f"{run.utilization:.3f}", *run.kinds, *numbers]


def describe(
    step: Step,
    name: str = "",
    error: float = 0.0,
    memory_error: float = math.nan,
    seconds: float = 0.0,
    unseen_error: float = 0.0,
) -> MeasuredStep:
    """Return the features of a forecast as a `MeasuredStep`, to be compared with measured runs."""
    model, how = step.model, step.how
    family = step.device.generation.split("-")[0]
    kinds = ("1" if model.experts else "0", family, step.software, how.precision, step.device.name)
    sizes = tuple(math.log2(size) for size in (model.hidden, how.sequence, how.tokens, how.devices))
    of = dict(step.shares)
    shares = tuple(of.get(share, 0.0) / step.seconds for share in _SHARES)
    utilization = step.utilization * (step.seconds / seconds if seconds else 1.0)
    return MeasuredStep(name, error, unseen_error, memory_error, kinds, sizes, shares, utilization)


def distance(one: MeasuredStep, other: MeasuredStep) -> float:
    """Return how far two runs are from each other; 1 is, about, four times the width of the model."""
    squares = 0.0
    for (_, weight), a, b in zip(_KINDS, one.kinds, other.kinds, strict=True):
        squares += weight**2 if a != b else 0.0
    for (_, weight), x, y in zip(_SIZES, one.sizes, other.sizes, strict=True):
        squares += (weight * (x - y)) ** 2
    for x, y in zip(one.shares, other.shares, strict=True):
        squares += (_OF_SHARE * (x - y)) ** 2
    return math.sqrt(squares)


def band(step: Step) -> float:
    """Return half of the width of a forecast's band, as a share of it."""
    return width(describe(step), load_runs())


def nearest(step: Step) -> Nearest:
    """Return the measured run that resembles a forecast most."""
    own = describe(step)
    far, run = min(((distance(own, run), run) for run in load_runs()), key=lambda found: found[0])
    return Nearest(run.id, run.error, far)


def warnings(step: Step) -> Iterator[str]:
    """Return why a forecast may be too good: no run is like it, or the nearest took longer, or none was as fast."""
    own, near = describe(step), nearest(step)
    if near.distance > _STRANGE:
        yield f"no published run is like this one; the nearest, {near.id}, differs much, so the band is wide"
    elif near.error < -_TOO_FAST:
        more_time = 100 * math.expm1(-near.error)
        yield f"the nearest measured run, {near.id}, took {more_time:.0f} % longer than its forecast, and this may too"
    kind = [run for run in load_runs() if run.kinds[:2] == own.kinds[:2] and run.kinds[3] == own.kinds[3]]
    best = max(kind, key=lambda run: run.utilization, default=None)
    if best is not None and step.utilization > _ABOVE * best.utilization:
        more = [
            f"{name} takes {100 * now:.0f} % here, {100 * there:.0f} % there"
            for name, now, there in sorted(
                zip(_SHARES, own.shares, best.shares, strict=True), key=lambda part: part[1] - part[2]
            )
            if there - now > 0.02
        ]
        yield (
            f"MFU {100 * step.utilization:.0f} % is above all measured runs of its kind, of which {best.id} has most, "
            f"{100 * best.utilization:.0f} %; {'; '.join(more[:2]) or 'its kernels are larger'}"
        )


def memory_band(step: Step) -> float:
    """Return half of the width of the band of a forecast's bytes, as a share of them."""
    known = tuple(run for run in load_runs() if not math.isnan(run.memory_error))
    return width(describe(step), known, memory=True)


def after_run(step: Step, run: MeasuredStep) -> float:
    """Return half of the width of the band after constants were fitted to a run of the user's own.

    It is never wider than the band before where the run is like the forecast, and never narrower where it is not.
    """
    own = describe(step)
    return change_width(band(step), own, distance(own, run), pair_runs(load_runs()))


def change_width(before: float, own: MeasuredStep, far: float, pairs: Sequence[Pair]) -> float:
    """Return the width of a band after constants were fitted to a run that is ``far`` from the forecast ``own``.

    Constants that are fitted to a run carry its error over: they mend what is alike in both, and spoil the rest.
    """
    after = width_after(own, far, pairs)
    return min(before, after) if far <= LIKE else max(before, after)


@dataclass(frozen=True)
class Pair:
    """Two measured runs of one source, device and software."""

    one: MeasuredStep
    other: MeasuredStep
    distance: float
    error: float  # of one, relative, that remains if that of the other is taken off


@functools.cache
def pair_runs(runs: tuple[MeasuredStep, ...]) -> tuple[Pair, ...]:
    """Return the pairs of runs that are alike in source and kinds; of a large group, those of some of its runs."""
    groups: dict[tuple[str, ...], list[MeasuredStep]] = {}
    for run in runs:
        groups.setdefault((run.source, *run.kinds), []).append(run)
    return tuple(
        Pair(one, other, distance(one, other), abs(math.expm1(one.error - other.error)))
        for group in groups.values()
        for one, other in itertools.combinations(group[:: 1 + len(group) // _SOME], 2)
    )


def width_after(own: MeasuredStep, far: float, pairs: Sequence[Pair]) -> float:
    """Return the error that remains in most pairs like a forecast ``own`` and a measured run that is ``far`` from it.

    Pairs weigh less with the distance of their runs from the forecast, and with the difference of their own distance
    from ``far``; those of a source together weigh as the root of their number.
    """
    away: dict[str, float] = {}
    for run in itertools.chain.from_iterable((pair.one, pair.other) for pair in pairs):
        if run.id not in away:
            away[run.id] = distance(own, run)
    if not away:
        return _MOST
    first = min(away.values())
    reach = max(_FAR, first)
    near = []
    for pair in pairs:
        d = (away[pair.one.id] + away[pair.other.id]) / 2
        near.append(math.exp(-0.5 * ((d * d - first * first) / reach**2 + ((pair.distance - far) / _REACH) ** 2)))
    errors = _balance((pair.one.source, pair.error, weight) for pair, weight in zip(pairs, near, strict=True))
    inside = RULE.inside if far <= LIKE else _INSIDE_FAR
    return max(_CALIBRATED, _quantile(errors, inside)) if errors else _MOST


def _balance(found: Iterable[tuple[str, float, float]]) -> tuple[tuple[float, float], ...]:
    """Return errors in ascending order with their weights, of which those of a source sum up to the root of before."""
    rows = [row for row in found if row[2] > 0]
    of_source: dict[str, float] = {}
    for source, _, weight in rows:
        of_source[source] = of_source.get(source, 0.0) + weight
    return tuple(sorted((error, weight / math.sqrt(of_source[source])) for source, error, weight in rows))


def _quantile(errors: Sequence[tuple[float, float]], share: float) -> float:
    """Return the error at which a share of the weights is reached."""
    wanted = share * sum(weight for _, weight in errors)
    totals = itertools.accumulate(weight for _, weight in errors)
    return next((error for (error, _), total in zip(errors, totals, strict=True) if total >= wanted), errors[-1][0])


def width(own: MeasuredStep, runs: Sequence[MeasuredStep], *, memory: bool = False) -> float:
    """Return the error that most runs like ``own`` are below."""
    if not runs:
        return UNKNOWN
    similar = compare(own, runs, memory=memory)
    rule = MEMORY_RULE if memory else RULE
    return similar.widen(similar.error(rule.inside), rule.growth)


def compare(
    own: MeasuredStep, runs: Sequence[MeasuredStep], *, memory: bool = False, far: Sequence[float] | None = None
) -> Similar:
    """Return the errors of runs, weighed by how much they resemble ``own``.

    ``far``: the distances of the runs from ``own``; None: they are computed.

    Runs weigh less with their distance; those of a source together weigh as the root of their number, since they err
    together. The band grows with the distance of the nearest, and is wide where few sources tell.
    """
    far = [distance(own, run) for run in runs] if far is None else far
    first = min(far)
    reach = max(_FAR, first)
    near = [math.exp(-0.5 * (d * d - first * first) / reach**2) for d in far]
    known = any(run.kinds[2] == own.kinds[2] for run in runs)
    errors = _balance(
        (run.source, abs(math.expm1(run.memory_error if memory else run.error if known else run.unseen_error)), weight)
        for weight, run in zip(near, runs, strict=True)
    )
    sources = len({run.source for run in runs if run.kinds[:2] == own.kinds[:2]})
    least = _LEAST[min(sources, len(_LEAST) - 1)] if not memory else _LEAST_MEMORY
    return Similar(errors, first, least)
