"""One kernel per task, the opposite of task fusion.

The schedule has ordered the fragments before: the pieces of one run one after the other in its place.
"""

from __future__ import annotations

from dataclasses import replace

from multimesh import ir
from multimesh.core.submesh import Placement
from multimesh.ir import graph
from multimesh.passes.cutting.parts import Fragment, Parts, Pipeline, Segment, with_interfaces


def split_tasks(parts: Parts, *, segments: bool, loops: bool) -> Parts:
    """Return parts with one fragment for each task, in ``segments``, in ``loops`` or in both."""

    def cut(part: Segment | Pipeline) -> Segment | Pipeline:
        if isinstance(part, Pipeline):
            return _loop(part) if loops else part
        return replace(part, fragments=tuple(p for f in part.fragments for p in cut_by_tasks(f))) if segments else part

    return replace(parts, parts=tuple(map(cut, parts.parts)))


def _loop(pipeline: Pipeline) -> Pipeline:
    """Return the loop with one fragment for each task. A stage's merged forward and backward are separated as well."""
    turns = {(f.stage, f.phase) for f in pipeline.fragments}
    cut: list[list[Fragment]] = []
    for part in pipeline.fragments:
        joined = part.phase == "B" and (part.stage, "F") not in turns
        cut.append(
            [
                replace(f, phase="F") if joined and not any(op.backward for op in f.ops) else f
                for f in cut_by_tasks(part, joined)
            ]
        )
    first = [sum(map(len, cut[:i])) for i in range(len(cut))]
    cells = tuple((first[index] + k, m) for index, m in pipeline.cells for k in range(len(cut[index])))
    sizes = [len(cut[index]) for index, _ in pipeline.cells]
    fronts = pipeline.fronts and tuple(f for f, size in zip(pipeline.fronts, sizes, strict=True) for _ in range(size))
    return replace(pipeline, fragments=tuple(f for fragments in cut for f in fragments), cells=cells, fronts=fronts)


def cut_by_tasks(part: Fragment, joined: bool = False) -> tuple[Fragment, ...]:
    """Cut a fragment by tasks; with ``joined`` also between forward and backward operations.

    A piece only reads from earlier ones. Unmarked operations go with what they read, or else with their first reader;
    so do forward operations that the backward pass repeats.
    """
    kinds: list[tuple[Placement | None, bool]] = []  # task and pass of each piece; unmarked operations join any task
    piece_of: dict[ir.Value, int] = {}
    turned: set[ir.Value] = set()
    chosen: list[int | None] = []
    for op in part.ops:
        before = [piece_of[v] for v in op.needs if v in piece_of]
        back = joined and (op.backward or any(v in turned for v in op.reads))
        if back:
            turned.update(op.outs)
        repeated = part.phase == "B" and not joined and not op.backward
        if (op.task is None or repeated) and not before:
            chosen.append(None)
            continue
        at = max(before, default=0)
        while at < len(kinds) and not (kinds[at][1] == back and op.task in (None, kinds[at][0])):
            at += 1
        if at == len(kinds):
            kinds.append((op.task, back))
        piece_of.update(dict.fromkeys(op.outs, at))
        chosen.append(at)
    if len(kinds) < 2:
        return (part,)
    groups: list[list[ir.Op]] = [[] for _ in kinds]
    for op, at in zip(part.ops, graph.with_first_reader(part.ops, chosen, len(kinds) - 1), strict=True):
        groups[at].append(op)
    return with_interfaces([replace(part, ops=tuple(ops)) for ops in groups], set(part.outs))
