"""The seconds of the kernels and transfers of a plan on accelerators, for `multimesh.Plan.simulate`.

Matrix products take the time of their operations and of their arrays in the memory. Element-wise operations are fused:
what a chain of them reads from anything else, and what anything else reads of it, passes the memory once. Reductions,
gathers and other operations read and write their arrays.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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
        pricing = Pricing(target, plan.submeshes[kernel.submesh].size, software("nvidia").kernel)
        times.append(pricing.sum_seconds(lines, tuple(kernel.outs)))
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


@dataclass(frozen=True)
class Pricing:
    """Seconds of operations on each of ``devices`` devices that share them evenly, without their collectives."""

    device: Device
    devices: int
    start: float  # seconds to start what cannot be fused

    def sum_seconds(self, lines: Sequence[Line], outs: Sequence[Any]) -> float:
        """Return the seconds of operations, of which ``outs`` are read afterwards."""
        inner = {id(line): tuple(_compat.subjaxprs(line.params)) for line in lines}
        fused = {id(line) for line in lines if not inner[id(line)] and primitives.fuses(line.prim)}
        maker: dict[Hashable, Line] = {out: line for line in lines for out in line.outs}
        read = {atom for line in lines if id(line) not in fused for atom in line.ins if ir.is_value(atom)}
        read |= {atom for atom in outs if ir.is_value(atom)}
        total, passed = 0.0, 0.0
        sources_read: set[Hashable] = set()
        for line in lines:
            if id(line) not in fused:
                total += self._price_alone(line, inner[id(line)])
                continue
            passed += sum(ir.nbytes(out) for out in line.outs if out in read)
            sources = {atom for atom in line.ins if ir.is_value(atom)} - sources_read
            sources = {atom for atom in sources if atom not in maker or id(maker[atom]) not in fused}
            passed += sum(map(ir.nbytes, sources))
            sources_read |= sources
        return total + kernels.move(self.device, passed / self.devices)

    def _price_alone(self, line: Line, inner: Sequence[Any]) -> float:
        """Return the seconds of an operation that is not fused with others."""
        if line.prim.name == "dot_general":
            return self._price_products(line, *product_sizes(line.params, line.ins))
        if line.prim.name == "conv_general_dilated":
            kernel, out = ir.shape(line.ins[1]), math.prod(ir.shape(line.outs[0]))
            channels = max(1, kernel[line.params["dimension_numbers"].rhs_spec[0]])
            return self._price_products(line, 1, out / channels, math.prod(kernel) / channels, channels)
        if inner:
            seconds = [
                self.sum_seconds([Line(e.primitive, e.params, e.invars, e.outvars) for e in of.eqns], tuple(of.outvars))
                for of in inner
            ]
            return max(seconds) if line.prim.name == "cond" else sum(seconds) * line.params.get("length", 1)
        size = sum(map(ir.nbytes, line.outs)) + sum(ir.nbytes(atom) for atom in line.ins if ir.is_value(atom))
        return kernels.move(self.device, size / self.devices) + self.start

    def _price_products(self, line: Line, count: float, m: float, k: float, n: float) -> float:
        width = ir.nbytes(line.ins[0]) / max(1, math.prod(ir.shape(line.ins[0])))
        scale = 1.0 if width <= 2 else _WIDE if width <= 4 else _WIDEST
        return count * scale * kernels.matmul(self.device, m, k, n) / self.devices + self.start
