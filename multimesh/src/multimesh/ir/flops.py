"""The number of floating-point operations, from shapes alone.

A matrix product of ``[m, k]`` and ``[k, n]`` counts ``2 m k n`` operations, any other operation one for each element of
its results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from multimesh import ir
from multimesh.core import _compat


def count_flops(ops: Sequence[ir.Op]) -> float:
    """Return the number of floating-point operations of ``ops``."""
    return sum(operations(op.prim.name, op.params, op.ins, op.outs) for op in ops)


def product_sizes(params: dict[str, Any], ins: Sequence[Any]) -> tuple[int, float, int, float]:
    """Return the sizes of a ``dot_general``: ``batch`` products of ``[m, k]`` and ``[k, n]``, as (batch, m, k, n)."""
    (contracted, _), (batched, _) = params["dimension_numbers"]
    lhs, rhs = ir.shape(ins[0]), ir.shape(ins[1])
    batch, k = (math.prod(lhs[d] for d in dims) for dims in (batched, contracted))
    return batch, math.prod(lhs) / max(1, batch * k), k, math.prod(rhs) / max(1, batch * k)


def operations(name: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> float:
    """Return the number of floating-point operations of a primitive. ``ins`` and ``outs`` have an ``aval``."""
    size = float(sum(math.prod(ir.shape(o)) for o in outs))
    if name == "dot_general":
        return 2 * math.prod(product_sizes(params, ins))
    if name == "conv_general_dilated":
        kernel = ir.shape(ins[1])
        return 2 * size * math.prod(kernel) / max(1, kernel[params["dimension_numbers"].rhs_spec[0]])
    bodies = [jaxpr.eqns for jaxpr in _compat.subjaxprs(params)]
    inner = [sum(operations(e.primitive.name, e.params, e.invars, e.outvars) for e in eqns) for eqns in bodies]
    if not inner:
        return size
    return max(inner) if name == "cond" else sum(inner) * (params["length"] if name == "scan" else 1)
