"""Rules of an `ir.Program`, and of its parts once it is cut."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from multimesh import ir
from multimesh.core.submesh import describe
from multimesh.ir.program import all_ops
from multimesh.passes.cutting.parts import Parts, Pipeline
from multimesh.passes.verifying.faults import Fault, in_order, kind, show


def values_are_made_once_then_read(program: ir.Program) -> Iterator[Fault]:
    """Check that each value has one producer, and that operations, loops and results read only earlier values."""
    values = {*program.inputs, *program.consts}
    for item in program.items:
        if isinstance(item, ir.Op):
            yield from in_order([item], values, "outside of loops")
            continue
        for v in item.reads:
            if v not in values:
                yield Fault(f"a loop reads {show(v)} before anything makes it", item.mark.where)
        inner = {*item.consts, *item.slices, *item.linked, *item.carries, *program.consts}
        yield from in_order(item.ops, inner, "in a loop")
        values.update(item.outs)
    for v in ir.values(program.outputs):
        if v not in values:
            yield Fault(f"result {show(v)} is made by nothing")


def edges_are_of_one_type(program: ir.Program) -> Iterator[Fault]:
    """Check that both sides of a loop's edge have one type; stacks have one dimension more."""
    for loop in program.loops:
        count = (loop.mark.count,)
        pairs: list[tuple[Any, Any, tuple[int, ...]]] = [
            *((i, o, ()) for i, o in (*loop.consts.items(), *loop.linked.items())),
            *((s.leaf, s.out, ()) for s in loop.sums if s.leaf is not None),
            *((s.init, s.out, ()) for s in loop.sums if s.init is not None and not s.over),
            *((atom, c.out, ()) for i, c in loop.carries.items() for atom in (i, c.leaf, c.init) if atom is not None),
            *((i, o, count) for i, o in loop.slices.items()),
            *((i, o, count) for o, i in loop.stacks.items()),
        ]
        for inner, outer, rows in pairs:
            shape, dtype = kind(inner)
            if kind(outer) != ((*rows, *shape), dtype):
                yield Fault(f"{show(inner)} inside a loop is {show(outer)} outside", loop.mark.where)


def tasks_are_at_home(program: ir.Program) -> Iterator[Fault]:
    """Check that an operation of a task is on the task's submesh. ``recompute_transfers`` repeats some elsewhere."""
    for op in all_ops(program):
        if op.mesh is not None and op.task is not None and op.task.mesh != op.mesh:
            yield Fault(f"{op} of task {op.task.name!r} is on {describe(op.mesh)}", op.source)


def leaves_are_given(parts: Parts) -> Iterator[Fault]:
    """Check that every sum, stack and carry of an iteration is given by one of its fragments."""
    for part in parts.parts:
        if isinstance(part, Pipeline):
            outs = {v for fragment in part.fragments for v in fragment.outs}
            for leaf in part.loop.leaves:
                if leaf not in outs:
                    yield Fault(f"no fragment gives {leaf}, a result of an iteration", part.loop.mark.where)


def cells_run_once(parts: Parts) -> Iterator[Fault]:
    """Check that an ordered loop runs each of its fragments once for each microbatch."""
    for part in parts.parts:
        if isinstance(part, Pipeline) and part.cells:
            times = collections.Counter(part.cells)
            for n, f in enumerate(part.fragments):
                for k in range(part.loop.mark.count):
                    if times.pop((n, k), 0) != 1:
                        yield Fault(f"{f.phase}{f.stage} does not run once for microbatch {k}")
            yield from (Fault(f"a cell {cell} of no fragment or microbatch") for cell in times)
