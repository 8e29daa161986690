"""Pipeline schedules: a row of cells for each submesh, in the order in which they run.

A schedule is a frozen dataclass with ``table(submeshes, chunks, microbatches, backward)``. A cell names phase, stage
and microbatch. ``placement(submeshes)`` gives the submesh of each stage. Nothing here imports JAX.
"""

from __future__ import annotations

import difflib

from multimesh.core.checks import refuse
from multimesh.errors import UsageError
from multimesh.schedules.auto import Auto, Candidate, Choice
from multimesh.schedules.costs import StageCosts
from multimesh.schedules.custom import Custom, custom, load
from multimesh.schedules.partitioning import LayerCosts, Partition, partition
from multimesh.schedules.published import (
    PUBLISHED,
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    EagerOneFOneB,
    GPipe,
    Interleaved,
    InterleavedZB,
    KimiK2,
    LoopedBFS,
    OneFOneB,
    PrefetchWavefront,
    Wavefront,
)
from multimesh.schedules.table import Cell, Row, Schedule, Table
from multimesh.schedules.validation import needs, validate

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Auto",
    "Candidate",
    "Cell",
    "Choice",
    "Custom",
    "DualPipeV",
    "EagerOneFOneB",
    "GPipe",
    "Interleaved",
    "InterleavedZB",
    "KimiK2",
    "LayerCosts",
    "LoopedBFS",
    "OneFOneB",
    "Partition",
    "PrefetchWavefront",
    "Row",
    "Schedule",
    "StageCosts",
    "Table",
    "Wavefront",
    "custom",
    "get",
    "load",
    "names",
    "needs",
    "partition",
    "validate",
]

_BY_NAME: dict[str, Schedule] = {s.name: s for s in PUBLISHED} | {"fill-drain": GPipe(), "auto": Auto()}


def names() -> tuple[str, ...]:
    """Return the names of the published schedules. `get` also knows ``auto``, which chooses a table."""
    return tuple(name for name in _BY_NAME if name != Auto.name)


def get(schedule: str | Schedule) -> Schedule:
    """Find a schedule by its name; a schedule object is returned as it is.

    Raises ``UsageError`` for an unknown name.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise refuse("schedule", f"a multimesh.schedules.Schedule or one of {', '.join(_BY_NAME)}", schedule)
    if schedule not in _BY_NAME:
        near = difflib.get_close_matches(schedule.lower(), _BY_NAME, n=1)
        remedy = f"{f'did you mean {near[0]}? ' if near else ''}known: {', '.join(_BY_NAME)}"
        if schedule == "custom":
            remedy = "give the table as custom_schedule="
        raise UsageError(f"unknown schedule {schedule!r}; {remedy}")
    return _BY_NAME[schedule]
