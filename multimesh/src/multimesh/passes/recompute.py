"""Recompute instead of keeping: trivial operations are repeated where their inputs are already at hand.

A forward fragment hands its backward fragment every intermediate value that the derivative reads. Many of them are a
broadcast, a cast or a product of values that the backward reads anyway; repeating those costs less than an array that
is held (or sent) and handed to a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multimesh import ir
from multimesh.passes.fragment import Fragment, with_interfaces

TRIVIAL = frozenset(
    (
        *("add", "add_any", "sub", "mul", "neg", "max", "min", "abs", "sign", "square", "integer_pow"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "is_finite"),
        *("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"),
        *("copy", "copy_p", "slice", "rev", "real", "imag"),
    )
)


def recompute(fragments: Sequence[Fragment], results: set[ir.Value]) -> tuple[Fragment, ...]:
    """Repeat trivial operations in the fragments that read their results, when that adds no input of more bytes."""
    maker = {o: (part, i) for part in fragments for i, op in enumerate(part.ops) for o in op.outs}
    return with_interfaces([_localised(part, maker) for part in fragments], results)


def _localised(part: Fragment, maker: dict[ir.Value, tuple[Fragment, int]]) -> Fragment:
    at_hand = set(part.ins)
    repeated: dict[tuple[int, int], ir.Op] = {}
    pending = [v for v in part.ins if v in maker]
    while pending:
        value = pending.pop()
        origin, index = maker[value]
        op = origin.ops[index]
        if op.prim.name not in TRIVIAL or op.effects or (id(origin), index) in repeated:
            continue
        extra = [v for v in set(op.reads) if v not in at_hand and (v in maker or origin.mesh != part.mesh)]
        if sum(v.nbytes for v in extra) > (0 if len(extra) != 1 else value.nbytes):
            continue
        repeated[id(origin), index] = op
        at_hand.discard(value)
        at_hand.update(op.reads)
        pending += [v for v in extra if v in maker]
    if not repeated:
        return part
    ordered = sorted(repeated.items(), key=lambda item: (maker[item[1].outs[0]][0].level, item[0][1]))
    rename: dict[ir.Value, ir.Value] = {}
    copies = []
    for _, op in ordered:
        outs = tuple(ir.Value(o.aval) for o in op.outs)
        ins = tuple(rename.get(i, i) if isinstance(i, ir.Value) else i for i in op.ins)
        copies.append(replace(op, ins=ins, outs=outs, mesh=part.mesh, task=op.task if op.mesh == part.mesh else None))
        rename.update(zip(op.outs, outs, strict=True))
    ops = tuple(
        replace(op, ins=tuple(rename.get(i, i) if isinstance(i, ir.Value) else i for i in op.ins)) for op in part.ops
    )
    return replace(part, ops=(*copies, *ops))
