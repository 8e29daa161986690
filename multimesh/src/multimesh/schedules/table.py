"""What a schedule is: for each submesh the order in which it runs the microbatches of its stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from multimesh.errors import UsageError


@dataclass(frozen=True)
class Cell:
    """One entry of a table.

    Attributes
    ----------
    phase
        ``F`` forward, ``B`` backward, ``W`` the weight gradients, where a schedule splits them off the backward.
    stage
        From 0, in the order of the data; `Schedule.placement` says on which submesh it runs.
    microbatch
        From 0.
    """

    phase: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.phase}{self.stage} of microbatch {self.microbatch}"


Row = tuple[Cell, ...]
Table = tuple[Row, ...]


@dataclass(frozen=True)
class Schedule:
    """Common face of the schedules; use one of its subclasses.

    Attributes
    ----------
    name
        As users write it.
    splits
        Whether weight gradients are a phase W of their own.
    chunks
        Stages on each submesh, where the schedule has a table for no other number.
    usual
        Stages on each submesh that it is meant for: where nobody says how many, and it can choose.
    ahead
        How many fronts before its reader a transfer is issued; None: at once, behind the task that made the value. Only
        for schedules that have fronts.
    """

    name: ClassVar[str]
    splits: ClassVar[bool] = False
    chunks: ClassVar[int | None] = None
    usual: ClassVar[int] = 1
    ahead: ClassVar[int | None] = None

    def placement(self, submeshes: int) -> tuple[int, ...]:
        """Submesh of stage 0, 1, ...: the way of a microbatch. Further stages go the same way again.

        Stage ``s`` runs on ``placement[s % len(placement)]``: by default on ``s % p``, round and round.
        """
        return tuple(range(submeshes))

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """Order of the cells of each submesh.

        Parameters
        ----------
        submeshes
            ``p``: the table has one row for each.
        chunks
            ``v``: stages on each submesh.
        microbatches
            ``m``.
        backward
            Whether there is a backward pass; without it the forward cells keep their order.

        Raises
        ------
        UsageError
            When the schedule has no table of this shape.
        """
        self.check_sizes(submeshes, chunks, microbatches)
        if self.chunks is not None and chunks != self.chunks:
            others = "interleaved, gpipe or wavefront" if chunks > 1 else "1f1b or zb-h1"
            raise UsageError(
                f"schedule {self.name} has {_stages(self.chunks)} a submesh, but the loop has {chunks}; use {others}"
            )
        rows = (self.row(rank, submeshes, chunks, microbatches) for rank in range(submeshes))
        return tuple(tuple(c for c in row if backward or c.phase == "F") for row in rows)

    def check_sizes(self, submeshes: int, chunks: int, microbatches: int) -> None:
        """Refuse sizes that no schedule has a table for."""
        if min(submeshes, chunks, microbatches) < 1:
            raise UsageError(
                f"schedule {self.name}: {submeshes} submeshes, {chunks} stages on each and {microbatches} microbatches "
                "do not make a table; each must be at least 1"
            )

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """Row of one submesh, with a backward pass."""
        raise NotImplementedError

    def front(self, cell: Cell, submeshes: int, chunks: int) -> int | None:
        """Front of a cell, for schedules whose global order goes front by front."""
        return None

    def __str__(self) -> str:
        return self.name


def _stages(number: int) -> str:
    return f"{('no', 'one', 'two')[number]} stage{'' if number == 1 else 's'}"
