"""Slices of stacked weights, hoisted out of a microbatch loop, and their gradients, joined once after it.

A slice of a constant is the same in every iteration, and ``sum(pad(x)) = pad(sum(x))`` exactly, as adding zeros rounds
nothing. So no submesh holds accumulators of the whole stack, or is sent a part of it more than once. A
``dynamic_slice`` stays where it is, and so does a slice that is itself a result of the iteration.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jax.extend.core import primitives

from multimesh import ir
from multimesh.ir import graph
from multimesh.ir.primitives import halves, is_zero


def hoist_slices(program: ir.Program) -> ir.Program:
    """Hoist slices of constants out of loops, and sink zero padding of sums behind them."""
    rows = program.linked
    items: list[ir.Item] = []
    for item in program.items:
        items += [item] if isinstance(item, ir.Op) else _hoist(item, rows)
    return replace(program, items=tuple(items))


def _hoist(loop: ir.Loop, rows: Collection[ir.Value]) -> list[ir.Item]:
    """Return slices before a loop, the loop, and padding after it. Map the ``rows`` of later loops to the new ones."""
    maker = graph.makers(loop.ops)
    linked = [o for o in maker if o in rows]
    results = {*ir.values(loop.leaves), *linked}
    uses = collections.Counter(v for op in loop.ops for v in op.needs)
    uses.update(ir.values((*loop.leaves, *linked)))
    before: list[ir.Op] = []
    after: list[ir.Op] = []
    consts = dict(loop.consts)
    ops: list[ir.Op] = []
    for op in loop.ops:
        source = next(iter(op.reads), None)
        movable = op.task is None and op.prim.name in ("slice", "split") and results.isdisjoint(op.outs)
        if movable and source in loop.consts and halves(op, source):
            outs = tuple(ir.Value(o.aval) for o in op.outs)
            before.append(replace(op, ins=(loop.consts[source],), outs=outs))
            consts.update(zip(op.outs, outs, strict=True))
        else:
            ops.append(op)
    sums: list[ir.Sum] = []
    for s in loop.sums:
        last = maker.get(s.leaf) if isinstance(s.leaf, ir.Value) and uses[s.leaf] == 1 else None
        padded = as_padding(last, maker) if last is not None else None
        if last is None or padded is None or padded[0] not in maker:
            sums.append(s)
            continue
        part, config, zero = padded
        total = ir.Value(part.aval)
        sums.append(replace(s, out=total, leaf=part))
        params = {"padding_config": config}
        after.append(
            replace(last, prim=primitives.pad_p, params=params, ins=(total, zero), outs=(s.out,), ctx=None, task=None)
        )
    result = replace(loop, ops=tuple(ops), sums=tuple(sums))
    if after:  # what a checkpoint repeats stays, which nothing has read before either
        read = {*ir.live(loop.ops, results)}.difference(ir.live(ops, [*result.leaves, *linked]))
        result = replace(result, ops=tuple(op for op in ops if op not in read))
    used = {v for op in result.ops for v in op.reads}
    return [*before, replace(result, consts={i: v for i, v in consts.items() if i in used}), *after]


def as_padding(
    op: ir.Op, maker: Mapping[ir.Value, ir.Op]
) -> tuple[ir.Value, tuple[Sequence[int], ...], ir.Atom] | None:
    """Return the operand that an operation puts between zeros, the number of these, and a zero; None for others."""
    if op.prim.name == "pad" and is_zero(op.ins[1], maker) and not isinstance(op.ins[1], ir.Value):
        part, zero, config = *op.ins, op.params["padding_config"]
    elif op.prim.name == "concatenate":
        parts = [(n, i) for n, i in enumerate(op.ins) if not is_zero(i, maker)]
        if len(parts) != 1 or len(op.ins) == 1:
            return None
        dim, (n, part) = op.params["dimension"], parts[0]
        low, high = (sum(i.aval.shape[dim] for i in group) for group in (op.ins[:n], op.ins[n + 1 :]))
        config = tuple((low, high, 0) if d == dim else (0, 0, 0) for d in range(part.aval.ndim))
        zero = op.ins[0 if n else 1]
        while isinstance(zero, ir.Value):
            zero = maker[zero].ins[0]
    else:
        return None
    return (part, config, zero) if isinstance(part, ir.Value) else None
