"""The list scheduler: each row starts its next cell as soon as the row is free and all inputs have arrived.

`schedules.validate`, the order in which a loop is dispatched (``passes/cutting/order_cells.py``), and the forecasts of
tables and plans all ask it when cells run, in which order, or whether they run at all.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

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
