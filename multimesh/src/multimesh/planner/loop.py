"""Seconds of a pipeline's microbatches: a schedule's own table, run on ideal submeshes.

It gives the end of `multimesh.schedules.simulate` without its spans, because the planner asks for thousands of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from multimesh import schedules
from multimesh.planner.products import Times
from multimesh.schedules.costs import map_covers

_TURNS = 3  # rounds of microbatches after which a table repeats itself

Cells = tuple[tuple[int, int, str, tuple[tuple[int, bool], ...]], ...]


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Return the largest number of activations that each submesh holds at once."""
    return tuple(_peak(row) for row in schedules.get(schedule).table(pp, chunks, microbatches, True))


@functools.lru_cache(maxsize=64)
def cells(schedule: str, pp: int, chunks: int, microbatches: int) -> Cells:
    """Yield the cells of a table in an order in which they can run.

    A cell is its submesh, its stage, the phases that it covers, and the cells that it needs, each with whether it is on
    another submesh.
    """
    known = schedules.get(schedule)
    table = known.table(pp, chunks, microbatches, True)
    place = {cell: row for row, row_cells in enumerate(table) for cell in row_cells}
    covers = map_covers((cell.stage, cell.phase) for cell in place)
    number: dict[schedules.Cell, int] = {}
    found: list[tuple[int, int, str, tuple[tuple[int, bool], ...]]] = []
    position = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for row, row_cells in enumerate(table):
            while position[row] < len(row_cells):
                cell = row_cells[position[row]]
                sources = [s for s in schedules.needs(cell, pp * chunks) if s in place]
                if any(source not in number for source in sources):
                    break
                needs = tuple((number[source], place[source] != row) for source in sources)
                number[cell] = len(found)
                found.append((row, cell.stage, covers[cell.stage, cell.phase], needs))
                position[row] += 1
                moved = True
    return tuple(found)


def _peak(row: Sequence[schedules.Cell]) -> int:
    most = now = 0
    last = "W" if any(cell.phase == "W" for cell in row) else "B"
    forward = {(c.stage, c.microbatch) for c in row if c.phase == "F"}
    for cell in row:
        if cell.phase == "F":
            now += 1
            most = max(most, now)
        elif cell.phase == last:
            most = max(most, now + ((cell.stage, cell.microbatch) not in forward))
            now -= (cell.stage, cell.microbatch) in forward
    return most


def seconds(
    schedule: str, pp: int, microbatches: int, stages: Sequence[Times], hop: float = 0.0, blocked: float = 0.0
) -> float:
    """Return the seconds from the first cell to the end of the last.

    A table of many microbatches repeats itself, so two short ones tell how much each further round takes. A round takes
    no less than the work of the busiest submesh: a slow one may lag behind the others for longer than a short table is.
    """
    first = _TURNS * pp + microbatches % pp
    if microbatches <= first + pp:
        return _end(schedule, pp, microbatches, stages, hop, blocked)
    one = _end(schedule, pp, first, stages, hop, blocked)
    two = _end(schedule, pp, first + pp, stages, hop, blocked)
    route = schedules.get(schedule).placement(pp)
    longest = max(two - one, pp * max(row_seconds(route, stages, blocked)))
    found = two + (microbatches - first - pp) / pp * longest
    return max(found, least_seconds(schedule, pp, microbatches, stages, hop, blocked))


def row_seconds(route: Sequence[int], stages: Sequence[Times], blocked: float = 0.0) -> list[float]:
    """Return the seconds in which each submesh is busy with a microbatch."""
    work = [0.0] * len(set(route))
    for stage, row in zip(stages, itertools.cycle(route), strict=False):
        work[row] += stage.total + 2 * blocked
    return work


def least_seconds(
    schedule: str, pp: int, microbatches: int, stages: Sequence[Times], hop: float = 0.0, blocked: float = 0.0
) -> float:
    """Return the seconds that no table of these stages can beat.

    A submesh waits for its first microbatch and runs all of them; then the last goes back to the first stage. Where the
    schedule splits the backward pass, weight gradients may be all that is left at the end.
    """
    known = schedules.get(schedule)
    route = known.placement(pp)
    work = row_seconds(route, stages, blocked)
    longest = ahead = behind = 0.0
    seen: set[int] = set()
    for stage, row in zip(stages, itertools.cycle(route), strict=False):
        if row not in seen:
            seen.add(row)
            longest = max(longest, microbatches * work[row] + ahead + (0.0 if known.splits else behind))
        ahead += stage.forward + blocked + hop
        behind += stage.backward + stage.weights + blocked + hop
    return longest


def _end(schedule: str, pp: int, microbatches: int, stages: Sequence[Times], hop: float, blocked: float) -> float:
    order = cells(schedule, pp, len(stages) // pp, microbatches)
    time = [
        {
            phases: sum({"F": s.forward, "B": s.backward, "W": s.weights}[p] for p in phases)
            + blocked * len({*phases} & {"F", "B"})
            for phases in ("F", "B", "W", "BW", "FB", "FBW")
        }
        for s in stages
    ]
    clock, ends = [0.0] * pp, [0.0] * len(order)
    for number, (row, stage, phases, needs) in enumerate(order):
        start = clock[row]
        for source, far in needs:
            arrives = ends[source] + hop if far else ends[source]
            if arrives > start:
                start = arrives
        clock[row] = ends[number] = start + time[stage][phases]
    return max(clock)
