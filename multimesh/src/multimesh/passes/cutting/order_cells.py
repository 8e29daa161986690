"""One global order of (fragment, microbatch), from the stages of a loop and its table, and what must hold of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from multimesh.errors import UsageError, internal_error
from multimesh.passes.cutting.parts import Fragment, Pipeline, with_interfaces
from multimesh.passes.cutting.split_weight_gradients import find_adjacent
from multimesh.schedules.scheduler import run


def join_forward_backward(pipeline: Pipeline) -> Pipeline:
    """Merge the forward and the backward fragment of a stage where the table always runs them back to back.

    In 1f1b that is the last stage; its activations then never leave the program. The joined fragment counts as phase B.
    """
    fragments = pipeline.fragments
    present = {(part.phase, part.stage) for part in fragments}
    table = tuple(tuple(c for c in row if (c.phase, c.stage) in present) for row in pipeline.table)
    for number in sorted(find_adjacent(table, "F", "B")):
        first, second = (next(f for f in fragments if (f.phase, f.stage) == (phase, number)) for phase in "FB")
        if not set(first.outs).isdisjoint(v for f in fragments if f.stage != number for v in f.needs):
            continue  # another stage reads what the forward makes, and so waits for no more than that
        joined = replace(second, ops=first.ops + second.ops)
        fragments = tuple(joined if f is second else f for f in fragments if f is not first)
        table = tuple(tuple(c for c in row if c.stage != number or c.phase != "F") for row in table)
    return replace(pipeline, fragments=with_interfaces(fragments, set(pipeline.results)), table=table)


def order_cells(pipeline: Pipeline) -> Pipeline:
    """Return the loop with its cells in one global order: that of the schedule's fronts, or else of start times."""
    schedule, fragments = pipeline.loop.mark.schedule, pipeline.fragments
    index = {(f.phase, f.stage): i for i, f in enumerate(fragments)}
    table = [[c for c in row if (c.phase, c.stage) in index] for row in pipeline.table]
    queues = [[(index[c.phase, c.stage], c.microbatch) for c in row] for row in table]
    late = [(i, k) for k in range(pipeline.loop.mark.count) for i, f in enumerate(fragments) if f.phase == "L"]
    sizes = len(pipeline.submeshes), pipeline.chunks
    front = {(index[c.phase, c.stage], c.microbatch): schedule.front(c, *sizes) for c in itertools.chain(*table)}
    if None in front.values():
        return replace(pipeline, cells=_by_start(fragments, queues, late))
    needs = _needs(fragments)
    for i, k in late:
        front[i, k] = max(front[j, k] for j in needs[i])
    position = {cell: (rank, n) for rank, queue in enumerate([*queues, late]) for n, cell in enumerate(queue)}
    cells = tuple(sorted(front, key=lambda cell: (front[cell], *position[cell])))
    return replace(pipeline, cells=cells, fronts=tuple(map(front.__getitem__, cells)), ahead=schedule.ahead or 0)


def _needs(fragments: Sequence[Fragment]) -> list[set[int]]:
    """Return for each fragment the numbers of the fragments whose values it reads."""
    maker = {o: i for i, f in enumerate(fragments) for o in f.values}
    return [{maker[v] for v in f.needs if v in maker} - {i} for i, f in enumerate(fragments)]


def _by_start(
    fragments: Sequence[Fragment], rows: Sequence[Sequence[tuple[int, int]]], late: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Merge the orders of submeshes, and late cells, into one global order by the time each cell could start."""
    needs = _needs(fragments)
    split = {f.stage for f in fragments if f.phase == "W"}
    lasts = [1.0 + (f.phase == "B" and f.stage not in split) for f in fragments]  # relative, for the order only
    times = run(
        rows,
        needs=lambda cell: [(source, cell[1]) for source in needs[cell[0]]],
        cost=lambda cell: lasts[cell[0]],
    )
    if len(times) < sum(map(len, rows)):
        raise internal_error("stages wait for each other although the table is valid")
    for i, k in late:
        times[i, k] = (max(times[j, k][1] for j in needs[i]),) * 2
    return tuple(sorted(times, key=lambda cell: times[cell][0]))


def check_states(pipeline: Pipeline) -> Pipeline:
    """Refuse an order in which a cell reads a state before the previous microbatch has left it. Name both cells."""
    loop, fragments = pipeline.loop, pipeline.fragments
    at = {cell: n for n, cell in enumerate(pipeline.cells)}
    for state, carry in loop.carries.items():
        maker = next(i for i, f in enumerate(fragments) if carry.leaf in f.values)
        for reader, part in enumerate(fragments):
            late = [k for k in range(1, loop.mark.count) if at[maker, k - 1] >= at[reader, k]]
            if state in part.ins and late:
                writer, reading = (f"{f.phase}{f.stage} ({f.task})" for f in (fragments[maker], part))
                raise UsageError(
                    f"{loop.mark.where}: {loop.mark.schedule} runs {reading} of microbatch {late[0]}, which reads the "
                    f"state in carry=, before {writer} of microbatch {late[0] - 1} has updated it; update the state in "
                    "the stage and phase that first reads it, or choose another schedule"
                )
    return pipeline
