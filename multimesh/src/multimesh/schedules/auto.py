"""``auto``: the shortest table for given costs and memory, published or found by a search."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from multimesh.core import checks
from multimesh.core.text import amount, columns
from multimesh.errors import UsageError
from multimesh.schedules.costs import UNIT_COSTS, StageCosts, cost
from multimesh.schedules.published import PUBLISHED
from multimesh.schedules.search import Found, Problem, search
from multimesh.schedules.table import Schedule, Table

FOUND = "found"
"""Name of a table that the search found."""

_CELLS = 400_000  # simulated by a search of default length, which takes a few seconds
_EVALUATIONS = (50, 1000)  # at least and at most


@dataclass(frozen=True)
class Candidate:
    """A table that was simulated for the choice.

    Attributes
    ----------
    name
        The name of a published schedule, or ``found``.
    table
        Its rows of cells.
    makespan, bubble
        When it ends, and the idle share of all submeshes.
    peaks
        The most memory of activations on each submesh.
    fits
        Whether it may be taken: the peaks are within the limits.
    """

    name: str
    table: Table
    makespan: float
    bubble: float
    peaks: tuple[float, ...]
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The table that `Auto` takes, and why; ``str`` is a table of all candidates.

    Attributes
    ----------
    schedule
        The `Auto`.
    shape
        Submeshes, stages on each, microbatches, and whether there is a backward pass.
    costs
        The costs of the simulation.
    candidates
        The shortest first.
    limits
        Memory for activations on each submesh.
    bound
        No table ends before this time, whatever the memory.
    """

    schedule: Auto
    shape: tuple[int, int, int, bool]
    costs: StageCosts
    candidates: tuple[Candidate, ...]
    limits: tuple[float, ...]
    bound: float

    @property
    def title(self) -> str:
        """The sizes of the pipeline."""
        submeshes, chunks, microbatches, _ = self.shape
        several = f"{chunks} stages on each" if chunks > 1 else ""
        return ", ".join(filter(None, (f"{submeshes} submeshes", several, f"{microbatches} microbatches")))

    @property
    def taken(self) -> Candidate:
        """The shortest candidate that fits; of equal ones a published one."""
        return next(c for c in self.candidates if c.fits)

    @property
    def reason(self) -> str:
        """Why this table is taken, in a line."""
        best = next((c for c in self.candidates if c.fits and c.name != FOUND), None)
        taken, end = self.taken, amount(self.bound, self.costs.unit)
        close = taken.makespan <= self.bound * (1 + 1e-9)
        bound = "no table is shorter" if close else f"no table ends before {end}"
        if taken.name != FOUND:
            return f"took {taken.name}: the search found nothing shorter that fits; {bound}"
        if best is None:
            return f"took the table that was found: no published one fits; {bound}"
        gain = 100 * (1 - taken.makespan / best.makespan)
        shorter = f"{gain:.1f} % shorter than {best.name}, the best published one that fits"
        return f"took the table that was found: {shorter}; {bound}"

    def __str__(self) -> str:
        unit = self.costs.sizes
        cells = [
            (
                c.name,
                amount(c.makespan, self.costs.unit),
                f"{100 * c.bubble:.1f} %",
                " ".join(amount(peak, unit) for peak in c.peaks),
                "taken" if c is self.taken else "" if c.fits else "needs too much memory",
            )
            for c in self.candidates
        ]
        heads = ("table", "makespan", "bubble", f"peak {'memory' if unit else 'activations'}", "")
        lines = columns([(head, [row[i] for row in cells]) for i, head in enumerate(heads)], left=(0, 4))
        limit = " ".join(amount(limit, unit) for limit in dict.fromkeys(self.limits))
        memory = f"memory for activations: at most {limit} on {'a' if len(set(self.limits)) == 1 else 'the'} submesh"
        memory += "" if len(set(self.limits)) == 1 else "es"
        head = [f"auto: {self.title}", f"costs: {self.costs.note}" if self.costs.note else "", memory]
        return "\n".join([*filter(None, head), *(line.rstrip() for line in lines), self.reason])

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the printed table, as data."""
        return {
            "title": self.title,
            "costs": {
                "times": self.costs.times,
                "transfers": self.costs.transfers,
                "activations": self.costs.activations,
                "unit": self.costs.unit,
                "note": self.costs.note,
            },
            "limits": self.limits,
            "bound": self.bound,
            "taken": self.taken.name,
            "reason": self.reason,
            "candidates": [
                {name: value for name, value in vars(c).items() if name != "table"} for c in self.candidates
            ],
            "table": rows_of(self.taken.table),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json`. `multimesh.schedules.load` reads the chosen table as a custom schedule."""
        Path(checks.path("save: path", path)).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")


def rows_of(table: Table) -> list[list[str]]:
    """Return a table in the form of `multimesh.schedules.custom`: names of cells, with microbatches in order."""
    return [[f"{cell.phase}{cell.stage}" for cell in row] for row in table]


@dataclass(frozen=True)
class Auto(Schedule):
    """The shortest table for the costs of the stages and the memory of the submeshes.

    All published tables of the loop's shape are simulated. Then a list scheduler fills tables under many policies, and
    a search improves the best ones by moving cells. The table that fits into memory and ends first is taken. It is
    never longer than the best published one that fits. The same arguments give the same table in every process, because
    the search ends after a number of evaluations, not of seconds.

    Attributes
    ----------
    costs
        Costs of the stages, such as ``profile.stage_costs``. None: `multimesh.jit` estimates them from the operations
        of the loop; a table without a loop takes all times to be 1.
    memory
        Memory for activations on each submesh, or on all alike, in the unit of the costs' activations. None:
        `multimesh.jit` gives them the part of ``device`` that nothing else needs. If that is not known, and for a table
        without a loop, it is the largest need of 1F1B.
    device
        Bytes of a device. `multimesh.jit` takes no table whose plan needs more, by its ``memory_forecast``. None: the
        memory of the devices of one process, if they tell; else the need of the plan of 1F1B.
    route
        Submesh of stages 0, 1, ..., as in `Schedule.placement`; empty: round and round.
    evaluations
        Number of tables to simulate. None: as many as take a few seconds, at most 1000.
    seed
        Seed of the search.
    without
        Names of tables that are not taken; ``found`` is that of the search.
    """

    costs: StageCosts | None = None
    memory: float | tuple[float, ...] | None = None
    device: float | None = None
    route: tuple[int, ...] = ()
    evaluations: int | None = None
    seed: int = 0
    without: tuple[str, ...] = ()

    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        """Check the types of the fields."""
        if self.costs is not None and not isinstance(self.costs, StageCosts):
            raise checks.refuse("schedules.Auto: costs", "a StageCosts, such as profile.schedule.costs", self.costs)
        for limit in () if self.memory is None else self.memory if isinstance(self.memory, tuple) else (self.memory,):
            cost(limit, "schedules.Auto: memory of a submesh")
        if self.device is not None:
            cost(self.device, "schedules.Auto: bytes of a device")
        if self.evaluations is not None:
            checks.whole("schedules.Auto: evaluations", self.evaluations, 0)
        checks.whole("schedules.Auto: seed", self.seed)

    def placement(self, submeshes: int) -> tuple[int, ...]:
        """Return the submesh of each stage: the given route, or each submesh in turn."""
        return self.route or super().placement(submeshes)

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """Return the table that `choose` takes."""
        return self.choose(submeshes, chunks, microbatches, backward).taken.table

    def choose(self, submeshes: int, chunks: int, microbatches: int, backward: bool = True) -> Choice:
        """Simulate the published tables of a shape, search for a shorter one, and choose.

        Raises ``UsageError`` if no table fits into memory, or the costs are of another number of stages.
        """
        return _choose(self, submeshes, chunks, microbatches, backward)


@functools.lru_cache(maxsize=32)
def _choose(auto: Auto, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Choice:
    auto.check_sizes(submeshes, chunks, microbatches)
    stages = submeshes * chunks
    costs = auto.costs or StageCosts.alike(UNIT_COSTS, stages)
    if len(costs.times) != stages:
        raise UsageError(f"schedule auto: costs are those of {len(costs.times)} stages, but the loop has {stages}")
    route = auto.placement(submeshes)
    place = [route[stage % len(route)] for stage in range(stages)]
    both = {
        s: Problem(place, microbatches, costs, backward=backward, splits=s) for s in ((True, False)[: 1 + backward])
    }
    published = _simulate_all(auto, route, (submeshes, chunks, microbatches, backward), both)
    everything = microbatches * sum(costs.activations or (1.0,) * stages)
    limits = _limits(auto, submeshes, [found for found, _ in published.values()], published.get("1f1b"), everything)
    fits = [f for name, (f, _) in published.items() if name not in auto.without and _fits(f, limits)]
    size = sum(len(problem.time) for problem in both.values()) / len(both)
    least, most = _EVALUATIONS
    evaluations = auto.evaluations
    if evaluations is None:
        evaluations = max(least, min(most, round(_CELLS / size)))
    if FOUND in auto.without:
        best = min(fits, key=lambda f: f.makespan, default=None)
    else:
        best = search(tuple(both.values()), fits, limits, evaluations=evaluations, seed=auto.seed)
    if best is None:
        raise UsageError(_too_small(limits, [f for f, _ in published.values()], costs))
    named = [
        _candidate(name, found, table, limits, refused=name in auto.without)
        for name, (found, table) in published.items()
    ]
    if not any(c.fits and c.makespan <= best.makespan * (1 + 1e-9) for c in named):
        named.append(_candidate(FOUND, best, best.problem.table(best.rows), limits))
    named.sort(key=lambda c: (c.makespan, c.name == FOUND))
    bound = min(problem.bound() for problem in both.values())
    return Choice(auto, (submeshes, chunks, microbatches, backward), costs, tuple(named), tuple(limits), bound)


def _simulate_all(
    auto: Auto, route: tuple[int, ...], shape: tuple[int, int, int, bool], both: dict[bool, Problem]
) -> dict[str, tuple[Found, Table]]:
    """Simulate every published table of this shape; of equal tables the first is kept."""
    found: dict[str, tuple[Found, Table]] = {}
    tables = set()
    for schedule in PUBLISHED:
        if schedule.placement(shape[0]) != route:
            continue
        try:
            table = schedule.table(*shape)
        except UsageError:
            continue  # the schedule has no table of this shape
        if table in tables:
            continue
        tables.add(table)
        problem = both.get(any(cell.phase == "W" for row in table for cell in row)) or both[True]
        rows = problem.rows(table)
        times = problem.times(rows)
        if times is not None and problem.table(rows) == table:
            found[schedule.name] = Found(problem, rows, max(end for _, end in times.values())), table
    return found


def _limits(
    auto: Auto, submeshes: int, published: Sequence[Found], usual: tuple[Found, Table] | None, everything: float
) -> tuple[float, ...]:
    """Return the memory for activations on each submesh; ``everything`` is that of all microbatches in all stages."""
    if auto.memory is None:
        most = [max(map(f.problem.peak, f.rows)) for f in ([usual[0]] if usual else published)]
        return (min(most, default=everything),) * submeshes
    if isinstance(auto.memory, tuple):
        if len(auto.memory) != submeshes:
            raise UsageError(f"schedule auto: memory for {len(auto.memory)} submeshes, but the loop has {submeshes}")
        return auto.memory
    return (float(auto.memory),) * submeshes


def _fits(found: Found, limits: Sequence[float]) -> bool:
    return all(found.problem.peak(row) <= limit * (1 + 1e-9) for row, limit in zip(found.rows, limits, strict=True))


def _candidate(name: str, found: Found, table: Table, limits: Sequence[float], *, refused: bool = False) -> Candidate:
    problem, end = found.problem, found.makespan
    bubble = 1 - sum(problem.time) / (end * problem.submeshes) if end else 0.0
    fits = not refused and _fits(found, limits)
    return Candidate(name, table, end, bubble, tuple(map(problem.peak, found.rows)), fits)


def _too_small(limits: Sequence[float], published: Sequence[Found], costs: StageCosts) -> str:
    def listed(sizes: Iterable[float]) -> str:
        return ", ".join(amount(size, costs.sizes) for size in sizes)

    peaks = min(([*map(f.problem.peak, f.rows)] for f in published), key=max, default=None)
    least = f"; the published one that takes least takes {listed(peaks)}" if peaks else ""
    return (
        f"schedule auto: no table keeps activations within {listed(limits)} (memory=, of each submesh){least}; give "
        "more memory, smaller microbatches, or recompute with jax.checkpoint"
    )
