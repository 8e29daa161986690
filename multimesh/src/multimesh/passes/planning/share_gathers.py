"""Each array that several products read gathered is gathered once; the compiler gathers it for each product.

Under sequence parallelism the products of query, key and value read one activation, whose tokens the devices share, and
those of gate and up another. A forward pass and the backward pass after it gather apart: no copy is kept between them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import Axes, entry
from multimesh.ir.primitives import links
from multimesh.passes.planning.fix_layouts import ValueAxes, kernel_axes, ways
from multimesh.plan.plan import Plan

_SAME = ("name", "copy", "sharding_constraint", "multimesh_leave")  # the result is the operand, if it lies alike


@dataclass(frozen=True)
class Exchanges:
    """Copies that devices make, beside operands and results as they are laid out.

    ``gathered`` has operands, and the axes that divide the copy of each; ``part`` is the bytes on a device of the
    result before the devices sum it, 0 where they do not.
    """

    gathered: tuple[tuple[ir.Value, tuple[Axes, ...]], ...] = ()
    part: int = 0


def find_exchanges(op: ir.Op, value_axes: ValueAxes, mesh: Mesh) -> Exchanges:
    """Return the copies that a product makes; other operations make none.

    An operand is gathered along axes that divide neither the result nor, in both operands, the dimension that the
    product sums over. Along the latter each device has a part of the sum.
    """
    operands = [v for v in op.ins if isinstance(v, ir.Value) and v in value_axes]
    if op.prim.name != "dot_general" or len(operands) != 2:
        return Exchanges()
    (left_sum, right_sum), _ = op.params["dimension_numbers"]
    lhs, rhs = (value_axes[v] for v in operands)
    summed = {axis for a, b in zip(left_sum, right_sum, strict=True) for axis in set(lhs[a]) & set(rhs[b])}
    (product,) = op.outs
    out = value_axes[product]
    places = {(v, d): next((at for o, at in group if o is product), None) for group in links(op) for v, d in group}
    gathered = []
    for v, contracted in zip(operands, (left_sum, right_sum), strict=True):
        staying = []
        for d, axes in enumerate(value_axes[v]):
            at = places.get((v, d))
            stays = summed if d in contracted else set(out[at]) - summed if at is not None else set[str]()
            staying.append(tuple(axis for axis in axes if axis in stays))
        if tuple(staying) != tuple(value_axes[v]):
            gathered.append((v, tuple(staying)))
    part = product.nbytes // ways((tuple(axis for axis in axes if axis not in summed) for axes in out), mesh)
    return Exchanges(tuple(gathered), part if summed else 0)


def share_gathers(plan: Plan) -> Plan:
    """Return the plan with a constraint of each array that several products of a kernel read gathered.

    Where all axes are Explicit, types say how arrays lie.
    """
    if not any(map(_leaves_open, plan.submeshes)):
        return plan
    values, _, _ = kernel_axes(plan)
    kernels = (
        replace(kernel, ops=tuple(_share(kernel.ops, values.get(n, {}), mesh))) if _leaves_open(mesh) else kernel
        for n, kernel in enumerate(plan.kernels)
        for mesh in (plan.submeshes[kernel.submesh],)
    )
    return replace(plan, kernels=tuple(kernels))


def _leaves_open(mesh: Mesh) -> bool:
    """Return whether a mesh divides arrays, and a constraint may leave to the compiler how."""
    return mesh.size > 1 and AxisType.Auto in mesh.axis_types


def _share(ops: Sequence[ir.Op], axes: ValueAxes, mesh: Mesh) -> Iterator[ir.Op]:
    """Yield the operations, with constraints before the first of several products."""
    origins: dict[ir.Value, ir.Value] = {}  # what is a copy of another value, in the same layout
    for op in ops:
        v = op.ins[0] if op.ins else None
        if op.prim.name in _SAME and isinstance(v, ir.Value) and axes.get(v) == axes.get(op.outs[0]):
            origins[op.outs[0]] = origins.get(v, v)
    gathers = {op: find_exchanges(op, axes, mesh).gathered for op in ops}
    keys = {(op, v): (origins.get(v, v), staying, op.backward) for op, pairs in gathers.items() for v, staying in pairs}
    uses = collections.Counter(keys.values())
    copies: dict[tuple[ir.Value, tuple[Axes, ...], bool], ir.Value] = {}
    for op in ops:
        operands = dict[ir.Atom, ir.Value]()
        for v, staying in gathers[op]:
            key = keys[op, v]
            if uses[key] == 1:
                continue
            if key not in copies:
                copies[key] = ir.Value(v.aval)
                yield _gather(op, v, staying, copies[key], axes, mesh)
            operands[v] = copies[key]
        yield replace(op, ins=tuple(operands.get(v, v) for v in op.ins)) if operands else op


def _gather(op: ir.Op, v: ir.Value, staying: Sequence[Axes], copy: ir.Value, axes: ValueAxes, mesh: Mesh) -> ir.Op:
    """Return the constraint that gathers an operand before a product; its other dimensions stay as they are.

    One that the product sums over, and that only the other operand divides, is fixed too: the compiler would divide it
    as that one, and sum over devices.
    """
    at = op.ins.index(v)
    sums = op.params["dimension_numbers"][0]
    other = cast("ir.Value", op.ins[1 - at])
    fixed = {d for d, e in zip(sums[at], sums[1 - at], strict=True) if axes[other][e]}
    entries = (
        PartitionSpec.UNCONSTRAINED if before == after and d not in fixed else entry(after)
        for d, (before, after) in enumerate(zip(axes[v], staying, strict=True))
    )
    params = {"sharding": NamedSharding(mesh, PartitionSpec(*entries))}
    return replace(op, mesh=mesh, prim=_compat.sharding_constraint_p, params=params, ins=(v,), outs=(copy,), after=())
