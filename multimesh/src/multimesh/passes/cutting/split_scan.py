"""The split of a scan in two: one computes values that are needed soon, the other the rest from stacked rows.

Both go through the rows in the same order, and one of them has all of a carry, so no arithmetic is reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from multimesh import ir
from multimesh.core import _compat
from multimesh.passes.reading.scan_bodies import build_scan, read_scan

Cut = Callable[[Sequence[ir.Op], set[ir.Value], set[ir.Value], set[ir.Value]], tuple[Sequence[ir.Op], Sequence[ir.Op]]]


def split_scan(op: ir.Op, needed: set[ir.Value], tainted: set[ir.Value], cut: Cut) -> tuple[ir.Op, ir.Op] | None:
    """Split a scan in two by ``cut``: the values ``needed``, then the rest; None if the first would compute all."""
    if all(o in needed for o in op.outs):
        return None
    body = read_scan(op)
    if body is None:
        return None
    carries = _find_carries(body, needed)
    leaves = [*(body.carries[c].leaf for c in carries), *(leaf for out, leaf in body.stacks.items() if out in needed)]
    outside = {**body.consts, **body.slices}
    inner = {v for v, outer in outside.items() if isinstance(outer, ir.Value) and outer in tainted} | set(body.carries)
    late_carries = [c for c in body.carries if c not in carries]
    here, later = cut(body.ops, set(ir.values(leaves)), inner, {*late_carries})
    made_here, made_later = ({o for part in ops for o in part.outs} for ops in (here, later))
    late = (made_later - made_here).union(late_carries)
    late_stacks = {out: leaf for out, leaf in body.stacks.items() if isinstance(leaf, ir.Value) and leaf in late}
    if not late_stacks and not late_carries:
        return None
    last = [*late_stacks.values(), *(body.carries[c].leaf for c in late_carries)]
    later = ir.live(later, last)
    read = dict.fromkeys((*(v for part in later for v in part.reads), *ir.values(last)))  # in order: so are the stacks
    crossing = {
        v: ir.Value(_compat.stack(v.aval, op.params["length"]))
        for v in read
        if v in carries or (v in made_here and v not in made_later)
    }
    early_stacks = {out: leaf for out, leaf in body.stacks.items() if out not in late_stacks}
    first = build_scan(op, body, here, carries, early_stacks | {outer: inner for inner, outer in crossing.items()})
    second = build_scan(op, replace(body, slices={**body.slices, **crossing}), later, set(late_carries), late_stacks)
    return first, second


def _find_carries(body: ir.Loop, needed: set[ir.Value]) -> set[ir.Value]:
    """Return the carries of a scan whose last value is needed, and the carries that these or needed rows read."""
    carries = {v for v, c in body.carries.items() if c.out in needed}
    rows = [leaf for out, leaf in body.stacks.items() if out in needed]
    while True:
        leaves = [*rows, *(body.carries[c].leaf for c in carries)]
        reads = {v for op in ir.live(body.ops, leaves) for v in op.reads} | set(ir.values(leaves))
        more = {c for c in body.carries if c in reads} - carries
        if not more:
            return carries
        carries |= more
