"""The body of a scan as operations, and a scan of other operations of a body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir.evaluate import evaluate
from multimesh.passes.reading.inline_calls import flatten


@dataclass(frozen=True)
class ScanBody:
    """A scan as operations. Inputs of an iteration map to their outer values, results the reverse."""

    ops: tuple[ir.Op, ...]
    consts: dict[ir.Value, ir.Atom]
    carries: dict[ir.Value, ir.Atom]
    rows: dict[ir.Value, ir.Atom]
    last: dict[ir.Value, ir.Value]  # carry to the outer value that is its last
    carried: dict[ir.Value, ir.Atom]  # carry to what the next iteration gets
    stacks: dict[ir.Value, ir.Atom]  # outer value to what it stacks


def read_scan(op: ir.Op) -> ScanBody | None:
    """Return the body of a scan as operations; None if it captures arrays."""
    closed, (a, count) = op.params["jaxpr"], _compat.scan_counts(op.params)
    args = [ir.Value(v.aval) for v in closed.jaxpr.invars]
    flat = flatten(op, closed, args)
    if flat is None:
        return None
    ops, results = flat
    consts, carries, rows = args[:a], args[a : a + count], args[a + count :]
    return ScanBody(
        ops,
        dict(zip(consts, op.ins, strict=False)),
        dict(zip(carries, op.ins[a:], strict=False)),
        dict(zip(rows, op.ins[a + count :], strict=True)),
        dict(zip(carries, op.outs, strict=False)),
        dict(zip(carries, results, strict=False)),
        dict(zip(op.outs[count:], results[count:], strict=True)),
    )


def build_scan(
    op: ir.Op, body: ScanBody, ops: Sequence[ir.Op], carries: set[ir.Value], stacks: dict[ir.Value, ir.Atom]
) -> ir.Op:
    """Return the scan of some operations of a body, with the ``carries`` and the outer values that it stacks."""
    live = [c for c in body.carries if c in carries]
    leaves = [*(body.carried[c] for c in live), *stacks.values()]
    used = {v for o in ops for v in o.reads} | set(ir.values(leaves))
    consts = [v for v in body.consts if v in used]
    rows = [v for v in body.rows if v in used]
    args = [*consts, *live, *rows]

    def iteration(*values: Any) -> list[Any]:
        env = dict(zip(args, values, strict=True))
        evaluate(ops, env, op.mesh)
        return [env[leaf] if isinstance(leaf, ir.Value) else leaf.val for leaf in leaves]

    with _compat.abstract_mesh_context(op.mesh):
        closed = jax.make_jaxpr(iteration)(*(_compat.shape_of(v.aval) for v in args))
    params = _compat.scan_params(op.params, closed, len(consts), len(live))
    outer = {**body.consts, **body.carries, **body.rows}
    return replace(op, params=params, ins=tuple(outer[v] for v in args), outs=(*(body.last[c] for c in live), *stacks))
