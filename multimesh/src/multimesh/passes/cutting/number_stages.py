"""The stages of a loop: at most one forward and one backward fragment each.

The schedule says on which submesh a stage is. A forward fragment gets the first stage of its submesh that is not before
the stages it reads from, a backward fragment likewise from the last stage down. Several stages of a submesh one after
another, as at the turn of a V, share its tasks equally. A stage then only reads from earlier ones (later ones, in the
backward), as tables assume. A stage that a loop does not have, as the forward of a linear last stage, has no fragment.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core.grouping import group
from multimesh.core.submesh import Placement
from multimesh.ir import graph
from multimesh.passes.cutting.parts import Fragment, Pipeline, with_interfaces
from multimesh.passes.placing.note_routes import position
from multimesh.passes.placing.owners import find_task_inputs
from multimesh.schedules import Auto, Schedule
from multimesh.schedules.published import VShaped


def number_stages(pipeline: Pipeline) -> Pipeline:
    """Number the stages of a loop. If its tasks go down and up the submeshes, ``auto`` takes the V of `VShaped`.

    They must go it once: no published table goes down and up twice.
    """
    schedule = pipeline.loop.mark.schedule
    straight = number_by_schedule(pipeline, schedule)
    if isinstance(schedule, Auto) and not schedule.route and (count := len(straight.submeshes)) > 1:
        turned = number_by_schedule(pipeline, replace(schedule, route=VShaped().placement(count)))
        shorter = turned.chunks < straight.chunks or not straight.complete
        if turned.complete and turned.chunks == VShaped.chunks and shorter:
            return turned
    return straight


def number_by_schedule(pipeline: Pipeline, schedule: Schedule) -> Pipeline:
    """Number the stages of a loop by its schedule, and make one fragment of each stage and phase."""
    forward = [f for f in pipeline.fragments if f.phase == "F"]
    backward = [f for f in pipeline.fragments if f.phase == "B"]
    meshes = dict.fromkeys(f.mesh for f in (*forward, *reversed(backward)))
    submeshes = tuple(dict.fromkeys((*(mesh for mesh in pipeline.loop.submeshes if mesh in meshes), *meshes)))
    route = [submeshes[rank] for rank in schedule.placement(len(submeshes))]
    ahead, behind = _along(forward, route), _along(backward, route[::-1])
    turned = [at for at, ops in behind.items() if any(op.task is not None for op in ops)]
    total = (max([0, *ahead, *turned]) // max(1, len(route)) + 1) * len(route)
    behind, late = _without_late(behind, total)
    groups: dict[tuple[str, int], Sequence[ir.Op]] = {}
    starts = [s for s in range(total) if s % len(route) == 0 or route[s % len(route)] != route[s % len(route) - 1]]
    for start, size in ((start, end - start) for start, end in itertools.pairwise([*starts, total])):
        end = total - start - size  # of the backward pass: its position from behind
        ops, back = ahead.get(start, []), behind.get(end, [])
        tasks = dict.fromkeys(op.task for op in (*ops, *reversed(back)) if op.task is not None)
        share = {task: n * size // len(tasks) for n, task in enumerate(tasks)}
        groups |= {("F", start + n): part for n, part in _group_by_stage(ops, share).items()}
        share = {task: size - 1 - n for task, n in share.items()}
        groups |= {("B", start + size - 1 - n): part for n, part in _group_by_stage(back, share).items()}

    def level(phase: str, stage: int) -> int:
        return stage if phase == "F" else 2 * total - 1 - stage

    ordered = sorted(groups.items(), key=lambda item: level(*item[0]))
    fragments = [
        Fragment(route[stage % len(route)], phase, level(phase, stage), tuple(ops), stage=stage)
        for (phase, stage), ops in ordered
    ]
    for at, late_ops in late.items():
        mesh = route[::-1][at % len(route)]
        fragments.append(Fragment(mesh, "L", 4 * total + at, tuple(late_ops), stage=route.index(mesh)))
    return replace(
        pipeline,
        loop=replace(pipeline.loop, mark=replace(pipeline.loop.mark, schedule=schedule)),
        fragments=with_interfaces(fragments, set(pipeline.results)),
        submeshes=submeshes,
        chunks=total // max(1, len(submeshes)),
    )


def _along(parts: Sequence[Fragment], route: Sequence[Mesh]) -> dict[int, list[ir.Op]]:
    """Group operations by position on the route: the first that is not before their producers."""
    maker = {o: part for part in parts for o in part.values}
    positions: dict[int, int] = {}
    groups: dict[int, list[ir.Op]] = collections.defaultdict(list)
    for part in parts:
        before = {id(maker[v]) for v in part.needs if v in maker} - {id(part)}
        at = positions[id(part)] = position(route, part.mesh, max((positions[b] for b in before), default=0))
        groups[at] += part.ops
    return groups


def _without_late(behind: dict[int, list[ir.Op]], total: int) -> tuple[dict[int, list[ir.Op]], dict[int, list[ir.Op]]]:
    """Split off backward operations beyond position ``total``: outside of tasks, over what several stages make."""
    if max(behind, default=0) < total:
        return behind, {}
    on = {o: op.mesh for ops in behind.values() for op in ops for o in op.outs}
    leading = find_task_inputs(op for at in sorted(behind) for op in behind[at])
    moved: set[ir.Value] = set()
    early: dict[int, list[ir.Op]] = {}
    late: dict[int, list[ir.Op]] = {}
    for at in sorted(behind):
        for op in behind[at]:
            free = op.task is None and leading.isdisjoint(op.outs)
            awaited = (*op.reads, *op.after)
            if at >= total or (free and any(v in moved or on.get(v, op.mesh) != op.mesh for v in awaited)):
                moved.update(op.outs)
                late.setdefault(at, []).append(op)
            else:
                early.setdefault(at, []).append(op)
    return early, late


def _group_by_stage(ops: Sequence[ir.Op], share: dict[Placement, int]) -> dict[int, list[ir.Op]]:
    """Group operations by stage, where several stages are on one submesh. ``share`` has the stage of each task."""
    number: dict[ir.Value, int] = {}
    chosen: list[int | None] = []
    for op in ops:
        before = [number[v] for v in op.needs if v in number]
        task_stage = [] if op.task is None else [share[op.task]]
        at = max([*before, *task_stage], default=None)
        chosen.append(at)
        if at is not None:
            number.update(dict.fromkeys(op.outs, at))
    return group(zip(graph.with_first_reader(ops, chosen, 0), ops, strict=True))
