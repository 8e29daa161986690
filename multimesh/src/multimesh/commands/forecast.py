"""Simulated idle time of schedules, beside the published figures. Nothing here imports JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multimesh import schedules
from multimesh.core.text import columns
from multimesh.observe.timelines.timeline import Timeline
from multimesh.schedules.costs import CLOSE, UNIT_COSTS, check_costs, cost
from multimesh.schedules.simulate import simulate, sizes
from multimesh.schedules.table import PublishedIdle


@dataclass(frozen=True)
class Shape:
    """Sizes of a pipeline: ``submeshes`` p, ``chunks`` v stages on each, ``microbatches`` m."""

    submeshes: int
    chunks: int
    microbatches: int


@dataclass(frozen=True)
class Result:
    """A simulated schedule, with its published figures or the choice of ``auto``."""

    schedule: str
    shape: Shape
    timeline: Timeline
    published: PublishedIdle | None
    choice: schedules.Choice | None = None

    @property
    def idle(self) -> float:
        """The longest idle time of a submesh."""
        return max(self.timeline.idle)

    @property
    def in_a_row(self) -> float:
        """The longest idle time of a submesh when steps follow each other and nothing waits for all submeshes."""
        return self.timeline.period - max(self.timeline.busy)

    @property
    def peaks(self) -> tuple[float, ...]:
        """The most microbatches alive on each submesh; in one of ``v`` stages a microbatch counts ``1 / v``."""
        return tuple(peak / self.shape.chunks for peak in self.timeline.peaks)

    @property
    def agrees(self) -> bool | None:
        """Whether submeshes are idle for the published time; None if nothing is published for this shape."""
        formula = self.published
        if formula is None or formula.unless:
            return None
        slack = CLOSE * self.timeline.makespan
        simulated = (self.in_a_row,) if formula.in_a_row else self.timeline.idle
        return all((0 if formula.bound else formula.idle) - slack <= idle <= formula.idle + slack for idle in simulated)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the printed table, as data."""
        line, formula = self.timeline, self.published
        return {
            "schedule": self.schedule,
            "submeshes": self.shape.submeshes,
            "stages_per_submesh": self.shape.chunks,
            "microbatches": self.shape.microbatches,
            "makespan": line.makespan,
            "busy": list(line.busy),
            "idle": list(line.idle),
            "idle_in_a_row": self.in_a_row,
            "bubble": line.bubble,
            "peak_activations": list(self.peaks),
            "formula": formula and formula.formula,
            "idle_by_formula": formula and formula.idle,
            "formula_fails_as": formula and (formula.unless or None),
            "agrees": self.agrees,
            "choice": self.choice and self.choice.to_json(),
        }


def simulate_schedule(
    name: str, shape: Shape, costs: Mapping[str, float] = UNIT_COSTS, transfer: float = 0.0
) -> Result:
    """Simulate a schedule.

    ``costs`` are those of a whole submesh; each of its stages takes an equal share.
    """
    times = check_costs(costs)
    share = {phase: time / shape.chunks for phase, time in times.items()}
    schedule = schedules.get(name)
    choice = None
    if isinstance(schedule, schedules.Auto):
        costs_each = schedules.StageCosts.alike(share, shape.submeshes * shape.chunks, transfer)
        schedule = replace(schedule, costs=costs_each)
        choice = schedule.choose(shape.submeshes, shape.chunks, shape.microbatches)
    table = schedule.table(shape.submeshes, shape.chunks, shape.microbatches, backward=True)
    title = sizes(name, shape.submeshes, shape.chunks, shape.microbatches)
    timeline = simulate(table, share, transfer=cost(transfer, "a transfer"), title=title)
    formula = schedules.get(name).idle(shape.submeshes, shape.chunks, shape.microbatches, times)
    if formula is not None and transfer:
        formula = replace(formula, unless="transfers take time")
    return Result(name, shape, timeline, formula, choice)


def table(results: Sequence[Result]) -> str:
    """Return a text table: the simulated idle time of each schedule beside the published."""
    heads = ("schedule", "makespan", "idle", "in a row", "published", "", "bubble", "peak activations")
    rows = [_row(result) for result in results]
    lines = columns([(head, [row[i] for row in rows]) for i, head in enumerate(heads)], texts=(0, 5))
    notes = [
        f"{result.schedule}: the formula need not hold, as {result.published.unless}"
        for result in results
        if result.published is not None and result.published.unless
    ]
    choices = [f"\n{result.choice}" for result in results if result.choice is not None]
    return "\n".join([*(line.rstrip() for line in lines), *([""] if notes else []), *notes, *choices])


def _row(result: Result) -> tuple[str, ...]:
    formula, chunks = result.published, result.shape.chunks
    return (
        result.schedule + (f", v={chunks}" if chunks > 1 else ""),
        f"{result.timeline.makespan:.4g}",
        f"{result.idle:.4g}",
        f"{result.in_a_row:.4g}",
        "-" if formula is None else f"{formula.idle:.4g}",
        "" if formula is None else formula.formula,
        f"{100 * result.timeline.bubble:.1f} %",
        " ".join(f"{peak:g}" for peak in result.peaks),
    )


def choose_schedules(
    name: str | None, submeshes: int, chunks: int | None, microbatches: int
) -> list[tuple[str, Shape]]:
    """Return the schedules to compare: the named one, or all.

    ``chunks`` applies to the named schedule, and otherwise to all that take any number of stages and usually have
    several.
    """
    if name is not None:
        return [(name, Shape(submeshes, chunks or schedules.get(name).usual, microbatches))]
    choices = []
    for schedule in (schedules.get(n) for n in schedules.names() if schedules.get(n).name == n):
        count = chunks if schedule.usual > 1 and schedule.chunks is None else None
        choices.append((schedule.name, Shape(submeshes, count or schedule.usual, microbatches)))
    return choices
