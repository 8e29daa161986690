"""Idle time of schedules: simulated, beside what their papers state. Nothing here imports JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multimesh import schedules
from multimesh.costs import UNIT_COSTS, checked, cost
from multimesh.forecast import simulate, sizes
from multimesh.units import columns
from multimesh.views.timeline import Timeline

CLOSE = 1e-9  # relative difference of rounding


@dataclass(frozen=True)
class Shape:
    """Sizes of a pipeline: ``submeshes`` p, ``chunks`` v stages on each, ``microbatches`` m."""

    submeshes: int
    chunks: int
    microbatches: int


@dataclass(frozen=True)
class Published:
    """Idle time of every submesh according to a paper; ``exact`` is the reason why it need not hold, or empty."""

    idle: float
    formula: str
    unless: str = ""


def published(schedule: str, shape: Shape, costs: Mapping[str, float] = UNIT_COSTS) -> Published | None:
    """Idle time that is published for a schedule with free transfers; None where nothing is.

    ``costs`` are those of a whole submesh, in all its ``v`` stages together.

    GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019) and eager 1F1B: ``(p - 1) (tF + tB + tW)``. Interleaved
    (Narayanan et al. 2021): that divided by ``v``, where ``p`` divides ``m``. ZB-H1 (Qi et al. 2023):
    ``(p - 1) (tF + tB - tW)``. It holds for at least ``p`` microbatches and ``tW <= tF``; the paper assumes equal
    times. Longer weight gradients do not fit into the gaps that they fill.
    """
    p, v, m = shape.submeshes, shape.chunks, shape.microbatches
    full = (p - 1) * (costs["F"] + costs["B"] + costs["W"])
    if schedule in ("gpipe", "fill-drain", "1f1b", "eager-1f1b") and v == 1:
        return Published(full, "(p-1)(tF+tB+tW)")
    if schedule in ("1f1b", "eager-1f1b", "interleaved"):
        return Published(full / v, "(p-1)(tF+tB+tW)/v", "" if m % p == 0 or v == 1 else "p does not divide m")
    if schedule == "zb-h1":
        unless = "m < p" if m < p else "tW > tF" if costs["W"] > costs["F"] else ""
        return Published((p - 1) * (costs["F"] + costs["B"] - costs["W"]), "(p-1)(tF+tB-tW)", unless)
    return None


@dataclass(frozen=True)
class Result:
    """A simulated schedule and what is published for it."""

    schedule: str
    shape: Shape
    timeline: Timeline
    published: Published | None

    @property
    def idle(self) -> float:
        """Longest idle time of a submesh."""
        return max(self.timeline.idle)

    @property
    def peaks(self) -> tuple[float, ...]:
        """Most microbatches alive on each submesh; that in one of ``v`` stages counts ``1 / v``."""
        return tuple(peak / self.shape.chunks for peak in self.timeline.peaks)

    @property
    def agrees(self) -> bool | None:
        """Whether every submesh is idle for the published time; None where nothing is published for this shape."""
        if self.published is None or self.published.unless:
            return None
        slack = CLOSE * self.timeline.makespan
        return all(abs(idle - self.published.idle) <= slack for idle in self.timeline.idle)

    def to_json(self) -> dict[str, Any]:
        """What the table says, as data."""
        line, known = self.timeline, self.published
        return {
            "schedule": self.schedule,
            "submeshes": self.shape.submeshes,
            "stages_per_submesh": self.shape.chunks,
            "microbatches": self.shape.microbatches,
            "makespan": line.makespan,
            "busy": list(line.busy),
            "idle": list(line.idle),
            "bubble": line.bubble,
            "peak_activations": list(self.peaks),
            "formula": known and known.formula,
            "idle_by_formula": known and known.idle,
            "formula_fails_as": known and (known.unless or None),
            "agrees": self.agrees,
        }


def forecast(name: str, shape: Shape, costs: Mapping[str, float] = UNIT_COSTS, transfer: float = 0.0) -> Result:
    """Simulate a schedule; ``costs`` are those of a whole submesh, of which each of its stages takes an equal share."""
    whole = checked(costs)
    share = {phase: time / shape.chunks for phase, time in whole.items()}
    schedule = schedules.get(name)
    if isinstance(schedule, schedules.Auto):
        costs_each = schedules.StageCosts.alike(share, shape.submeshes * shape.chunks, transfer)
        schedule = replace(schedule, costs=costs_each)
    table = schedule.table(shape.submeshes, shape.chunks, shape.microbatches, backward=True)
    title = sizes(name, shape.submeshes, shape.chunks, shape.microbatches)
    timeline = simulate(table, share, transfer=cost(transfer, "a transfer"), title=title)
    known = published(name, shape, whole)
    if known is not None and transfer:
        known = replace(known, unless="transfers take time")
    return Result(name, shape, timeline, known)


def table(results: Sequence[Result]) -> str:
    """Text: simulated idle time of each schedule beside the published."""
    heads = ("schedule", "makespan", "idle", "published", "", "bubble", "peak activations")
    rows = [_row(result) for result in results]
    lines = columns([(head, [row[i] for row in rows]) for i, head in enumerate(heads)], left=(0, 4))
    notes = [
        f"{result.schedule}: the formula need not hold, as {result.published.unless}"
        for result in results
        if result.published is not None and result.published.unless
    ]
    return "\n".join([*(line.rstrip() for line in lines), *([""] if notes else []), *notes])


def _row(result: Result) -> tuple[str, ...]:
    known, chunks = result.published, result.shape.chunks
    return (
        result.schedule + (f", v={chunks}" if chunks > 1 else ""),
        f"{result.timeline.makespan:.4g}",
        f"{result.idle:.4g}",
        "-" if known is None else f"{known.idle:.4g}",
        "" if known is None else known.formula,
        f"{100 * result.timeline.bubble:.1f} %",
        " ".join(f"{peak:g}" for peak in result.peaks),
    )


def compared(name: str | None, submeshes: int, chunks: int | None, microbatches: int) -> list[tuple[str, Shape]]:
    """Schedules to compare: the one named, or all.

    ``chunks`` are those of the schedule that is named, else of interleaved, where they are 2 by default.
    """
    if name is not None:
        return [(name, Shape(submeshes, chunks or (2 if name == "interleaved" else 1), microbatches))]
    every = [n for n in schedules.names() if schedules.get(n).name == n]
    return [(n, Shape(submeshes, chunks or 2 if n == "interleaved" else 1, microbatches)) for n in every]
