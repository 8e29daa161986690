"""One global order of (fragment, microbatch), from the stages of a loop and its table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from multimesh.errors import internal_error
from multimesh.passes.cutting.parts import Fragment, Pipeline
from multimesh.schedules.scheduler import run


def with_order(pipeline: Pipeline) -> Pipeline:
    """Return the loop with one global order: by fronts where the schedule has them, else by each cell's start time.

    Late cells of a microbatch run when their operands are there.
    """
    schedule, fragments = pipeline.loop.mark.schedule, pipeline.fragments
    index = {(f.phase, f.stage): i for i, f in enumerate(fragments)}
    queues = [[(index[c.phase, c.stage], c.microbatch) for c in row] for row in pipeline.table]
    late = [(i, k) for k in range(pipeline.loop.mark.count) for i, f in enumerate(fragments) if f.phase == "L"]
    sizes = len(pipeline.submeshes), pipeline.chunks
    front = {
        (index[c.phase, c.stage], c.microbatch): schedule.front(c, *sizes) for c in itertools.chain(*pipeline.table)
    }
    if None in front.values():
        return replace(pipeline, cells=_by_start(fragments, queues, late))
    needs = _needs(fragments)
    for i, k in late:
        front[i, k] = max(front[j, k] for j in needs[i])
    position = {cell: (rank, n) for rank, queue in enumerate([*queues, late]) for n, cell in enumerate(queue)}
    cells = tuple(sorted(front, key=lambda cell: (front[cell], *position[cell])))
    return replace(pipeline, cells=cells, fronts=tuple(map(front.__getitem__, cells)), ahead=schedule.ahead or 0)


def _needs(fragments: Sequence[Fragment]) -> list[set[int]]:
    """Return for each fragment the numbers of those whose values it uses."""
    maker = {o: i for i, f in enumerate(fragments) for o in f.made}
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
