"""Pipeline schedules: a row of cells for each submesh, in the order in which they run.

A schedule is a frozen dataclass with ``table(submeshes, chunks, microbatches, backward)``. A cell names phase, stage
and microbatch. ``placement(submeshes)`` gives the submesh of each stage. Nothing here imports JAX.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from multimesh.core.checks import refuse
from multimesh.errors import UsageError
from multimesh.schedules.auto import Auto
from multimesh.schedules.costs import StageCosts
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
from multimesh.schedules.scheduler import needs, validate
from multimesh.schedules.table import Cell, Row, Schedule, Table

if TYPE_CHECKING:
    from multimesh.schedules.choose import Candidate, Choice
    from multimesh.schedules.user_table import Custom, custom, load
    from multimesh.stages.partitioning import LayerCosts, partition

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
            remedy = "give the table itself: schedule=multimesh.schedules.custom(rows)"
        raise UsageError(f"unknown schedule {schedule!r}; {remedy}")
    return _BY_NAME[schedule]


_HOMES = {
    "schedules.choose": ("Candidate", "Choice"),
    "schedules.user_table": ("Custom", "custom", "load"),
    "stages.partitioning": ("LayerCosts", "partition"),
}
_LATER = {name: module for module, names in _HOMES.items() for name in names}
"""Names that few programs use, to the module that is loaded then."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"multimesh.{_LATER[name]}"), name)
