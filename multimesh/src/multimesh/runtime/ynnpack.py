"""The choice of the kernels whose matrix products XLA's CPU compiler gives to YNNPACK.

On a CPU of two cores, float32, each product alone in both forms (``benchmarks/products.py``): from 8 million operations
a matrix YNNPACK saves about 10 microseconds a million, as Eigen's threads wait for each other there; a product over
many small matrices, those of attention, costs it about 5 microseconds more for each matrix. Other products are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir.flops import product_sizes

OPTION = "xla_cpu_experimental_ynn_fusion_type"
"""Kinds of operations that YNNPACK gets, by name; none where it is empty."""

_LARGE = 8e6
_SAVED, _LOST = 10e-12, 5e-6  # seconds: for an operation of a large product; for a small matrix of a batch


def loses(ops: Sequence[ir.Op], devices: int) -> bool:
    """Return whether a kernel's matrix products, on each of ``devices`` devices, take longer with YNNPACK."""
    return sum(_seconds(op.prim.name, op.params, op.ins, devices) for op in ops) < 0


def _seconds(name: str, params: dict[str, Any], ins: Sequence[Any], devices: int) -> float:
    """Return the seconds that YNNPACK saves in an operation; devices share the batch, or else the matrix."""
    if name == "dot_general" and ins[0].aval.dtype == ins[1].aval.dtype == jnp.float32:
        batch, m, k, n = product_sizes(params, ins)
        each = 2.0 * m * k * n
        matrices, each = (batch / devices, each) if batch >= devices else (batch, each / devices)
        if each >= _LARGE:
            return matrices * each * _SAVED
        return -matrices * _LOST if batch > 1 else 0.0
    inner = [
        sum(_seconds(e.primitive.name, e.params, e.invars, devices) for e in jaxpr.eqns)
        for jaxpr in _compat.subjaxprs(params)
    ]
    return sum(inner) * (params["length"] if name == "scan" else 1)
