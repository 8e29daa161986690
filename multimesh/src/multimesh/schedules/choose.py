"""The choice of ``auto``: the published tables of a loop's shape, simulated, and the shortest that fits."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimesh.core import checks
from multimesh.core.text import amount, columns
from multimesh.errors import UsageError
from multimesh.observe.timelines.timeline import Timeline
from multimesh.schedules.costs import CLOSE, UNIT_COSTS, StageCosts
from multimesh.schedules.published import PUBLISHED
from multimesh.schedules.simulate import simulate, sizes
from multimesh.schedules.table import Schedule, Table


@dataclass(frozen=True)
class Candidate:
    """A table that was simulated for the choice.

    Attributes
    ----------
    name
        The name of its published schedule.
    table
        Its rows of cells.
    makespan, bubble
        When it ends, and the idle share of all submeshes.
    peaks
        The most memory of activations on each submesh.
    fits
        Whether it may be taken: the peaks are within the limits, and `Auto.without` does not name it.
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
        The `multimesh.schedules.Auto`.
    shape
        Submeshes, stages on each, microbatches, and whether there is a backward pass.
    costs
        The costs of the simulation.
    candidates
        The shortest first.
    limit
        Memory for activations on each submesh; None where the memory of a device bounds the plan instead.
    device
        Bytes of a device, if known.
    """

    schedule: Schedule
    shape: tuple[int, int, int, bool]
    costs: StageCosts
    candidates: tuple[Candidate, ...]
    limit: float | None
    device: float | None = None

    @property
    def title(self) -> str:
        """The sizes of the pipeline."""
        return sizes("auto", *self.shape[:3])

    @property
    def taken(self) -> Candidate:
        """The shortest candidate that fits; of equal ones the first of `multimesh.schedules.names`."""
        return next(c for c in self.candidates if c.fits)

    @property
    def reason(self) -> str:
        """Why this table is taken, in a line."""
        return f"took {self.taken.name}: the shortest published table that fits into memory"

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
        lines = columns([(head, [row[i] for row in cells]) for i, head in enumerate(heads)], texts=(0, 4))
        if self.limit is not None:
            memory = f"memory for activations: at most {amount(self.limit, unit)} on a submesh"
        else:
            memory = f"memory: at most {amount(self.device or 0, 'bytes')} on a device, by the forecast"
        head = [self.title, f"costs: {self.costs.note}" if self.costs.note else "", memory]
        return "\n".join([*filter(None, head), *(line.rstrip() for line in lines), self.reason])

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the printed table, as data."""
        costs = ("times", "transfers", "activations", "unit", "note")
        fields = ("name", "makespan", "bubble", "peaks", "fits")
        return {
            "title": self.title,
            "costs": {name: getattr(self.costs, name) for name in costs},
            "limit": self.limit,
            "device": self.device,
            "taken": self.taken.name,
            "reason": self.reason,
            "candidates": [{name: getattr(c, name) for name in fields} for c in self.candidates],
            "table": [[f"{cell.phase}{cell.stage}" for cell in row] for row in self.taken.table],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json`. `multimesh.schedules.load` reads the chosen table as a custom schedule."""
        Path(checks.path("save: path", path)).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")


@functools.lru_cache(maxsize=32)
def choose(
    auto: Schedule,
    shape: tuple[int, int, int, bool],
    costs: StageCosts | None,
    memory: float | None,
    device: float | None,
    without: tuple[str, ...],
) -> Choice:
    """Return the choice of `multimesh.schedules.Auto` with these values for a shape."""
    submeshes, chunks, microbatches, _ = shape
    auto.check_sizes(submeshes, chunks, microbatches)
    stages = submeshes * chunks
    costs = costs or StageCosts.alike(UNIT_COSTS, stages)
    if len(costs.times) != stages:
        raise UsageError(f"schedule auto: costs are those of {len(costs.times)} stages, but the loop has {stages}")
    tables = _simulate_tables(auto.placement(submeshes), shape, costs)
    most = {name: max(timeline.peaks) for name, (_, timeline) in tables.items()}
    if memory is None and device is None:
        memory = most.get("1f1b", min(most.values()))
    candidates = []
    for name, (table, line) in tables.items():
        fits = name not in without and (memory is None or most[name] <= memory * (1 + CLOSE))
        candidates.append(Candidate(name, table, line.makespan, line.bubble, line.peaks, fits))
    if not any(candidate.fits for candidate in candidates):
        least = ", ".join(amount(size, costs.sizes) for size in min((c.peaks for c in candidates), key=max))
        raise UsageError(
            f"schedule auto: no table keeps activations within {amount(memory or 0, costs.sizes)} (memory=, of each "
            f"submesh); the one that takes least takes {least}; give more memory, smaller microbatches, or recompute "
            "with jax.checkpoint"
        )
    return Choice(auto, shape, costs, tuple(sorted(candidates, key=lambda c: c.makespan)), memory, device)


def _simulate_tables(
    route: tuple[int, ...], shape: tuple[int, int, int, bool], costs: StageCosts
) -> dict[str, tuple[Table, Timeline]]:
    """Simulate the published tables of a shape and route; of equal tables the first is taken."""
    tables: dict[Table, tuple[str, Timeline]] = {}
    for schedule in PUBLISHED:
        with contextlib.suppress(UsageError):  # the schedule has no table of this shape
            if schedule.placement(shape[0]) == route and (table := schedule.table(*shape)) not in tables:
                tables[table] = schedule.name, simulate(table, costs)
    if not tables:
        raise UsageError(
            f"schedule auto: no published schedule has {shape[1]} stages on each submesh by the route "
            f"{' '.join(map(str, route))}; write the table: schedule=multimesh.schedules.custom(rows)"
        )
    return {name: (table, timeline) for table, (name, timeline) in tables.items()}
