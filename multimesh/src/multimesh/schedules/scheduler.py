"""The list scheduler: each row starts its next cell as soon as the row is free and all inputs have arrived.

`validate`, the order in which a loop is dispatched (``passes/cutting/order_cells.py``), and the forecasts of tables and
plans all ask it when cells run, in which order, or whether they run at all.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from multimesh.core.checks import many, refuse
from multimesh.errors import UsageError
from multimesh.schedules.table import Cell, Table

C = TypeVar("C", bound=Hashable)


def run(
    rows: Sequence[Sequence[C]],
    needs: Callable[[C], Iterable[C]],
    cost: Callable[[C], float],
    transfer: Callable[[C, C], float] | None = None,
) -> dict[C, tuple[float, float]]:
    """Compute the start and end of every cell. If two start at the same time, that of the first row comes first.

    The cells of a row share a resource (a submesh, a link), in the order in which they use it. ``needs`` gives the
    cells that must have ended before one starts, ``cost`` the time of a cell, and ``transfer`` the time between the end
    of a cell and the start of one that needs it in another row; by default none.

    The result is in the order in which cells start. It lacks cells that wait for each other, and those behind them.
    """
    place = {cell: row for row, cells in enumerate(rows) for cell in cells}
    times: dict[C, tuple[float, float]] = {}
    clock, position = [0.0] * len(rows), [0] * len(rows)
    waiting: dict[C, list[int]] = collections.defaultdict(list)  # rows whose next cell waits for this one
    ready: list[tuple[float, int]] = []

    def look_at(row: int) -> None:
        """Queue the next cell of a row, or note what it waits for."""
        if position[row] == len(rows[row]):
            return
        start = clock[row]
        for source in needs(rows[row][position[row]]):
            if source not in times:
                waiting[source].append(row)
                return
            way = transfer(source, rows[row][position[row]]) if transfer and place[source] != row else 0.0
            start = max(start, times[source][1] + way)
        heapq.heappush(ready, (start, row))

    for row in range(len(rows)):
        look_at(row)
    while ready:
        start, row = heapq.heappop(ready)
        cell = rows[row][position[row]]
        clock[row] = start + cost(cell)
        times[cell] = (start, clock[row])
        position[row] += 1
        for other in (row, *waiting.pop(cell, ())):
            look_at(other)
    return times


def validate(
    table: Table,
    submeshes: int,
    chunks: int,
    microbatches: int,
    backward: bool = True,
    placement: Sequence[int] | None = None,
) -> None:
    """Check that a table runs every phase of every stage and microbatch once, in an order without deadlock.

    Phases are F, with ``backward`` B, and W for all stages if the table has any. F waits for the stage before, B for
    the F of its stage and the B of the stage after, W for its B.

    Parameters
    ----------
    table
        One row of cells for each submesh.
    submeshes, chunks, microbatches, backward
        The shape that the table must have, as in `Schedule.table`.
    placement
        The submesh of each stage, as `Schedule.placement` gives it; by default stage ``s`` runs on ``s % submeshes``.

    Raises
    ------
    UsageError
        If a cell is wrong; names its submesh (row), its position in the row from 0, its phase, stage and microbatch.
    """
    rows = [many("schedule table: a row", row, "a sequence of cells") for row in many("schedule table", table, "rows")]
    for cell in (cell for row in rows for cell in row if not isinstance(cell, Cell)):
        raise refuse("schedule table: a cell", "a multimesh.schedules.Cell", cell)
    if len(table) != submeshes:
        raise UsageError(
            f"schedule table: {len(table)} rows, but there are {submeshes} submeshes; give one row for each"
        )
    on = placement or range(submeshes)
    home = [on[stage % len(on)] for stage in range(submeshes * chunks)]
    where = _places(table, home, microbatches, backward)
    phases = "F" + "B" * backward + "W" * any(c.phase == "W" for c in where)
    for cell in itertools.starmap(Cell, itertools.product(phases, range(len(home)), range(microbatches))):
        if cell not in where:
            raise UsageError(f"schedule table: {cell} is missing; it belongs in the row of submesh {home[cell.stage]}")
    _refuse_deadlock(table, where, submeshes * chunks)


def _places(table: Table, home: Sequence[int], microbatches: int, backward: bool) -> dict[Cell, tuple[int, int]]:
    """Check every cell, and return its row and position. ``home`` has the submesh of each stage."""
    where: dict[Cell, tuple[int, int]] = {}
    for rank, row in enumerate(table):
        for position, cell in enumerate(row):
            label = f"schedule table: submesh {rank}, position {position}: {cell}"
            if cell.phase not in ("FBW" if backward else "F"):
                phases = "F, B and W" if backward else "F only: this loop has no backward pass"
                raise UsageError(f"{label}: unknown phase {cell.phase!r}; phases are {phases}")
            if not 0 <= cell.stage < len(home):
                raise UsageError(f"{label}: there is no such stage; the loop has stages 0 to {len(home) - 1}")
            if not 0 <= cell.microbatch < microbatches:
                raise UsageError(f"{label}: there is no such microbatch; the loop has 0 to {microbatches - 1}")
            if home[cell.stage] != rank:
                raise UsageError(f"{label}: stage {cell.stage} runs on submesh {home[cell.stage]}; move it there")
            if cell in where:
                raise UsageError(f"{label}: it stands at position {where[cell][1]} already; leave one out")
            where[cell] = (rank, position)
    return where


def needs(cell: Cell, stages: int) -> tuple[Cell, ...]:
    """Return the cells that must have run before this one."""
    if cell.phase == "F":
        return (Cell("F", cell.stage - 1, cell.microbatch),) if cell.stage else ()
    if cell.phase == "W":
        return (Cell("B", cell.stage, cell.microbatch),)
    after = (Cell("B", cell.stage + 1, cell.microbatch),) if cell.stage + 1 < stages else ()
    return (Cell("F", cell.stage, cell.microbatch), *after)


def _refuse_deadlock(table: Table, where: dict[Cell, tuple[int, int]], stages: int) -> None:
    """Run the rows as far as they go, and raise an error if cells are left."""
    ends = run(table, lambda cell: needs(cell, stages), lambda cell: 1.0)
    stuck = [(rank, cell) for rank, row in enumerate(table) if (cell := next((c for c in row if c not in ends), None))]
    if not stuck:
        return
    waits = []
    for rank, cell in stuck:
        missing = next(n for n in needs(cell, stages) if n not in ends)
        on, at = where[missing]
        place = f"submesh {rank}, position {where[cell][1]}: {cell} waits for {missing}"
        if on == rank:
            raise UsageError(f"schedule table: {place}, which comes later in the same row (position {at}); swap them")
        waits.append(f"{place} (submesh {on}, position {at})")
    raise UsageError(f"schedule table: deadlock: {'; '.join(waits)}")
