"""From fragments of a loop and its schedule to one global order of (fragment, microbatch)."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from multimesh import ir
from multimesh.errors import MultiMeshError
from multimesh.marks import LoopMark
from multimesh.passes.fragment import Fragment, join
from multimesh.schedules import Cell, GPipe, Schedule

_COST = {"F": 1.0, "B": 2.0}  # relative, for the order of dispatch only


@dataclass(frozen=True, eq=False)
class Stage:
    """A fragment of a loop with the stage it belongs to."""

    fragment: Fragment
    number: int
    phase: str


@dataclass(frozen=True, eq=False)
class LoopOrder:
    """Stages of a loop and the order in which (index of stage, microbatch) are dispatched."""

    stages: tuple[Stage, ...]
    cells: tuple[tuple[int, int], ...]


def order(fragments: Sequence[Fragment], mark: LoopMark, results: set[ir.Value]) -> LoopOrder:
    """Order a loop: by its schedule's table when it is a plain pipeline, else greedily within the schedule's limits.

    Raises
    ------
    MultiMeshError
        When the stages are not the number asked for, or a table can't be run.
    """
    forward = [f for f in fragments if f.phase == "F"]
    backward = [f for f in fragments if f.phase == "B"]
    ranks = list(dict.fromkeys(f.mesh for f in forward or reversed(backward)))
    number = len(forward or backward)
    if mark.num_stages is not None and number != mark.num_stages:
        raise MultiMeshError(f"{mark.where}: num_stages={mark.num_stages}, but the loop has {number} stages")
    if not _is_pipeline(forward, backward, ranks):
        return _greedy(fragments, ranks, mark)
    stages = [Stage(f, s, "F") for s, f in enumerate(forward)]
    stages += [Stage(f, number - 1 - s, "B") for s, f in enumerate(backward)]
    if not forward:
        return LoopOrder(tuple(stages), _simulate(stages, _rows_in_order(stages, ranks, mark.count), mark.where))
    table = mark.schedule.table(len(ranks), number // len(ranks), mark.count, bool(backward))
    rows = [[cell for cell in row if cell.phase != "W"] for row in table]  # B makes the weight gradients too
    stages, rows = _join_turns(stages, rows, results)
    return LoopOrder(tuple(stages), _simulate(stages, rows, mark.where))


def _is_pipeline(forward: Sequence[Fragment], backward: Sequence[Fragment], ranks: Sequence[Mesh]) -> bool:
    """Whether stage ``s`` is on submesh ``s % p``, forwards, and the backwards retrace it."""
    path = [ranks.index(f.mesh) for f in forward] if forward else [ranks.index(f.mesh) for f in reversed(backward)]
    if len(path) % len(ranks) or path != [s % len(ranks) for s in range(len(path))]:
        return False
    if not forward or not backward:
        return True
    return [f.mesh for f in backward] == [f.mesh for f in reversed(forward)]


def _rows_in_order(stages: Sequence[Stage], ranks: Sequence[Mesh], count: int) -> list[list[Cell]]:
    return [
        [Cell(s.phase, s.number, i) for i in range(count) for s in stages if s.fragment.mesh == mesh] for mesh in ranks
    ]


def _join_turns(
    stages: list[Stage], rows: list[list[Cell]], results: set[ir.Value]
) -> tuple[list[Stage], list[list[Cell]]]:
    """Make one program of forward and backward of a stage where the schedule always runs them back to back.

    In 1f1b that is the last stage; its activations then never leave the program. The joined program counts as phase B.
    """
    for number in {s.number for s in stages}:
        pair = [next((s for s in stages if s.number == number and s.phase == phase), None) for phase in "FB"]
        if None in pair:
            continue
        first, second = pair[0], pair[1]
        row = next(r for r in rows if any(c.stage == number for c in r))
        following = dict(itertools.pairwise(row))
        forwards = [c for c in row if c.stage == number and c.phase == "F"]
        if any(following.get(c) != Cell("B", number, c.microbatch) for c in forwards):
            continue
        if first is None or second is None or _passes_through_others(first.fragment, second.fragment, stages):
            continue
        joined = join(first.fragment, second.fragment, [s.fragment for s in stages], results)
        stages = [Stage(joined, number, "B") if s is second else s for s in stages if s is not first]
        rows = [[c for c in r if c.stage != number or c.phase != "F"] for r in rows]
    return stages, rows


def _passes_through_others(first: Fragment, second: Fragment, stages: Sequence[Stage]) -> bool:
    """Whether something that ``second`` needs was made elsewhere from what ``first`` gives."""
    tainted = set(first.outs)
    for stage in sorted(stages, key=lambda s: s.fragment.level):
        part = stage.fragment
        if part is not first and part is not second and any(v in tainted for v in part.ins):
            tainted.update(part.outs)
    return any(v in tainted and v not in first.outs for v in (*second.ins, *second.after))


def _needs(stages: Sequence[Stage]) -> list[set[int]]:
    maker = {o: i for i, s in enumerate(stages) for o in s.fragment.made}
    return [
        {maker[v] for v in (*s.fragment.ins, *s.fragment.after) if v in maker and maker[v] != i}
        for i, s in enumerate(stages)
    ]


def _simulate(stages: Sequence[Stage], rows: Sequence[Sequence[Cell]], where: str) -> tuple[tuple[int, int], ...]:
    """Merge per-submesh orders into one global order by the time each cell could start."""
    needs = _needs(stages)
    index = {(s.phase, s.number): i for i, s in enumerate(stages)}
    queues = [collections.deque((index[c.phase, c.stage], c.microbatch) for c in row) for row in rows]
    clock = [0.0] * len(queues)
    finished: dict[tuple[int, int], float] = {}
    cells: list[tuple[int, int]] = []
    while any(queues):
        best: tuple[float, int] | None = None
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            stage, microbatch = queue[0]
            if any((n, microbatch) not in finished for n in needs[stage]):
                continue
            start = max([clock[rank], *(finished[n, microbatch] for n in needs[stage])])
            if best is None or start < best[0]:
                best = (start, rank)
        if best is None:
            stuck = [f"{stages[q[0][0]].phase}{stages[q[0][0]].number} of microbatch {q[0][1]}" for q in queues if q]
            raise MultiMeshError(f"{where}: the schedule deadlocks: {', '.join(stuck)} wait for each other")
        start, rank = best
        cell = queues[rank].popleft()
        clock[rank] = finished[cell] = start + _COST[stages[cell[0]].phase]
        cells.append(cell)
    return tuple(cells)


def _limit(schedule: Schedule, submeshes: int, rank: int) -> int | None:
    return None if isinstance(schedule, GPipe) else submeshes - rank


def _greedy(fragments: Sequence[Fragment], ranks: Sequence[Mesh], mark: LoopMark) -> LoopOrder:
    """List scheduling for loops of any shape: backwards first, new microbatches only within the schedule's limit."""
    stages = [Stage(f, i, f.phase or "F") for i, f in enumerate(fragments)]
    needs = _needs(stages)
    rank_of = [ranks.index(f.mesh) if f.mesh in ranks else len(ranks) for f in fragments]
    lanes: dict[int, list[int]] = collections.defaultdict(list)
    for i, rank in enumerate(rank_of):
        lanes[rank].append(i)
    limits = {rank: _limit(mark.schedule, len(ranks), min(rank, len(ranks) - 1)) for rank in lanes}
    fill = isinstance(mark.schedule, GPipe)  # all forwards before any backward
    clock = dict.fromkeys(lanes, 0.0)
    finished: dict[tuple[int, int], float] = {}
    position = [0] * len(stages)  # microbatches of each stage run in order
    cells: list[tuple[int, int]] = []

    def allowed(i: int, lane: list[int], limit: int | None) -> bool:
        if fill and stages[i].phase == "B":
            return all(position[j] == mark.count for j in lane if stages[j].phase == "F")
        turns = [j for j in lane if stages[j].phase == "B"]
        if stages[i].phase != "F" or limit is None or not turns:
            return True
        return position[i] - min(position[j] for j in turns) < limit

    while len(cells) < len(stages) * mark.count:
        best: tuple[tuple[float, int, int, int], int] | None = None
        for strict in (True, False):  # limits give way rather than deadlock
            for rank, lane in lanes.items():
                for i in lane:
                    k = position[i]
                    if k == mark.count or any((n, k) not in finished for n in needs[i]):
                        continue
                    if strict and not allowed(i, lane, limits[rank]):
                        continue
                    start = max([clock[rank], *(finished[n, k] for n in needs[i])])
                    key = (start, stages[i].phase != "B", -fragments[i].level, rank)
                    if best is None or key < best[0]:
                        best = (key, i)
            if best is not None:
                break
        if best is None:
            raise AssertionError("fragments of a loop wait for each other")
        (start, *_), i = best
        clock[rank_of[i]] = finished[i, position[i]] = start + _COST[stages[i].phase]
        cells.append((i, position[i]))
        position[i] += 1
    return LoopOrder(tuple(stages), tuple(cells))
