"""Kernels for parts of a fragment: for each part of a stage, or for each task, the opposite of task fusion."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from multimesh import ir
from multimesh.core.submesh import Placement
from multimesh.ir import graph
from multimesh.passes.cutting.parts import Fragment, Parts, Pipeline, with_interfaces


def split_tasks(parts: Parts, *, segments: bool, loops: bool) -> Parts:
    """Return parts with one fragment for each task, in ``segments``, in ``loops`` or in both.

    In other loops each part of a stage that `multimesh.pipeline` made has a fragment.
    """
    split = []
    for part in parts.parts:
        by: Callable[[Placement], Hashable] | None = (lambda task: task) if segments else None
        if isinstance(part, Pipeline):
            by = (lambda task: task) if loops else (lambda task: task.part)
        if by is not None:
            part = replace(part, fragments=tuple(p for f in part.fragments for p in cut_by_tasks(f, by)))
        split.append(part)
    return replace(parts, parts=tuple(split))


def cut_by_tasks(part: Fragment, by: Callable[[Placement], Hashable]) -> tuple[Fragment, ...]:
    """Cut a fragment into pieces of operations whose tasks are equal ``by`` a function.

    A piece only reads from earlier ones. Unmarked operations go with what they read, or else with their first reader;
    so do forward operations that the backward pass repeats.
    """
    kinds: list[Hashable] = []  # of each piece
    piece_of: dict[ir.Value, int] = {}
    chosen: list[int | None] = []
    for op in part.ops:
        before = [piece_of[v] for v in op.needs if v in piece_of]
        repeated = part.phase == "B" and not op.backward
        if (op.task is None or repeated) and not before:
            chosen.append(None)
            continue
        at = max(before, default=0)
        while op.task is not None and at < len(kinds) and kinds[at] != by(op.task):
            at += 1
        if at == len(kinds):
            kinds.append(op.task and by(op.task))
        piece_of.update(dict.fromkeys(op.outs, at))
        chosen.append(at)
    if len(kinds) < 2:
        return (part,)
    groups: list[list[ir.Op]] = [[] for _ in kinds]
    for op, at in zip(part.ops, graph.with_first_reader(part.ops, chosen, len(kinds) - 1), strict=True):
        groups[at].append(op)
    return with_interfaces([replace(part, ops=tuple(ops)) for ops in groups], set(part.outs))
