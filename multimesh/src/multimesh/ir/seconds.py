"""Seconds of operations on an accelerator, from shapes alone.

Matrix products take the time of their operations and of their arrays in the memory. Element-wise operations are fused:
what a chain of them reads from anything else, and what anything else reads of it, passes the memory once. Reductions,
gathers and other operations read and write their arrays.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from multimesh import ir
from multimesh.core import _compat
from multimesh.hardware import kernels
from multimesh.hardware.devices import Device
from multimesh.ir import primitives
from multimesh.ir.flops import product_sizes

_WIDE, _WIDEST = 2.0, 16.0  # times the seconds of bfloat16: float32 as TF32, float64 in half of NVIDIA's data sheets


@dataclass(frozen=True)
class Costed:
    """The fields of an operation or equation that its cost depends on."""

    prim: Any
    params: dict[str, Any]
    ins: Sequence[Any]
    outs: Sequence[Any]

    @property
    def inner(self) -> list[Any]:
        """The jaxprs among its parameters."""
        return list(_compat.subjaxprs(self.params))


def estimate_kernel(ops: Iterable[ir.Op], outs: Iterable[Any], device: Device, devices: int, start: float) -> float:
    """Return the seconds of a kernel on each of ``devices`` devices that share its work evenly.

    ``ops``: the kernel's operations.
    ``outs``: its results.
    ``device``: where it runs.
    ``devices``: of its submesh. Collectives between them are left out.
    ``start``: seconds to start what cannot be fused.
    """
    lines = [Costed(op.prim, op.params, op.ins, op.outs) for op in ops]
    return _seconds(lines, tuple(outs), device, devices, start)


def estimate_lines(lines: Sequence[Costed], outs: Sequence[Any], device: Device, start: float) -> float:
    """Return the seconds of operations on one device. Other kernels read their results ``outs``."""
    return _seconds(lines, outs, device, 1, start)


def _of_program(jaxpr: Any, device: Device, devices: int, start: float) -> float:
    lines = [Costed(e.primitive, e.params, e.invars, e.outvars) for e in jaxpr.eqns]
    return _seconds(lines, tuple(jaxpr.outvars), device, devices, start)


def _seconds(lines: Sequence[Costed], outs: Sequence[Any], device: Device, devices: int, start: float) -> float:
    fused = {id(line) for line in lines if not line.inner and primitives.fuses(line.prim)}
    maker: dict[Hashable, Costed] = {out: line for line in lines for out in line.outs}
    read: set[Hashable] = {atom for line in lines if id(line) not in fused for atom in line.ins if ir.is_value(atom)}
    read |= {atom for atom in outs if ir.is_value(atom)}
    total, passed = 0.0, 0.0
    seen: set[Hashable] = set()
    for line in lines:
        if id(line) in fused:
            passed += sum(ir.nbytes(out) for out in line.outs if out in read)
            sources = {a for a in line.ins if ir.is_value(a) and a not in seen}
            sources = {a for a in sources if a not in maker or id(maker[a]) not in fused}
            passed += sum(ir.nbytes(a) for a in sources)
            seen |= sources
            continue
        total += _alone(line, device, devices, start)
    return total + kernels.move(device, passed / devices)


def _alone(line: Costed, device: Device, devices: int, start: float) -> float:
    """Return the seconds of an operation that is not fused with others."""
    if line.prim.name == "dot_general":
        batch, m, k, n = product_sizes(line.params, line.ins)
        return batch * _scale(line.ins[0]) * kernels.matmul(device, m, k, n) / devices + start
    if line.prim.name == "conv_general_dilated":
        kernel, out = ir.shape(line.ins[1]), math.prod(ir.shape(line.outs[0]))
        channels = max(1, kernel[line.params["dimension_numbers"].rhs_spec[0]])
        k = math.prod(kernel) / channels
        return _scale(line.ins[0]) * kernels.matmul(device, out / channels, k, channels) / devices + start
    inner = [_of_program(jaxpr, device, devices, start) for jaxpr in line.inner]
    if inner:
        return max(inner) if line.prim.name == "cond" else sum(inner) * (line.params.get("length", 1))
    size = sum(map(ir.nbytes, line.outs)) + sum(ir.nbytes(atom) for atom in line.ins if ir.is_value(atom))
    return kernels.move(device, size / devices) + start


def _scale(atom: Any) -> float:
    width = ir.nbytes(atom) / max(1, math.prod(ir.shape(atom)))
    return 1.0 if width <= 2 else _WIDE if width <= 4 else _WIDEST
