"""Copies that the devices of a submesh make of the arrays of a product: gathered operands, and parts of its result."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from multimesh import ir
from multimesh.ir.primitives import links
from multimesh.passes.planning.layouts import Known, ways


@dataclass(frozen=True)
class Exchanged:
    """Bytes on each device, beside operands and results as they are laid out."""

    gathered: tuple[tuple[ir.Value, int], ...] = ()  # operands that are gathered, with the bytes of the copy
    part: int = 0  # bytes of the result before the devices sum it; 0 where they do not


def find_exchanges(op: ir.Op, known: Known, mesh: Mesh) -> Exchanged:
    """Return the copies that a product makes; other operations make none.

    An operand is gathered along axes that divide neither the result nor, in both operands, the dimension that the
    product sums over. Along the latter each device has a part of the sum.
    """
    operands = [v for v in op.ins if isinstance(v, ir.Value) and v in known]
    if op.prim.name != "dot_general" or len(operands) != 2:
        return Exchanged()
    (left_sum, right_sum), _ = op.params["dimension_numbers"]
    left, right = (known[v] for v in operands)
    summed = {axis for a, b in zip(left_sum, right_sum, strict=True) for axis in set(left[a]) & set(right[b])}
    (product,) = op.outs
    out = known[product]
    places = {(v, d): next((at for o, at in group if o is product), None) for group in links(op) for v, d in group}
    gathered = []
    for v, contracted in zip(operands, (left_sum, right_sum), strict=True):
        kept = []
        for d, axes in enumerate(known[v]):
            at = places.get((v, d))
            stays = summed if d in contracted else set(out[at]) - summed if at is not None else set[str]()
            kept.append(tuple(axis for axis in axes if axis in stays))
        if tuple(kept) != tuple(known[v]):
            gathered.append((v, v.nbytes // ways(kept, mesh)))
    part = product.nbytes // ways((tuple(axis for axis in axes if axis not in summed) for axes in out), mesh)
    return Exchanged(tuple(gathered), part if summed else 0)
