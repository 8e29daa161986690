"""Seconds of a pipeline's microbatches: a schedule's own table, run by the simulator of `multimesh.schedules`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from multimesh.schedules.costs import map_covers
from multimesh.schedules.scheduler import run

from multimesh import schedules
from multimesh_planner.layer_seconds import Times

_ROUNDS = 3  # of microbatches, after which a table repeats itself


Cells = Mapping[schedules.Cell, Sequence[schedules.Cell]]


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Return the largest number of activations that each submesh has at once."""
    return tuple(_peak(row) for row in schedules.get(schedule).table(pp, chunks, microbatches, True))


def _peak(row: Sequence[schedules.Cell]) -> int:
    last = "W" if any(cell.phase == "W" for cell in row) else "B"
    forward = {(cell.stage, cell.microbatch) for cell in row if cell.phase == "F"}
    peak = number = 0
    for cell in row:
        if cell.phase == "F":
            number += 1
        elif cell.phase == last:  # the last stage's forward may be a part of its backward
            peak = max(peak, number + ((cell.stage, cell.microbatch) not in forward))
            number -= (cell.stage, cell.microbatch) in forward
        peak = max(peak, number)
    return peak


@functools.lru_cache(maxsize=4096)
def late_weights(schedule: str, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Return the largest number of microbatches whose W each submesh has yet to run after their B."""
    steps = {"F": 0, "B": 1, "W": -1}
    table = schedules.get(schedule).table(pp, chunks, microbatches, True)
    return tuple(max(itertools.accumulate(steps[cell.phase] for cell in row)) for row in table)


@functools.lru_cache(maxsize=64)
def _cells(schedule: str, pp: int, chunks: int, microbatches: int) -> tuple[schedules.Table, Cells, Mapping[Any, str]]:
    """Return the table of a schedule, the cells that each cell needs, and the phases that it covers."""
    table = schedules.get(schedule).table(pp, chunks, microbatches, True)
    cells = {cell for row in table for cell in row}
    covers = map_covers((cell.stage, cell.phase) for cell in cells)
    sources = {cell: [s for s in schedules.needs(cell, pp * chunks) if s in cells] for cell in cells}
    return table, sources, {cell: covers[cell.stage, cell.phase] for cell in cells}


def seconds(
    schedule: str, pp: int, microbatches: int, stages: Sequence[Times], hop: float = 0.0, blocked: float = 0.0
) -> float:
    """Return the seconds from the first cell to the end of the last.

    A table of many microbatches repeats itself, so two short ones tell how much each further round takes. A round takes
    no less than the work of the busiest submesh: a slow one may lag behind the others for longer than a short table is.
    """
    first = _ROUNDS * pp + microbatches % pp
    if microbatches <= first + pp:
        return _end(schedule, pp, microbatches, stages, hop, blocked)
    one, two = (_end(schedule, pp, number, stages, hop, blocked) for number in (first, first + pp))
    busiest = pp * max(row_seconds(schedules.get(schedule).placement(pp), stages, blocked))
    end = two + (microbatches - first - pp) / pp * max(two - one, busiest)
    return max(end, least_seconds(schedule, pp, microbatches, stages, hop, blocked))


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
    route, splits = schedules.get(schedule).placement(pp), schedules.get(schedule).splits
    work = row_seconds(route, stages, blocked)
    longest = ahead = behind = 0.0
    entered: set[int] = set()
    for stage, row in zip(stages, itertools.cycle(route), strict=False):
        if row not in entered:
            entered.add(row)
            longest = max(longest, microbatches * work[row] + ahead + (0.0 if splits else behind))
        ahead += stage.forward + blocked + hop
        behind += stage.backward + stage.weights + blocked + hop
    return longest


def _end(schedule: str, pp: int, microbatches: int, stages: Sequence[Times], hop: float, blocked: float) -> float:
    table, sources, phases = _cells(schedule, pp, len(stages) // pp, microbatches)
    costs = [
        {
            covered: sum({"F": s.forward, "B": s.backward, "W": s.weights}[p] for p in covered)
            + blocked * len({*covered} & {"F", "B"})
            for covered in ("F", "B", "W", "BW", "FB", "FBW", "")
        }
        for s in stages
    ]
    ends = run(table, sources.__getitem__, lambda cell: costs[cell.stage][phases[cell]], lambda source, cell: hop)
    return max(end for _, end in ends.values())
