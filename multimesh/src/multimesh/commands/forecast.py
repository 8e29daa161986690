"""Simulated idle time of schedules, beside the published figures. Nothing here imports JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from multimesh import schedules
from multimesh.core.text import columns
from multimesh.observe.timelines.timeline import Timeline
from multimesh.schedules.costs import CLOSE, UNIT_COSTS, check_costs, cost
from multimesh.schedules.simulate import simulate, sizes
from multimesh.schedules.table import PublishedIdle


class Shape(NamedTuple):
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
        names = ("submeshes", "stages_per_submesh", "microbatches")
        return {
            "schedule": self.schedule,
            **dict(zip(names, self.shape, strict=True)),
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
    schedule, choice = schedules.get(name), None
    formula = schedule.idle(*shape, times)
    if isinstance(schedule, schedules.Auto):
        costs_each = schedules.StageCosts.alike(share, shape.submeshes * shape.chunks, transfer)
        schedule = replace(schedule, costs=costs_each)
        choice = schedule.choose(*shape)
    table = schedule.table(*shape, backward=True)
    timeline = simulate(table, share, transfer=cost(transfer, "a transfer"), title=sizes(name, *shape))
    if formula is not None and transfer:
        formula = replace(formula, unless="transfers take time")
    return Result(name, shape, timeline, formula, choice)


def table(results: Sequence[Result]) -> str:
    """Return a text table: the simulated idle time of each schedule beside the published."""
    columns_of = {
        "schedule": [r.schedule + (f", v={r.shape.chunks}" if r.shape.chunks > 1 else "") for r in results],
        "makespan": [f"{r.timeline.makespan:.4g}" for r in results],
        "idle": [f"{r.idle:.4g}" for r in results],
        "in a row": [f"{r.in_a_row:.4g}" for r in results],
        "published": [f"{r.published.idle:.4g}" if r.published else "-" for r in results],
        "": [r.published.formula if r.published else "" for r in results],
        "bubble": [f"{100 * r.timeline.bubble:.1f} %" for r in results],
        "peak activations": [" ".join(f"{peak:g}" for peak in r.peaks) for r in results],
    }
    lines = [line.rstrip() for line in columns([*columns_of.items()], texts=(0, 5))]
    unsure = [(r.schedule, r.published.unless) for r in results if r.published is not None and r.published.unless]
    notes = [f"{name}: the formula need not hold, as {reason}" for name, reason in unsure]
    choices = [f"\n{result.choice}" for result in results if result.choice is not None]
    return "\n".join([*lines, *([""] if notes else []), *notes, *choices])


def choose_schedules(
    name: str | None, submeshes: int, chunks: int | None, microbatches: int
) -> list[tuple[str, Shape]]:
    """Return the schedules to compare: the named one, or all.

    ``chunks`` applies to the named schedule, and otherwise to all that take any number of stages and usually have
    several.
    """
    shapes = []
    for schedule in [schedules.get(name)] if name else schedules.PUBLISHED:
        takes = name or (schedule.usual > 1 and schedule.chunks is None)
        count = (chunks if takes else None) or schedule.usual
        shapes.append((name or schedule.name, Shape(submeshes, count, microbatches)))
    return shapes
