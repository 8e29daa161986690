"""Make one loop of a forward scan and its transpose."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir import graph
from multimesh.passes.reading.find_recomputation import is_same
from multimesh.passes.reading.loops import sort_items


def fuse_loops(program: ir.Program) -> ir.Program:
    """Join the forward loop of each ``microbatch`` with its transpose, where the backward needs no forward sum."""
    items = _share_rows(program.items)
    for second in [i for i in items if isinstance(i, ir.Loop)]:
        before = items[: items.index(second)] if second in items else []
        firsts = [i for i in before if isinstance(i, ir.Loop) and i.uid == second.uid and _can_fuse(i, second, items)]
        if firsts:
            first = next((i for i in firsts if _reads_rows(second, i)), firsts[0])
            items[items.index(second)] = _fuse_pair(first, second)
            items.remove(first)
            items = sort_items(items)
    items = [_go_forward_again(item) if isinstance(item, ir.Loop) else item for item in items]
    return replace(program, items=tuple(ir.live(items, program.outputs)))


def _go_forward_again(loop: ir.Loop) -> ir.Loop:
    """Make a loop of its own of a forward pass over several stages that `jax.checkpoint` repeats.

    The loop of the forward pass is in another program, as with ``jax.grad`` around `multimesh.jit`, or can't be joined.
    """
    if not all(op.backward for op in loop.ops) or not _repeats_several(loop):
        return loop
    barriers = [op for op in loop.ops if op.prim is _compat.optimization_barrier_p]
    untied = {o: i for op in barriers for o, i in zip(op.outs, op.ins, strict=True)}
    return replace(
        loop, ops=tuple(replace(graph.rename_op(op, untied), backward=False) if op.again else op for op in loop.ops)
    )


def _repeats_several(loop: ir.Loop) -> bool:
    """Return whether a recomputed value goes to a task on another submesh."""
    made_on: dict[ir.Value, set[Mesh]] = {}
    for op in loop.ops:
        on = set().union(*(made_on.get(v, set()) for v in op.reads))
        if op.task is not None:
            if on - {op.task.mesh}:
                return True
            on = {op.task.mesh}
        if op.again:
            made_on.update(dict.fromkeys(op.outs, on))
    return False


def _share_rows(items: Sequence[ir.Item]) -> list[ir.Item]:
    """Let loops of one ``microbatch`` read the same rows where `jax.vmap` moved the axes of a batch once for each."""
    maker = graph.makers(item for item in items if isinstance(item, ir.Op))
    rows_of: dict[str, list[ir.Value]] = collections.defaultdict(list)
    shared: list[ir.Item] = []
    for item in items:
        if isinstance(item, ir.Loop):
            values = rows_of[item.uid]
            rows = {k: next((o for o in values if is_same(o, v, maker)), v) for k, v in item.slices.items()}
            values += dict.fromkeys(rows.values())
            item = replace(item, slices=rows)
        shared.append(item)
    return shared


def _can_fuse(first: ir.Loop, second: ir.Loop, items: Sequence[ir.Item]) -> bool:
    """Return whether ``second`` depends on ``first`` row by row only, or repeats it under `jax.checkpoint`."""
    again = second.backward and not first.backward and not set(first.slices.values()).isdisjoint(second.slices.values())
    if not again and not _reads_rows(second, first):
        return False
    tainted = set(first.outs)
    for item in items[items.index(first) + 1 : items.index(second)]:
        if any(v in tainted for v in item.reads):
            tainted.update(item.outs)
    others = {inner: outer for inner, outer in second.slices.items() if outer not in first.stacks}
    return tainted.isdisjoint(replace(second, slices=others).reads)


def _reads_rows(second: ir.Loop, first: ir.Loop) -> bool:
    return any(outer in first.stacks for outer in second.slices.values())


def _fuse_pair(first: ir.Loop, second: ir.Loop) -> ir.Loop:
    rename: dict[ir.Value, ir.Atom] = {
        inner: first.stacks[outer] for inner, outer in second.slices.items() if outer in first.stacks
    }
    second = graph.rename_body(second, rename)
    return replace(
        first,
        ops=first.ops + tuple(replace(op, backward=True) for op in second.ops),
        consts=first.consts | second.consts,
        slices=first.slices | {k: v for k, v in second.slices.items() if k not in rename},
        sums=first.sums + second.sums,
        stacks=first.stacks | second.stacks,
        carries=second.carries | first.carries,
    )
