"""Simulation of a schedule's table: when each cell runs on ideal submeshes, given what each phase costs."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from multimesh.errors import UsageError
from multimesh.schedules import Table, needs
from multimesh.schedules.scheduler import run
from multimesh.timeline import Hop, Span, Steps, Timeline, live_steps

PHASES = ("F", "B", "W")
UNIT_COSTS: Mapping[str, float] = {"F": 1.0, "B": 1.0, "W": 1.0}


def cost(value: object, what: str) -> float:
    """A cost as a float.

    Raises
    ------
    UsageError
        When it is no number, infinite, NaN or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UsageError(f"costs: that of {what} must be a finite number of at least 0, got {value!r}")
    return float(value)


def checked(costs: Mapping[str, float]) -> dict[str, float]:
    """Costs of F, B and W.

    Raises
    ------
    UsageError
        For a missing or unknown phase, and for what is no cost.
    """
    if set(costs) != set(PHASES):
        raise UsageError(f"costs: expected one for each of F, B and W, got {', '.join(map(repr, costs)) or 'none'}")
    return {phase: cost(costs[phase], phase) for phase in PHASES}


def covered(cells: Iterable[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """What each program of a pipeline, given as (stage, phase), covers.

    A stage that has no program for its weight gradients makes them in B. In a pipeline, a stage without a program for
    its forward runs that in B too: `jit` joins a forward and a backward that always follow each other.
    """
    phases: dict[int, set[str]] = collections.defaultdict(set)
    for stage, phase in cells:
        phases[stage].add(phase)
    present = set().union(*phases.values())
    pipeline = "F" not in present or any(len(found) > 1 for found in phases.values())
    covers: dict[tuple[int, str], str] = {}
    for stage, found in phases.items():
        for phase in found:
            front = "F" if phase == "B" and pipeline and "F" not in found else ""
            back = "W" if phase == "B" and "W" not in found else ""
            covers[stage, phase] = front + phase + back
    return covers


def simulate(
    table: Table, costs: Mapping[str, float] = UNIT_COSTS, *, transfer: float = 0.0, title: str = ""
) -> Timeline:
    """Run a table on ideal submeshes.

    A submesh starts its next cell as soon as it is free and what the cell needs has arrived. A transfer starts when its
    cell ends, whenever the schedule issues it, and keeps no submesh from computing.

    Parameters
    ----------
    table
        For each submesh its cells in order.
    costs
        Time of F, B and W of one stage; where a table has no W, its B takes the time of both.
    transfer
        Time between the end of a cell and the arrival of its result on another submesh.
    title
        Of the timeline.

    Returns
    -------
    Timeline
        Its ``live`` counts activations: that of a stage and microbatch is alive from the start of F to the end of its
        last phase.

    Raises
    ------
    UsageError
        When cells wait for each other; names them.
    """
    costs, transfer = checked(costs), cost(transfer, "a transfer")
    place = {cell: row for row, cells in enumerate(table) for cell in cells}
    covers = covered((cell.stage, cell.phase) for cell in place)
    stages = 1 + max((cell.stage for cell in place), default=0)
    reads = {cell: [source for source in needs(cell, stages) if source in place] for cell in place}
    times = run(table, reads.__getitem__, lambda cell: sum(costs[p] for p in covers[cell.stage, cell.phase]), transfer)
    if len(times) < len(place):
        waiting = (next((cell for cell in row if cell not in times), None) for row in table)
        stuck = ", ".join(str(cell) for cell in waiting if cell is not None)
        raise UsageError(f"the schedule deadlocks: {stuck} wait for what comes later")
    number = {cell: n for n, cell in enumerate(times)}
    spans = [Span(place[c], *times[c], c.phase, "", c.stage, c.microbatch) for c in times]
    transfers = []
    for cell, reader in number.items():
        for source in (source for source in reads[cell] if place[source] != place[cell]):
            sent = times[source][1]
            transfers.append(Hop(place[source], place[cell], sent, sent + transfer, None, number[source], (reader,)))
    rows = tuple(f"submesh {row}" for row in range(len(table)))
    several = any(len({cell.stage for cell in row}) > 1 for row in table)
    note = f"forecast with {_described(costs, covers.values())}, transfers {transfer:g}"
    note += "; an activation is that of one stage" if several else ""
    live = tuple(_activations([s for s in spans if s.row == row]) for row in range(len(table)))
    return Timeline(title, note, "", rows, tuple(spans), tuple(transfers), live, "activations")


def _described(costs: Mapping[str, float], covers: Iterable[str]) -> str:
    names = sorted(set(covers), key="FBW".find)
    return ", ".join(f"{'+'.join(name)} {sum(costs[p] for p in name):g}" for name in names)


def _activations(spans: Sequence[Span]) -> Steps:
    ends: dict[tuple[int | None, int | None], tuple[float, int]] = {}
    for order, span in enumerate(spans):
        ends[span.stage, span.microbatch] = (span.end, 2 * order + 1)
    made = [(span.start, 2 * order, 1.0) for order, span in enumerate(spans) if span.phases == "F"]
    return live_steps([*made, *((end, order, -1.0) for end, order in ends.values())])
