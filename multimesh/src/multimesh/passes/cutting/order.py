"""Makes one global order of (fragment, microbatch) from the stages of a loop and its table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from multimesh.errors import UsageError, internal_error
from multimesh.passes.cutting.fragment import Fragment, with_interfaces
from multimesh.passes.cutting.parts import Pipeline
from multimesh.passes.cutting.weights import split_weights
from multimesh.schedules import Cell
from multimesh.schedules.scheduler import run


def with_weights_apart(pipeline: Pipeline) -> Pipeline:
    """Split the backward fragments of those stages whose B and W the table has apart.

    A first stage that always runs them back to back is not split; where others wait for B, its result leaves before W.
    """
    apart = {c.stage for c in itertools.chain(*pipeline.table) if c.phase == "W"}
    apart -= _back_to_back(pipeline.table, "B", "W") & {0}
    return replace(pipeline, fragments=split_weights(pipeline.fragments, apart, set(pipeline.results)))


def with_turns_joined(pipeline: Pipeline) -> Pipeline:
    """Make one fragment of forward and backward of a stage where the table always runs them back to back.

    In 1f1b that is the last stage; its activations then never leave the program. The joined fragment counts as phase B.
    """
    fragments = pipeline.fragments
    present = {(part.phase, part.stage) for part in fragments}
    table = tuple(tuple(c for c in row if (c.phase, c.stage) in present) for row in pipeline.table)
    for number in sorted(_back_to_back(table, "F", "B")):
        first, second = (next(f for f in fragments if (f.phase, f.stage) == (phase, number)) for phase in "FB")
        if not set(first.outs).isdisjoint(v for f in fragments if f.stage != number for v in f.needs):
            continue  # another stage reads what the forward makes, and so waits for no more than that
        joined = replace(second, ops=first.ops + second.ops)
        fragments = tuple(joined if f is second else f for f in fragments if f is not first)
        table = tuple(tuple(c for c in row if c.stage != number or c.phase != "F") for row in table)
    return replace(pipeline, fragments=with_interfaces(fragments, set(pipeline.results)), table=table)


def with_order(pipeline: Pipeline) -> Pipeline:
    """One global order: by fronts where the schedule has them, else by the time at which each cell could start.

    What is late in a microbatch runs when what it reads is there.
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


def _back_to_back(table: Sequence[Sequence[Cell]], first: str, second: str) -> set[int]:
    """Stages whose ``second`` phase always follows ``first`` at once."""
    pairs = {pair for row in table for pair in itertools.pairwise(row)}
    cells = [c for c in itertools.chain(*table) if c.phase == first]
    apart = {c.stage for c in cells if (c, Cell(second, c.stage, c.microbatch)) not in pairs}
    return {c.stage for c in cells} - apart


def _needs(fragments: Sequence[Fragment]) -> list[set[int]]:
    """Of each fragment those that it waits for."""
    maker = {o: i for i, f in enumerate(fragments) for o in f.made}
    return [{maker[v] for v in f.needs if v in maker} - {i} for i, f in enumerate(fragments)]


def _by_start(
    fragments: Sequence[Fragment], rows: Sequence[Sequence[tuple[int, int]]], late: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Merge per-submesh orders, and what is late, into one global order by the time each cell could start."""
    needs = _needs(fragments)
    split = any(f.phase == "W" for f in fragments)
    times = run(
        rows,
        needs=lambda cell: [(source, cell[1]) for source in needs[cell[0]]],
        cost=lambda cell: 1.0 + (fragments[cell[0]].phase == "B" and not split),  # relative, for the order only
    )
    if len(times) < sum(map(len, rows)):
        raise internal_error("stages wait for each other although the table is valid")
    for i, k in late:
        times[i, k] = (max(times[j, k][1] for j in needs[i]),) * 2
    return tuple(sorted(times, key=lambda cell: times[cell][0]))


def check_states(pipeline: Pipeline) -> Pipeline:
    """Refuse an order in which a cell reads a state before the microbatch before it has left one; name both cells."""
    loop, fragments = pipeline.loop, pipeline.fragments
    at = {cell: n for n, cell in enumerate(pipeline.cells)}
    for state, carry in loop.carries.items():
        maker = next(i for i, f in enumerate(fragments) if carry.leaf in f.made)
        for reader, part in enumerate(fragments):
            late = [k for k in range(1, loop.mark.count) if at[maker, k - 1] >= at[reader, k]]
            if state in part.ins and late:
                made, read = (f"{f.phase}{f.stage} ({f.task})" for f in (fragments[maker], part))
                raise UsageError(
                    f"{loop.mark.where}: {loop.mark.schedule} runs {read} of microbatch {late[0]}, which reads the "
                    f"state in carry=, before {made} of microbatch {late[0] - 1} has updated it; update the state in "
                    "the stage and phase that first reads it, or choose another schedule"
                )
    return pipeline
