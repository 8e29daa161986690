"""The schedule of a loop, and its table: for each submesh its cells in order. For ``auto`` costs are estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from multimesh import ir, schedules
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.core.submesh import describe
from multimesh.errors import UsageError
from multimesh.ir.flops import count_flops
from multimesh.passes.cutting.parts import Fragment, Pipeline
from multimesh.passes.cutting.split_weight_gradients import split_weights
from multimesh.schedules import Schedule, Table
from multimesh.schedules.costs import ESTIMATED, PHASES, StageCosts


def replace_schedules(program: ir.Program, schedules: Mapping[int, Schedule]) -> ir.Program:
    """Give loops other schedules, by the number of the loop: the search for ``auto`` tries one after the other."""
    changed = {loop: schedules[n] for n, loop in enumerate(program.loops) if n in schedules}
    return program.each_loop(
        lambda loop: replace(loop, mark=replace(loop.mark, schedule=changed.get(loop, loop.mark.schedule)))
    )


def schedule_cells(pipeline: Pipeline) -> Pipeline:
    """Return the loop with the table of its schedule. ``auto`` chooses one by given or estimated costs."""
    schedule = pipeline.loop.mark.schedule
    if not isinstance(schedule, schedules.Auto):
        return replace(pipeline, table=_table(pipeline))
    if schedule.costs is None:
        schedule = replace(schedule, costs=estimate_costs(pipeline))
        mark = replace(pipeline.loop.mark, schedule=schedule)
        pipeline = replace(pipeline, loop=replace(pipeline.loop, mark=mark))
    return replace(pipeline, table=_table(pipeline), choice=schedule.choose(*pipeline.shape))


def _table(pipeline: Pipeline) -> Table:
    """Return the schedule's table for the shape of the loop, validated."""
    mark = pipeline.loop.mark
    submeshes, chunks = len(pipeline.submeshes), pipeline.chunks
    placement = mark.schedule.placement(submeshes)
    row = " ".join(map(str, placement))
    if len(placement) > submeshes and not pipeline.complete:
        missing = set(range(submeshes * chunks)) - {part.stage for part in pipeline.fragments}
        raise UsageError(
            f"{mark.where}: schedule {mark.schedule} puts stages 0, 1, ... on submeshes {row}, but the "
            f"loop has nothing to run as stage {min(missing)}; "
            + (_meshes_again(pipeline, placement) or "give each stage a task of its own on that submesh")
        )
    if chunks == 1 < submeshes and mark.schedule.usual > 1:
        again = _meshes_again(pipeline, placement * mark.schedule.usual)
        _compat.warn_at(
            mark.where,
            f"schedule {mark.schedule} is for {mark.schedule.usual} stages on each submesh, and this loop has one, so "
            f"that it waits as long as without: {again or f'place stages 0, 1, ... on submeshes {row} {row} in turn'}, "
            "or take a schedule of one stage (1f1b, gpipe, zb-h1)",
        )
    try:
        table = mark.schedule.table(*pipeline.shape)
        schedules.validate(table, *pipeline.shape, placement)
    except UsageError as error:
        raise UsageError(f"{mark.where}: {error}{_again(pipeline)}") from None
    return table


def _meshes_again(pipeline: Pipeline, order: Sequence[int]) -> str:
    """Return the remedy for a function that `multimesh.pipeline` has cut: it cuts as many stages as it gets meshes."""
    if not any(op.task is not None and op.task.cuts for part in pipeline.fragments for op in part.ops):
        return ""
    letters = (chr(ord("a") + n) if n < 26 else f"m{n}" for n in order)
    return f"pass the meshes to multimesh.pipeline once for each stage: [{', '.join(letters)}]"


def _again(pipeline: Pipeline) -> str:
    """Describe the operation that brings a loop to a submesh a second time; some schedules have no place for that."""
    late = [part for part in pipeline.fragments if part.stage is not None and part.stage >= len(pipeline.submeshes)]
    if not late:
        return ""
    part = min(late, key=lambda p: (p.phase != "F", p.stage or 0))
    op = next((op for op in part.ops if op.task is not None), part.ops[0])
    who = f"of task {op.task.name!r}" if op.task else "outside tasks"
    return (
        f". {_compat.user_line(op.source) or 'A line that JAX did not record'}: submesh {describe(part.mesh)} gets a "
        f"stage more by this {op.prim.name} {who}"
    )


def estimate_costs(pipeline: Pipeline) -> StageCosts:
    """Return floating-point operations of F, B and W of every stage for a device, and bytes kept by a microbatch.

    They say how unequal stages are, not how long they take (see `ir.flops`). Until the end of B the bytes are what F
    made or got and B or W reads; from then on what W reads.
    """
    number = len(pipeline.submeshes) * pipeline.chunks
    parts = split_weights(pipeline.fragments, range(number), set(pipeline.results))
    computed = {v for part in parts for v in part.values}
    by = group(((part.stage or 0, part.phase or ""), part) for part in parts)
    times, nbytes, after = [], [], []
    for stage in range(number):
        of = {phase: by[stage, phase] for phase in PHASES}
        times.append((_total(of["F"]), _total(of["B"]), _total(of["W"])))
        there = {v for part in of["F"] for v in (*part.values, *part.ins)} & computed
        read = {v for phase in "BW" for part in of[phase] for v in part.ins}
        nbytes.append(float(sum(v.nbytes for v in there & read)))
        late = {v for part in of["W"] for v in part.ins} & computed
        after.append(float(sum(v.nbytes for v in late)))
    return StageCosts(tuple(times), (), tuple(nbytes), "", "bytes", ESTIMATED, tuple(after))


def _total(parts: Sequence[Fragment]) -> float:
    return sum(count_flops(part.ops) / part.mesh.size for part in parts)
