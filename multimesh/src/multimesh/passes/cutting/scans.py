"""The split of a scan in two: one computes values that are needed soon, the other the rest from stacked rows.

Both go through the rows in the same order, and one of them has all of a carry, so no arithmetic is reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir.evaluate import evaluate
from multimesh.passes.reading.inline import flatten

Cut = Callable[[Sequence[ir.Op], set[ir.Value], set[ir.Value]], tuple[Sequence[ir.Op], Sequence[ir.Op]]]


@dataclass(frozen=True)
class _Body:
    """A scan as operations. Inputs of an iteration map to their outer values, results the reverse."""

    ops: tuple[ir.Op, ...]
    consts: dict[ir.Value, ir.Atom]
    carries: dict[ir.Value, ir.Atom]
    rows: dict[ir.Value, ir.Atom]
    last: dict[ir.Value, ir.Value]  # carry to the outer value that is its last
    carried: dict[ir.Value, ir.Atom]  # carry to what the next iteration gets
    stacks: dict[ir.Value, ir.Atom]  # outer value to what it stacks


def _body(op: ir.Op) -> _Body | None:
    closed, (a, count) = op.params["jaxpr"], _compat.scan_counts(op.params)
    args = [ir.Value(v.aval) for v in closed.jaxpr.invars]
    flat = flatten(op, closed, args)
    if flat is None:
        return None
    ops, results = flat
    consts, carries, rows = args[:a], args[a : a + count], args[a + count :]
    return _Body(
        ops,
        dict(zip(consts, op.ins, strict=False)),
        dict(zip(carries, op.ins[a:], strict=False)),
        dict(zip(rows, op.ins[a + count :], strict=True)),
        dict(zip(carries, op.outs, strict=False)),
        dict(zip(carries, results, strict=False)),
        dict(zip(op.outs[count:], results[count:], strict=True)),
    )


def split_scan(op: ir.Op, needed: set[ir.Value], tainted: set[ir.Value], cut: Cut) -> tuple[ir.Op, ir.Op] | None:
    """Split a scan in two: the values ``needed``, then the rest. Return None if the first would compute everything.

    ``cut(ops, needed, tainted)`` splits the body: the needed operations, and the rest, which may repeat what depends on
    nothing ``tainted``. Carries count as tainted.
    """
    if all(o in needed for o in op.outs):
        return None
    body = _body(op)
    if body is None:
        return None
    carries = _find_carries(body, needed)
    leaves = [*(body.carried[c] for c in carries), *(leaf for out, leaf in body.stacks.items() if out in needed)]
    outside = {**body.consts, **body.rows}
    held = {v for v, outer in outside.items() if isinstance(outer, ir.Value) and outer in tainted} | set(body.carries)
    here, later = cut(body.ops, set(ir.values(leaves)), held)
    made_here, made_later = ({o for part in ops for o in part.outs} for ops in (here, later))
    late_carries = [c for c in body.carries if c not in carries]
    late_stacks = {
        out: leaf for out, leaf in body.stacks.items() if isinstance(leaf, ir.Value) and leaf in made_later - made_here
    }
    if not late_stacks and not late_carries:
        return None
    last = [*late_stacks.values(), *(body.carried[c] for c in late_carries)]
    later = ir.live(later, last)
    read = dict.fromkeys((*(v for part in later for v in part.reads), *ir.values(last)))  # in order: so are the stacks
    crossing = {
        v: ir.Value(_compat.stack(v.aval, op.params["length"]))
        for v in read
        if v in carries or (v in made_here and v not in made_later)
    }
    early_stacks = {out: leaf for out, leaf in body.stacks.items() if out not in late_stacks}
    first = _scan(op, body, here, carries, early_stacks | {outer: inner for inner, outer in crossing.items()})
    second = _scan(op, replace(body, rows={**body.rows, **crossing}), later, set(late_carries), late_stacks)
    return first, second


def _find_carries(body: _Body, needed: set[ir.Value]) -> set[ir.Value]:
    """Return carries whose last value is needed, and those that they or needed rows read."""
    carries = {c for c, out in body.last.items() if out in needed}
    rows = [leaf for out, leaf in body.stacks.items() if out in needed]
    while True:
        leaves = [*rows, *(body.carried[c] for c in carries)]
        reads = {v for op in ir.live(body.ops, leaves) for v in op.reads} | set(ir.values(leaves))
        more = {c for c in body.carries if c in reads} - carries
        if not more:
            return carries
        carries |= more


def _scan(
    op: ir.Op, body: _Body, ops: Sequence[ir.Op], carries: set[ir.Value], stacks: dict[ir.Value, ir.Atom]
) -> ir.Op:
    """Return the scan of some operations of a body, with the ``carries`` and the outer values that it stacks."""
    kept = [c for c in body.carries if c in carries]
    leaves = [*(body.carried[c] for c in kept), *stacks.values()]
    used = {v for o in ops for v in o.reads} | set(ir.values(leaves))
    consts = [v for v in body.consts if v in used]
    rows = [v for v in body.rows if v in used]
    args = [*consts, *kept, *rows]

    def iteration(*given: Any) -> list[Any]:
        env = dict(zip(args, given, strict=True))
        evaluate(ops, env, op.mesh)
        return [env[leaf] if isinstance(leaf, ir.Value) else leaf.val for leaf in leaves]

    with _compat.abstract_mesh_context(op.mesh):
        closed = jax.make_jaxpr(iteration)(*(_compat.shape_of(v.aval) for v in args))
    params = _compat.scan_params(op.params, closed, len(consts), len(kept))
    given = {**body.consts, **body.carries, **body.rows}
    return replace(op, params=params, ins=tuple(given[v] for v in args), outs=(*(body.last[c] for c in kept), *stacks))
