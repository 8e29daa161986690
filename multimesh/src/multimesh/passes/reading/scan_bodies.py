"""A scan as a loop, and a scan of other operations of its body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir.evaluate import evaluate
from multimesh.ir.program import LoopMark
from multimesh.passes.reading.inline_calls import flatten


def read_scan(op: ir.Op) -> ir.Loop | None:
    """Return a scan as a loop; None if it captures arrays."""
    closed, (a, count) = op.params["jaxpr"], _compat.scan_counts(op.params)
    args = [ir.Value(v.aval) for v in closed.jaxpr.invars]
    flat = flatten(op, closed, args)
    if flat is None:
        return None
    ops, results = flat
    states = zip(op.outs, op.ins[a:], results[:count], strict=False)
    return ir.Loop(
        LoopMark(op.params["length"], None),
        "",
        ops,
        consts=dict(zip(args[:a], op.ins, strict=False)),
        slices=dict(zip(args[a + count :], op.ins[a + count :], strict=True)),
        sums=(),
        stacks=dict(zip(op.outs[count:], results[count:], strict=True)),
        carries={v: ir.Carry(*state) for v, state in zip(args[a : a + count], states, strict=True)},
    )


def build_scan(
    op: ir.Op, body: ir.Loop, ops: Sequence[ir.Op], carries: set[ir.Value], stacks: dict[ir.Value, ir.Atom]
) -> ir.Op:
    """Return the scan of some operations of a body, with the ``carries`` and the outer values that it stacks."""
    states = {v: c for v, c in body.carries.items() if v in carries}
    leaves = [*(c.leaf for c in states.values()), *stacks.values()]
    used = {v for o in ops for v in o.reads} | set(ir.values(leaves))
    consts = {v: outer for v, outer in body.consts.items() if v in used}
    rows = {v: outer for v, outer in body.slices.items() if v in used}
    args = [*consts, *states, *rows]

    def iteration(*values: Any) -> list[Any]:
        env = dict(zip(args, values, strict=True))
        evaluate(ops, env, op.mesh)
        return [env[leaf] if isinstance(leaf, ir.Value) else leaf.val for leaf in leaves]

    with _compat.abstract_mesh_context(op.mesh):
        closed = jax.make_jaxpr(iteration)(*(_compat.shape_of(v.aval) for v in args))
    params = _compat.scan_params(op.params, closed, len(consts), len(states))
    ins = (*consts.values(), *(c.init for c in states.values()), *rows.values())
    return replace(op, params=params, ins=ins, outs=(*(c.out for c in states.values()), *stacks))
