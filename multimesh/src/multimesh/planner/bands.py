"""How far a forecast may be off: what published runs of sources that the fit did not see were off, nearest ones first.

``measured.csv`` has each published run with the error of a forecast whose constants were fitted without its source
(``multimesh/benchmarks/loso.py`` writes it). A forecast takes the errors of the runs that it resembles most.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from multimesh.planner.step import Step

UNKNOWN = 0.30
"""Half width of a band where sizes are guessed, or what runs is no transformer."""

_INSIDE = 0.87  # share of the errors of similar runs that a band has inside
_LEAST = (0.45, 0.30, 0.27, 0.16, 0.10)  # band at least, by the sources that have runs of the kind and generation
_LEAST_MEMORY, _MOST = 0.15, 0.80
_CALIBRATED, _ENOUGH, _REACH, _SOME = 0.03, 20, 0.4, 40  # least band; pairs that tell; their distances; of a group
_STRANGE, _ABOVE = 1.9, 1.1  # a distance; times the utilization of the best run of a kind
_FAR = 1.0  # distance from which on a band grows with the distance
_GROWTH = 0.25
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
class Nearest:
    """The measured run that resembles a forecast most: its id, the error there, and the distance."""

    id: str
    error: float
    distance: float

    def __str__(self) -> str:
        return f"{self.id}, {100 * abs(math.expm1(self.error)):.0f} % off"


@functools.cache
def load_runs() -> tuple[MeasuredStep, ...]:
    """Return the published runs with their errors."""
    text = resources.files("multimesh.planner").joinpath("measured.csv").read_text(encoding="utf-8")
    return tuple(read_row(row) for row in csv.reader(text.splitlines()))


def read_row(row: Sequence[str]) -> MeasuredStep:
    """Return a row of ``measured.csv``."""
    last = 4 + len(_KINDS)
    numbers = [float(value) for value in row[last:]]
    sizes, shares = tuple(numbers[: len(_SIZES)]), tuple(numbers[len(_SIZES) :])
    return MeasuredStep(row[0], float(row[1]), float(row[2] or "nan"), tuple(row[4:last]), sizes, shares, float(row[3]))


def write(run: MeasuredStep) -> list[str]:
    """Return the row of ``measured.csv``."""
    memory = "" if math.isnan(run.memory_error) else f"{run.memory_error:.3f}"
    numbers = (*(f"{value:.2f}" for value in run.sizes), *(f"{value:.3f}" for value in run.shares))
    return [run.id, f"{run.error:.3f}", memory, f"{run.utilization:.3f}", *run.kinds, *numbers]


def describe(
    step: Step, name: str = "", error: float = 0.0, memory_error: float = math.nan, seconds: float = 0.0
) -> MeasuredStep:
    """Return the features of a forecast as a `MeasuredStep`, to be compared with measured runs."""
    model, how = step.model, step.how
    family = step.device.generation.split("-")[0]
    kinds = ("1" if model.experts else "0", family, step.software, how.precision, step.device.name)
    sizes = tuple(math.log2(size) for size in (model.hidden, how.sequence, how.tokens, how.devices))
    of = dict(step.shares)
    shares = tuple(of.get(share, 0.0) / step.seconds for share in _SHARES)
    utilization = step.utilization * (step.seconds / seconds if seconds else 1.0)
    return MeasuredStep(name, error, memory_error, kinds, sizes, shares, utilization)


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
    """Return why a forecast may be too good: no run is like it, or none of its kind was as fast."""
    own, near = describe(step), nearest(step)
    if near.distance > _STRANGE:
        yield f"no published run is like this one; the nearest, {near.id}, differs much, so the band is wide"
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

    Of two measured runs of one source and device that are as far from each other as the forecast from the run, it is
    the error of one that remains if that of the other is taken off. It is never wider than the band before.
    """
    far = distance(describe(step), run)
    errors = sorted(error for apart, error in _pairs() if abs(apart - far) <= _REACH)
    plain = band(step)
    if len(errors) < _ENOUGH:
        return plain
    return min(plain, max(_CALIBRATED, errors[int(_INSIDE * (len(errors) - 1))]))


@functools.cache
def _pairs() -> tuple[tuple[float, float], ...]:
    """Return distances of runs of one source and device, and the difference of their errors."""
    groups: dict[tuple[str, ...], list[MeasuredStep]] = {}
    for run in load_runs():
        groups.setdefault((run.source, *run.kinds), []).append(run)
    return tuple(
        (distance(one, other), abs(math.expm1(one.error - other.error)))
        for group in groups.values()
        for one, other in itertools.combinations(group[:: 1 + len(group) // _SOME], 2)
    )


def width(own: MeasuredStep, runs: Sequence[MeasuredStep], *, memory: bool = False) -> float:
    """Return the error that most runs like ``own`` are below.

    Runs weigh less with their distance; those of a source together weigh as the root of their number, since they err
    together. The band grows with the distance of the nearest, and is wide where few sources tell.
    """
    if not runs:
        return UNKNOWN
    far = [distance(own, run) for run in runs]
    first = min(far)
    reach = max(_FAR, first)
    near = [math.exp(-0.5 * (d * d - first * first) / reach**2) for d in far]
    of_source: dict[str, float] = {}
    for weight, run in zip(near, runs, strict=True):
        of_source[run.source] = of_source.get(run.source, 0.0) + weight
    errors = sorted(
        (abs(math.expm1(run.memory_error if memory else run.error)), weight / math.sqrt(of_source[run.source]))
        for weight, run in zip(near, runs, strict=True)
    )
    wanted = _INSIDE * sum(weight for _, weight in errors)
    totals = itertools.accumulate(weight for _, weight in errors)
    found = next((error for (error, _), total in zip(errors, totals, strict=True) if total >= wanted), errors[-1][0])
    sources = len({run.source for run in runs if run.kinds[:2] == own.kinds[:2]})
    least = _LEAST[min(sources, len(_LEAST) - 1)] if not memory else _LEAST_MEMORY
    return min(_MOST, max(least, found * (1 + _GROWTH * max(0.0, first - _FAR))))
