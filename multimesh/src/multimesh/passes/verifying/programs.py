"""Rules of an `ir.Program`: from the first pass on, once sums have one leaf each, and once everything is placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core.submesh import describe
from multimesh.ir.program import all_ops
from multimesh.passes.verifying.faults import Fault, in_order, kind, show, twice


def assigned_once(program: ir.Program) -> Iterator[Fault]:
    """Check that every value has one producer: an input, a constant, an operation, a loop, or the edge of a body."""

    def makers() -> Iterator[tuple[tuple[ir.Value, ...], object]]:
        yield (*program.inputs, *program.consts), None
        for item in program.items:
            yield item.outs, item.source
            if isinstance(item, ir.Loop):
                yield _arguments(item), item.source
                yield from ((op.outs, op.source) for op in item.ops)

    return twice(makers())


def made_before_read(program: ir.Program) -> Iterator[Fault]:
    """Check that operations, loops and results read only earlier values, of their body or outside of loops."""
    values = {*program.inputs, *program.consts}
    for item in program.items:
        if isinstance(item, ir.Op):
            yield from in_order([item], values, "outside of loops")
        else:
            for v in item.reads:
                if v not in values:
                    yield Fault(f"a loop reads {show(v)} before anything makes it", item.mark.where)
            inner = {*_arguments(item), *program.consts}
            yield from in_order(item.ops, inner, "in a loop")
        values.update(item.outs)
    for v in ir.values(program.outputs):
        if v not in values:
            yield Fault(f"result {show(v)} is made by nothing")


def leaves_are_made(program: ir.Program) -> Iterator[Fault]:
    """Check that an operation of the iteration makes each value that leaves it, and so gives the value a submesh."""
    for loop in program.loops:
        values = {o for op in loop.ops for o in op.outs}
        for verb, leaf in _leaves(loop):
            if leaf not in values:
                yield Fault(f"no operation of the iteration makes {leaf}, which it {verb}", loop.mark.where)


def rows_are_made(program: ir.Program) -> Iterator[Fault]:
    """Check that the rows that a loop reads come from an earlier loop of as many iterations."""
    rows: dict[ir.Value, int] = {}
    for loop in program.loops:
        for inner, row in loop.linked.items():
            if rows.get(row) != loop.mark.count:
                yield Fault(f"{show(inner)} is row {row} of an earlier loop, which does not make it", loop.mark.where)
        rows |= {o: loop.mark.count for op in loop.ops for o in op.outs}


def edges_are_of_one_type(program: ir.Program) -> Iterator[Fault]:
    """Check that both sides of a loop's edge have one type; stacks have one dimension more."""
    for loop in program.loops:
        pairs: list[tuple[Any, Any, tuple[int, ...]]] = [
            *((i, o, ()) for i, o in loop.consts.items()),
            *((i, o, ()) for i, o in loop.linked.items()),
        ]
        pairs += [(s.leaf, s.out, ()) for s in loop.sums if s.leaf is not None]
        pairs += [(s.init, s.out, ()) for s in loop.sums if s.init is not None and not s.over]
        for inner, c in loop.carries.items():
            pairs += [(atom, c.out, ()) for atom in (inner, c.leaf, c.init) if atom is not None]
        stacks = [(i, o, (loop.mark.count,)) for o, i in loop.stacks.items()]
        pairs += [*((i, o, (loop.mark.count,)) for i, o in loop.slices.items()), *stacks]
        for inner, outer, count in pairs:
            shape, dtype = kind(inner)
            if kind(outer) != ((*count, *shape), dtype):
                yield Fault(f"{show(inner)} inside a loop is {show(outer)} outside", loop.mark.where)
        for inner, outer, _ in stacks:
            if getattr(inner.aval, "weak_type", False) != getattr(outer.aval, "weak_type", False):
                yield Fault(f"{show(inner)} and its stack {show(outer)} differ in weak type", loop.mark.where)


def placed(program: ir.Program) -> Iterator[Fault]:
    """Check that every operation has a submesh."""
    return (Fault(f"{op} has no submesh", op.source) for op in all_ops(program) if op.mesh is None)


def tasks_are_at_home(program: ir.Program) -> Iterator[Fault]:
    """Check that an operation of a task is on the task's submesh. ``recompute_transfers`` repeats some elsewhere."""
    for op in all_ops(program):
        if op.mesh is not None and op.task is not None and op.task.mesh != op.mesh:
            yield Fault(f"{op} of task {op.task.name!r} is on {describe(op.mesh)}", op.source)


def one_home(program: ir.Program) -> Iterator[Fault]:
    """Check that a value lives where its operation runs, and a result of a loop where its leaf is made."""
    homes = program.homes
    meshes: dict[ir.Value, Mesh] = {}
    for op in all_ops(program):
        meshes.update((o, op.mesh) for o in op.outs if op.mesh is not None)
    for loop in program.loops:
        meshes |= {out: meshes[leaf] for out, leaf in zip(loop.outs, loop.leaves, strict=True) if leaf in meshes}
    for v, mesh in meshes.items():
        if v in homes and homes[v] != mesh:
            yield Fault(f"{show(v)} is made on {describe(mesh)}, and said to be on {describe(homes[v])}")
    for v in ir.values(program.outputs):
        if v in meshes and v not in homes:
            yield Fault(f"result {show(v)} has no home")


Rule = Callable[[ir.Program], Iterator[Fault]]
_SINCE: dict[str, tuple[Rule, ...]] = {
    "inline_calls": (assigned_once, made_before_read, rows_are_made, edges_are_of_one_type),
    "fuse_loops": (),
    "separate_sums": (leaves_are_made,),
    "hoist_slices": (),
    "widen_sums": (),
    "cut_stacks": (),
    "place_operations": (placed, one_home, tasks_are_at_home),
}


def rules_after(name: str) -> tuple[Rule, ...]:
    """Return the rules that hold after a pass: its own and those of all passes before it."""
    passes = list(_SINCE)
    upto = passes.index(name) + 1 if name in passes else len(passes)
    rules = (rule for rules in list(_SINCE.values())[:upto] for rule in rules)
    copied = name in ("recompute_transfers", "replace_schedules")  # operations of tasks, to where they are read
    return tuple(rule for rule in rules if not copied or rule is not tasks_are_at_home)


def _arguments(loop: ir.Loop) -> tuple[ir.Value, ...]:
    """Return the arguments of the body of a loop."""
    arguments = (*loop.consts, *loop.slices, *loop.linked)
    return (*arguments, *(v for v in loop.carries if v not in arguments))


def _leaves(loop: ir.Loop) -> Iterator[tuple[str, ir.Atom]]:
    yield from (("sums", s.leaf) for s in loop.sums)
    yield from (("stacks", leaf) for leaf in loop.stacks.values())
    yield from (("carries", c.leaf) for c in loop.carries.values())
