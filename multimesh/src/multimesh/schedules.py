"""Pipeline schedules as data: for each submesh the order in which it runs its stages' microbatches.

A schedule is a frozen dataclass with ``table(submeshes, chunks, microbatches, backward)``. Cells name phase, stage
and microbatch; stage ``s`` runs on submesh ``s % submeshes``.

GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
1F1B: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, in its synchronous form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multimesh.errors import UsageError


@dataclass(frozen=True)
class Cell:
    """One entry of a table: phase ``F`` or ``B`` of a stage for a microbatch."""

    phase: str
    stage: int
    microbatch: int


Table = tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """Common face of the schedules; use one of its subclasses."""

    @property
    def name(self) -> str:
        """Name as users write it."""
        raise NotImplementedError

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """Order of cells of each submesh; ``chunks`` stages a submesh, ``backward`` whether there is a backward."""
        raise NotImplementedError

    def limit(self, submeshes: int, rank: int) -> int | None:
        """How many microbatches may be alive on the submesh of this rank, for loops that are no plain pipeline."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards (also called fill-drain). Every microbatch is alive at once."""

    @property
    def name(self) -> str:
        """``gpipe``."""
        return "gpipe"

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """Chunk by chunk, microbatch by microbatch."""

        def row(rank: int) -> Iterator[Cell]:
            for chunk in range(chunks):
                yield from (Cell("F", chunk * submeshes + rank, i) for i in range(microbatches))
            for chunk in reversed(range(chunks if backward else 0)):
                yield from (Cell("B", chunk * submeshes + rank, i) for i in range(microbatches))

        return tuple(tuple(row(rank)) for rank in range(submeshes))

    def limit(self, submeshes: int, rank: int) -> int | None:
        """No limit."""
        return None


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward in the steady state: submesh ``r`` of ``p`` holds at most ``p - r`` microbatches."""

    @property
    def name(self) -> str:
        """``1f1b``."""
        return "1f1b"

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """``p - r - 1`` forwards, then pairs, then the remaining backwards."""
        if not backward:
            return GPipe().table(submeshes, chunks, microbatches, backward)
        if chunks != 1:
            raise UsageError(f"schedule 1f1b has one stage a submesh, but the loop has {chunks}; use gpipe")

        def row(rank: int) -> Iterator[Cell]:
            warm = min(submeshes - rank - 1, microbatches)
            yield from (Cell("F", rank, i) for i in range(warm))
            for i in range(microbatches - warm):
                yield Cell("F", rank, warm + i)
                yield Cell("B", rank, i)
            yield from (Cell("B", rank, i) for i in range(microbatches - warm, microbatches))

        return tuple(tuple(row(rank)) for rank in range(submeshes))

    def limit(self, submeshes: int, rank: int) -> int | None:
        """``p - r``."""
        return submeshes - rank


_BY_NAME: dict[str, Schedule] = {"gpipe": GPipe(), "fill-drain": GPipe(), "1f1b": OneFOneB()}


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(_BY_NAME)


def get(schedule: str | Schedule) -> Schedule:
    """Schedule of a name; a schedule object is returned as it is.

    Raises
    ------
    UsageError
        For an unknown name.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if schedule not in _BY_NAME:
        raise UsageError(f"unknown schedule {schedule!r}; known: {', '.join(_BY_NAME)}")
    return _BY_NAME[schedule]
