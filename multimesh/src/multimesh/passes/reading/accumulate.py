"""Accumulates sums over microbatches in a wider dtype: what one adds to a large sum is lost in bfloat16.

``fn`` of a microbatch loop may return such results, which the loop itself sums in more bits. Here are the others: sums
of cotangents, where the gradient is taken outside of the loop.
"""

from __future__ import annotations

from dataclasses import replace

from jax.extend.core import primitives

from multimesh import ir
from multimesh.core.numbers import accumulator


def widen_sums(program: ir.Program) -> ir.Program:
    """Sum in the dtype that each loop asks for, and cast the sums back behind the loop."""
    items: list[ir.Item] = []
    for item in program.items:
        items += _widen(item) if isinstance(item, ir.Loop) else [item]
    return replace(program, items=tuple(items))


def _widen(loop: ir.Loop) -> list[ir.Item]:
    before: list[ir.Op] = []
    sums: list[ir.Sum] = []
    after: list[ir.Op] = []
    for s in loop.sums:
        dtype = accumulator(s.out.aval, loop.mark.accumulate)
        if dtype == s.out.aval.dtype or s.init is not None:
            sums.append(s)
            continue
        leaf, total = ir.Value(s.leaf.aval.update(dtype=dtype)), ir.Value(s.out.aval.update(dtype=dtype))
        before.append(_cast(s.leaf, leaf, loop))
        sums.append(replace(s, out=total, leaf=leaf))
        after.append(_cast(total, s.out, loop))
    return [replace(loop, ops=(*loop.ops, *before), sums=tuple(sums)), *after]


def _cast(source: ir.Atom, target: ir.Value, loop: ir.Loop) -> ir.Op:
    params = {"new_dtype": target.aval.dtype, "weak_type": False, "sharding": None}
    prim = primitives.convert_element_type_p
    return ir.Op(prim, params, (source,), (target,), backward=loop.backward, source=loop.source)
