"""The seconds of the kernels and transfers of a plan on accelerators, for `multimesh.Plan.simulate`.

Matrix products take the time of their operations and of their arrays in the memory. Element-wise operations are fused:
what a chain of them reads from anything else, and what anything else reads of it, passes the memory once. Reductions,
gathers and other operations read and write their arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from multimesh.core import _compat
from multimesh.ir import primitives
from multimesh.ir.flops import product_sizes
from multimesh.plan.instructions import PlanData
from multimesh.plan.timing import Costs

from multimesh import ir
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import Device, device
from multimesh_planner.hardware.software import software

_START = software("nvidia").kernel  # seconds to start what cannot be fused
_WIDE, _WIDEST = 2.0, 16.0  # times the seconds of bfloat16: float32 as TF32, float64 in half of NVIDIA's data sheets


def on_device(plan: PlanData, name: str | Device) -> Costs:
    """Return the seconds of every kernel and transfer of a plan on accelerators, from shapes.

    The devices of a submesh share the work of a kernel evenly. Collectives inside a kernel are left out, because only
    its compiler knows them, and so are fused attention and other kernels that a library would put in place of several
    operations.

    Raises ``UsageError`` if there is no such device.
    """
    target, times = device(name), []
    for kernel in plan.kernels:
        lines = [Line(op.prim, op.params, op.ins, op.outs) for op in kernel.ops]
        times.append(_sum_seconds(lines, kernel.outs, target, plan.submeshes[kernel.submesh].size))
    far = sum(mesh.size for mesh in plan.submeshes) > target.domain
    transfers = {}
    for transfer in plan.transfers:
        size = plan.bytes_of(transfer)
        ends = min(plan.submeshes[transfer.source].size, plan.submeshes[transfer.target].size)
        transfers[transfer.source, transfer.target, size] = kernels.send(target, size / ends, far=far)
    note = f"on {target.name}: from shapes, without the collectives of a kernel"
    return Costs(tuple(times), transfers, unit="s", note=note)


class Line(NamedTuple):
    """The fields of an operation or equation that its cost depends on."""

    prim: Any
    params: dict[str, Any]
    ins: Sequence[Any]
    outs: Sequence[Any]


def _sum_seconds(lines: Sequence[Line], outs: Sequence[Any], on: Device, devices: int) -> float:
    """Return the seconds of operations that devices share evenly, of which ``outs`` are read afterwards."""
    fused, total = [], 0.0
    read = set(filter(ir.is_value, outs))
    for line in lines:
        inner = tuple(_compat.subjaxprs(line.params))
        if primitives.fuses(line.prim) and not inner:
            fused.append(line)
        else:
            total += _price_alone(line, inner, on, devices)
            read |= set(filter(ir.is_value, line.ins))
    results = {out for line in fused for out in line.outs}
    sources = {atom for line in fused for atom in line.ins if ir.is_value(atom)} - results
    return total + kernels.move(on, sum(map(ir.nbytes, sources | (results & read))) / devices)


def _price_alone(line: Line, inner: Sequence[Any], on: Device, devices: int) -> float:
    """Return the seconds of an operation that is not fused with others."""
    if inner:
        seconds = [
            _sum_seconds([Line(e.primitive, e.params, e.invars, e.outvars) for e in of.eqns], of.outvars, on, devices)
            for of in inner
        ]
        return max(seconds) if line.prim.name == "cond" else sum(seconds) * line.params.get("length", 1)
    count: float
    if line.prim.name == "dot_general":
        count, m, k, n = product_sizes(line.params, line.ins)
    elif line.prim.name == "conv_general_dilated":
        kernel, out = ir.shape(line.ins[1]), math.prod(ir.shape(line.outs[0]))
        n = max(1, kernel[line.params["dimension_numbers"].rhs_spec[0]])
        count, m, k = 1, out / n, math.prod(kernel) / n
    else:
        size = sum(map(ir.nbytes, line.outs)) + sum(map(ir.nbytes, filter(ir.is_value, line.ins)))
        return kernels.move(on, size / devices) + _START
    width = ir.nbytes(line.ins[0]) / max(1, math.prod(ir.shape(line.ins[0])))
    scale = 1.0 if width <= 2 else _WIDE if width <= 4 else _WIDEST
    return count * scale * kernels.matmul(on, m, k, n) / devices + _START
