"""One global order of (fragment, microbatch), from the stages of a loop and its table, and what must hold of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from multimesh.core.grouping import group
from multimesh.errors import UsageError, internal_error
from multimesh.passes.cutting.parts import Pipeline, with_interfaces
from multimesh.passes.cutting.split_weight_gradients import find_adjacent
from multimesh.schedules.scheduler import run

_Turn = tuple[str | None, int | None, int]  # phase and stage; of what is late also the number of the fragment
_Cell = tuple[_Turn, int]  # of a microbatch


def join_forward_backward(pipeline: Pipeline) -> Pipeline:
    """Merge the last forward and the first backward fragment of a stage where the table runs them back to back.

    In 1f1b that is the last stage; its activations then never leave the program. The joined fragment counts as phase B.
    """
    fragments = pipeline.fragments
    present = {(part.phase, part.stage) for part in fragments}
    table = tuple(tuple(c for c in row if (c.phase, c.stage) in present) for row in pipeline.table)
    for number in sorted(find_adjacent(table, "F", "B")):
        first, second = ([f for f in fragments if (f.phase, f.stage) == (phase, number)] for phase in "FB")
        if any(v in first[-1].outs for f in fragments if f.stage != number for v in f.needs):
            continue  # another stage reads what the forward makes, and so waits for no more than that
        joined = replace(second[0], ops=first[-1].ops + second[0].ops)
        fragments = tuple(joined if f is second[0] else f for f in fragments if f is not first[-1])
    return replace(pipeline, fragments=with_interfaces(fragments, set(pipeline.results)), table=table)


def order_cells(pipeline: Pipeline) -> Pipeline:
    """Return the loop with its cells in one global order: that of the schedule's fronts, or else of start times.

    All fragments of a phase of a stage are one turn.
    """
    schedule, fragments = pipeline.loop.mark.schedule, pipeline.fragments
    turns = group(((f.phase, f.stage, i if f.phase == "L" else 0), i) for i, f in enumerate(fragments))
    table = [[c for c in row if (c.phase, c.stage, 0) in turns] for row in pipeline.table]
    queues: list[list[_Cell]] = [[((c.phase, c.stage, 0), c.microbatch) for c in row] for row in table]
    late: list[_Cell] = [(turn, k) for k in range(pipeline.loop.mark.count) for turn in turns if turn[0] == "L"]
    cells, sizes = itertools.chain(*table), (len(pipeline.submeshes), pipeline.chunks)
    front = dict(zip(itertools.chain(*queues), (schedule.front(c, *sizes) for c in cells), strict=True))
    maker = {o: turn for turn, numbers in turns.items() for i in numbers for o in fragments[i].values}
    read = {turn: (v for i in numbers for v in fragments[i].needs) for turn, numbers in turns.items()}
    needs = {turn: {maker[v] for v in values if v in maker} - {turn} for turn, values in read.items()}
    if None in front.values():
        order, fronts = _by_start(queues, late, needs), None
    else:
        for turn, k in late:
            front[turn, k] = max(front[other, k] or 0 for other in needs[turn])
        position = {cell: (rank, n) for rank, queue in enumerate([*queues, late]) for n, cell in enumerate(queue)}
        order = sorted(front, key=lambda cell: (front[cell], *position[cell]))
        fronts = tuple(front[cell] for cell in order for _ in turns[cell[0]])
    numbers = tuple((i, k) for turn, k in order for i in turns[turn])
    return replace(pipeline, cells=numbers, fronts=fronts, ahead=schedule.ahead or 0)


def _by_start(rows: Sequence[Sequence[_Cell]], late: Sequence[_Cell], needs: Mapping[_Turn, set[_Turn]]) -> list[_Cell]:
    """Merge the orders of submeshes, and late cells, into one global order by the time each cell could start."""
    split = {stage for phase, stage, _ in needs if phase == "W"}
    times = run(
        rows,
        needs=lambda cell: [(source, cell[1]) for source in needs[cell[0]]],
        cost=lambda cell: 1.0 + (cell[0][0] == "B" and cell[0][1] not in split),  # relative, for the order only
    )
    if len(times) < sum(map(len, rows)):
        raise internal_error("stages wait for each other although the table is valid")
    for turn, k in late:
        times[turn, k] = (max(times[source, k][1] for source in needs[turn]),) * 2
    return sorted(times, key=lambda cell: times[cell][0])


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
