"""A schedule: for each submesh a row of cells, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from multimesh.errors import UsageError
from multimesh.schedules.costs import UNIT_COSTS


@dataclass(frozen=True)
class Cell:
    """One entry of a table: a phase of a stage, for one microbatch.

    Attributes
    ----------
    phase
        ``F`` forward, ``B`` backward, ``W`` the weight gradients, if a schedule splits them off the backward.
    stage
        From 0, in the order of the data. `Schedule.placement` gives its submesh.
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
class PublishedIdle:
    """The idle time of a submesh in a paper: of every submesh in one step, where transfers take no time.

    With ``in_a_row`` it is that of the busiest submesh when steps follow each other, so that the next step begins on a
    submesh as soon as this one has ended there.
    """

    idle: float
    formula: str
    unless: str = ""  # the reason why it need not hold
    in_a_row: bool = False
    bound: bool = False  # it is an upper bound


@dataclass(frozen=True)
class Schedule:
    """Base class of the schedules; use one of its subclasses.

    Attributes
    ----------
    name
        The name that users write.
    summary
        The order in a few words, for ``--help``.
    splits
        Whether weight gradients are a phase W of their own.
    sends_ahead
        Whether the result of a backward that another process waits for leaves before the weight gradients, which then
        are a kernel of their own behind it. The order and the live microbatches stay those of the table.
    chunks
        Stages on each submesh, if the schedule has tables for one number only.
    usual
        Stages on each submesh, if nobody says how many.
    ahead
        How many fronts before its reader a transfer is issued. None: as soon as the value is made. Only for schedules
        with fronts.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    splits: ClassVar[bool] = False
    sends_ahead: ClassVar[bool] = False
    chunks: ClassVar[int | None] = None
    usual: ClassVar[int] = 1
    ahead: ClassVar[int | None] = None

    def placement(self, submeshes: int) -> tuple[int, ...]:
        """Return the submesh of stages 0, 1, ...: the route of a microbatch. Further stages go the same way again.

        Stage ``s`` runs on ``placement[s % len(placement)]``: by default on ``s % p``, round and round.
        """
        return tuple(range(submeshes))

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """Return the rows of cells of all submeshes.

        Parameters
        ----------
        submeshes
            ``p``: the table has one row for each.
        chunks
            ``v``: stages on each submesh.
        microbatches
            ``m``.
        backward
            Whether there is a backward pass. Without it the forward cells keep their order.

        Raises
        ------
        UsageError
            If the schedule has no table of this shape.
        """
        self.check_sizes(submeshes, chunks, microbatches)
        if self.chunks is not None and chunks != self.chunks:
            others = "interleaved, gpipe or wavefront" if chunks > 1 else "1f1b or zb-h1"
            raise UsageError(
                f"schedule {self.name} has {('no stages', 'one stage', 'two stages')[self.chunks]} a submesh, but the "
                f"loop has {chunks}; use {others}"
            )
        rows = (self.row(rank, submeshes, chunks, microbatches) for rank in range(submeshes))
        return tuple(tuple(c for c in row if backward or c.phase == "F") for row in rows)

    def check_sizes(self, submeshes: int, chunks: int, microbatches: int) -> None:
        """Refuse sizes for which no schedule has a table."""
        if min(submeshes, chunks, microbatches) < 1:
            raise UsageError(
                f"schedule {self.name}: {submeshes} submeshes, {chunks} stages on each and {microbatches} microbatches "
                "do not make a table; each must be at least 1"
            )

    def idle(
        self, submeshes: int, chunks: int, microbatches: int, costs: Mapping[str, float] = UNIT_COSTS
    ) -> PublishedIdle | None:
        """Return the published idle time, or None.

        ``costs`` of F, B and W are those of a whole submesh, in all its ``v`` stages together.
        """
        return None

    def row(self, rank: int, submeshes: int, chunks: int, microbatches: int) -> Iterable[Cell]:
        """Return the row of one submesh, with a backward pass."""
        raise NotImplementedError

    def front(self, cell: Cell, submeshes: int, chunks: int) -> int | None:
        """Return the front of a cell, in a schedule with a global order of fronts; else None."""
        return None

    def __str__(self) -> str:
        return self.name
