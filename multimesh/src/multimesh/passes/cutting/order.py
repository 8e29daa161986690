"""From stages of a loop and its schedule's table to one global order of (fragment, microbatch)."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from multimesh import ir, schedules
from multimesh.core import _compat
from multimesh.core.submesh import describe
from multimesh.errors import UsageError, internal_error
from multimesh.ir.program import LoopMark
from multimesh.passes.cutting.estimate import estimate
from multimesh.passes.cutting.fragment import Fragment, join
from multimesh.passes.cutting.recompute import keep_less
from multimesh.passes.cutting.stages import Pipeline
from multimesh.passes.cutting.weights import split_weights
from multimesh.schedules import Cell, Table
from multimesh.schedules.scheduler import run


@dataclass(frozen=True, eq=False)
class Stage:
    """A fragment of a loop with the stage it belongs to."""

    fragment: Fragment
    number: int
    phase: str


@dataclass(frozen=True, eq=False)
class LoopOrder:
    """Stages of a loop and the order in which (index of stage, microbatch) are dispatched.

    ``fronts`` has the front of each cell where the schedule has fronts; transfers are then issued ``ahead`` fronts
    before the cell that reads them, else as soon as the value is made. ``choice`` is what ``auto`` chose from.
    """

    stages: tuple[Stage, ...]
    cells: tuple[tuple[int, int], ...]
    fronts: tuple[int, ...] | None = None
    ahead: int = 0
    choice: schedules.Choice | None = None

    def issue(self, n: int, value: ir.Value, mesh: Mesh) -> int:
        """Number of the cell before which a value that cell ``n`` makes is sent to a submesh; mostly ``n + 1``."""
        if self.fronts is None:
            return n + 1
        readers = [i for i, s in enumerate(self.stages) if s.fragment.mesh == mesh and value in s.fragment.ins]
        first = min((self._front[i, self.cells[n][1]] for i in readers), default=0)
        due = max(first - self.ahead, self.fronts[n])
        return n + 1 if due == self.fronts[n] else bisect.bisect_left(self.fronts, due)

    @functools.cached_property
    def _front(self) -> dict[tuple[int, int], int]:
        return dict(zip(self.cells, self.fronts or (), strict=True))


def order(pipeline: Pipeline, mark: LoopMark, results: set[ir.Value], *, recompute: bool = True) -> LoopOrder:
    """Order a loop by its schedule's table; ``recompute`` lets a fragment repeat cheap operations of earlier ones.

    Raises
    ------
    UsageError
        When the loop does not have the stages that were asked for, or the schedule has no valid table for it.
    """
    schedule = mark.schedule
    if isinstance(schedule, schedules.Auto) and schedule.costs is None:
        schedule = replace(schedule, costs=estimate(pipeline, results))
        mark = replace(mark, schedule=schedule)
    table = _table(pipeline, mark)
    # Where others wait for B, its result leaves before W runs.
    apart = {c.stage for c in _cells(table) if c.phase == "W"} - (_back_to_back(table, "B", "W") & {0})
    split = split_weights(pipeline.fragments, apart, results)
    parts = keep_less(split, results) if recompute else split
    found = [Stage(f, f.stage, f.phase) for f in parts if f.stage is not None and f.phase is not None]
    present = {(s.phase, s.number) for s in found}
    rows = [[c for c in row if (c.phase, c.stage) in present] for row in table]
    found, rows = _join_turns(found, rows, results)
    made = _merged(found, rows, mark, pipeline)
    if not isinstance(schedule, schedules.Auto):
        return made
    return replace(made, choice=schedule.choose(*_shape(pipeline, mark)))


def _shape(pipeline: Pipeline, mark: LoopMark) -> tuple[int, int, int, bool]:
    """Submeshes, stages on each, microbatches, and whether there is a backward pass."""
    backward = any(part.phase == "B" for part in pipeline.fragments)
    return len(pipeline.submeshes), pipeline.chunks, mark.count, backward


def _table(pipeline: Pipeline, mark: LoopMark) -> Table:
    """The schedule's table for the shape of the loop, validated."""
    submeshes, chunks = len(pipeline.submeshes), pipeline.chunks
    placement = mark.schedule.placement(submeshes)
    if mark.num_stages is not None and pipeline.stages != mark.num_stages:
        raise UsageError(f"{mark.where}: num_stages={mark.num_stages}, but the loop has {pipeline.stages} stages")
    if mark.interleave > 1 and chunks != mark.interleave:
        raise UsageError(
            f"{mark.where}: interleave={mark.interleave}, but the loop comes to its {submeshes} submeshes {chunks} "
            f"{'time' if chunks == 1 else 'times'}; place stages 0, 1, ... on submeshes {_row(placement)} in turn, "
            "or change interleave="
        )
    if len(placement) > submeshes and pipeline.stages < submeshes * chunks:
        missing = set(range(submeshes * chunks)) - {part.stage for part in pipeline.fragments}
        raise UsageError(
            f"{mark.where}: schedule {mark.schedule} puts stages 0, 1, ... on submeshes {_row(placement)}, but the "
            f"loop has nothing to run as stage {min(missing)}; give each stage a task of its own on that submesh"
        )
    shape = _shape(pipeline, mark)
    try:
        table = mark.schedule.table(*shape)
        schedules.validate(table, *shape, placement)
    except UsageError as error:
        raise UsageError(f"{mark.where}: {error}{_again(pipeline)}") from None
    return table


def _row(placement: Sequence[int]) -> str:
    return " ".join(map(str, placement))


def _again(pipeline: Pipeline) -> str:
    """What brings a loop to a submesh for a second time, which some schedules have no place for."""
    late = [part for part in pipeline.fragments if part.stage is not None and part.stage >= len(pipeline.submeshes)]
    if not late:
        return ""
    part = min(late, key=lambda p: (p.phase != "F", p.stage or 0))
    own = [op for op in part.ops if any(op.reads)] or part.ops
    op = next((op for op in own if op.task is None), own[0])
    remedy = (
        "put it into a task of the last stage"
        if part.phase == "F"
        else "where it waits for gradients of earlier stages, do it once, with what the loop returns"
    )
    who = f"of task {op.task.name!r}" if op.task else f"outside tasks; {remedy}"
    return (
        f". {_compat.user_line(op.source) or 'A line that JAX did not record'}: submesh {describe(part.mesh)} gets a "
        f"stage more by this {op.prim.name} {who}"
    )


def _cells(table: Sequence[Sequence[Cell]]) -> list[Cell]:
    return [cell for row in table for cell in row]


def _back_to_back(table: Sequence[Sequence[Cell]], first: str, second: str) -> set[int]:
    """Stages whose ``second`` phase always follows ``first`` at once."""
    pairs = {pair for row in table for pair in itertools.pairwise(row)}
    cells = [c for c in _cells(table) if c.phase == first]
    apart = {c.stage for c in cells if (c, Cell(second, c.stage, c.microbatch)) not in pairs}
    return {c.stage for c in cells} - apart


def _join_turns(
    stages: list[Stage], rows: list[list[Cell]], results: set[ir.Value]
) -> tuple[list[Stage], list[list[Cell]]]:
    """Make one program of forward and backward of a stage where the schedule always runs them back to back.

    In 1f1b that is the last stage; its activations then never leave the program. The joined program counts as phase B.
    """
    for number in sorted(_back_to_back(rows, "F", "B")):
        first, second = (next(s for s in stages if (s.phase, s.number) == (phase, number)) for phase in "FB")
        if _read_elsewhere(first, stages):
            continue
        joined = join(first.fragment, second.fragment, [s.fragment for s in stages], results)
        stages = [Stage(joined, number, "B") if s is second else s for s in stages if s is not first]
        rows = [[c for c in r if c.stage != number or c.phase != "F"] for r in rows]
    return stages, rows


def _read_elsewhere(first: Stage, stages: Sequence[Stage]) -> bool:
    """Whether another stage reads what ``first`` makes, and so waits for no more than that."""
    given = set(first.fragment.outs)
    others = (s.fragment for s in stages if s.number != first.number)
    return any(v in given for part in others for v in (*part.ins, *part.after))


def _needs(stages: Sequence[Stage]) -> list[set[int]]:
    maker = {o: i for i, s in enumerate(stages) for o in s.fragment.made}
    return [
        {maker[v] for v in (*s.fragment.ins, *s.fragment.after) if v in maker and maker[v] != i}
        for i, s in enumerate(stages)
    ]


def _merged(stages: Sequence[Stage], rows: Sequence[Sequence[Cell]], mark: LoopMark, pipeline: Pipeline) -> LoopOrder:
    """One global order: by fronts where the schedule has them, else by the time at which each cell could start."""
    index = {(s.phase, s.number): i for i, s in enumerate(stages)}
    queues = [[(index[c.phase, c.stage], c.microbatch) for c in row] for row in rows]
    sizes = len(pipeline.submeshes), pipeline.chunks
    front = {(index[c.phase, c.stage], c.microbatch): mark.schedule.front(c, *sizes) for c in _cells(rows)}
    if None in front.values():
        return LoopOrder(tuple(stages), _by_start(stages, queues))
    position = {cell: (rank, n) for rank, queue in enumerate(queues) for n, cell in enumerate(queue)}
    cells = sorted(front, key=lambda cell: (front[cell], *position[cell]))
    fronts = tuple(f for f in map(front.get, cells) if f is not None)
    return LoopOrder(tuple(stages), tuple(cells), fronts, mark.schedule.ahead or 0)


def _by_start(stages: Sequence[Stage], rows: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """Merge per-submesh orders into one global order by the time each cell could start."""
    needs = _needs(stages)
    split = any(s.phase == "W" for s in stages)
    times = run(
        rows,
        needs=lambda cell: [(source, cell[1]) for source in needs[cell[0]]],
        cost=lambda cell: 1.0 + (stages[cell[0]].phase == "B" and not split),  # relative, for the order only
    )
    if len(times) < sum(map(len, rows)):
        raise internal_error("stages wait for each other although the table is valid")
    return tuple(times)
