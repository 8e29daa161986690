"""Tables of users: Python sequences, or a JSON file."""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from multimesh.core import checks
from multimesh.errors import UsageError
from multimesh.schedules.table import Cell, Schedule, Table

_NAME = re.compile(r"([FBW])(\d+)", re.ASCII)


@dataclass(frozen=True)
class Custom(Schedule):
    """A table of a user; make one with `custom` or `load`."""

    rows: Table = ()

    name: ClassVar[str] = "custom"

    @property
    def splits(self) -> bool:  # type: ignore[override]
        """Whether the table has cells W."""
        return any(cell.phase == "W" for row in self.rows for cell in row)

    def placement(self, submeshes: int) -> tuple[int, ...]:
        """Return the row of each stage; rows in turn if a stage is missing, or if the rows do not begin in order."""
        home = {cell.stage: rank for rank, row in reversed([*enumerate(self.rows)]) for cell in row}
        route = tuple(home[stage] for stage in sorted(home))
        turns = tuple(range(submeshes))
        in_order = sorted(home) == list(range(len(home))) and tuple(dict.fromkeys(route)) == turns
        return turns if not in_order or route == turns * (len(route) // submeshes) else route

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """Return the rows as given; `validate` checks whether they have this shape."""
        return tuple(tuple(c for c in row if backward or c.phase == "F") for row in self.rows)


def custom(rows: Iterable[Iterable[str | tuple[int, str]]]) -> Custom:
    """Make a schedule of a table of your own.

    Parameters
    ----------
    rows
        The cells of each submesh, in the order of the pipeline. ``"F0"`` is the forward of stage 0, ``"B0"`` its
        backward, ``"W0"`` its weight gradients, if the table splits them off. In a row of names, a name stands for the
        next microbatch each time. In a row of pairs ``(microbatch, name)`` you say which. All cells of a stage are in
        the row of the submesh on which it runs: with ``p`` submeshes stage ``s`` in row ``s % p``, or as you like, as
        in ``[["F0", "F3", ...], ["F1", "F2", ...]]``.

    Returns
    -------
    Custom
        Not validated yet: that needs the loop's number of stages and microbatches.

    Raises
    ------
    UsageError
        If an entry is no cell; names it.

    Examples
    --------
    1F1B on two submeshes, three microbatches:

    >>> schedule = custom([["F0", "F0", "B0", "F0", "B0", "B0"], ["F1", "B1", "F1", "B1", "F1", "B1"]])
    >>> schedule == custom([
    ...     [(0, "F0"), (1, "F0"), (0, "B0"), (2, "F0"), (1, "B0"), (2, "B0")],
    ...     [(0, "F1"), (0, "B1"), (1, "F1"), (1, "B1"), (2, "F1"), (2, "B1")],
    ... ])
    True
    """
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise UsageError(f"custom schedule: expected a list of rows, one for each submesh, got {rows!r}")
    return Custom(tuple(_row(rank, row) for rank, row in enumerate(rows)))


def load(path: str | os.PathLike[str]) -> Custom:
    """Read a schedule from a JSON file: a list of rows as in `custom`, with pairs as lists ``[0, "F0"]``.

    It also reads the files of `Choice.save`: the table that ``auto`` took.

    Raises
    ------
    UsageError
        If the file can't be read or has no such list.
    """
    path = checks.path("schedules.load: path", path)
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"custom schedule {os.fspath(path)}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"custom schedule {os.fspath(path)}: not JSON: {error}") from None
    try:
        return custom(rows["table"] if isinstance(rows, dict) and "table" in rows else rows)
    except UsageError as error:
        raise UsageError(f"{os.fspath(path)}: {error}") from None


def _row(rank: int, row: Any) -> tuple[Cell, ...]:
    if isinstance(row, str | bytes) or not isinstance(row, Iterable):
        raise UsageError(f"custom schedule: submesh {rank}: expected a list of names or pairs, got {row!r}")
    entries = list(row)
    times: collections.Counter[str] = collections.Counter()
    cells = []
    for position, entry in enumerate(entries):
        label = f"custom schedule: submesh {rank}, position {position}: {entry!r}"
        if isinstance(entry, str) != isinstance(entries[0], str):
            raise UsageError(f"{label}: names and pairs (microbatch, name) in one row; use one of the two")
        match entry:
            case str(name):
                microbatch = times[name]
            case (int(microbatch), str(name)) if not isinstance(microbatch, bool):
                pass
            case _:
                raise UsageError(f"{label}: expected a name as 'F0' or a pair (microbatch, name) as (0, 'F0')")
        times[name] += 1
        cell = _NAME.fullmatch(name)
        if cell is None:
            raise UsageError(f"{label}: not a cell; write F, B or W and the number of the stage, as in 'F0'")
        cells.append(Cell(cell[1], int(cell[2]), microbatch))
    return tuple(cells)
