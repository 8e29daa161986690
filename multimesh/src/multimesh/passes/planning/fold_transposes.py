"""Products of matrices in the orientation in which they are used.

JAX makes the gradient of a weight as ``(dy.T @ x).T``, against the order of the accumulator's memory. With its operands
swapped the product has the same elements: each remains the sum of the same products in the same order.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax import lax
from jax.sharding import AxisType

from multimesh import ir
from multimesh.ir import graph
from multimesh.plan.plan import Plan


def fold_transposes(plan: Plan) -> Plan:
    """Return the plan with the transposes of every kernel folded into its products."""
    kernels = (replace(k, ops=fold_products(k.ops, (*k.sums, *k.outs))) for k in plan.kernels)
    return replace(plan, kernels=tuple(kernels))


def fold_products(ops: Sequence[ir.Op], results: Iterable[ir.Value]) -> tuple[ir.Op, ...]:
    """Replace each product whose only user transposes it by the transposed product. ``results`` are used outside.

    Where that is transposed in turn, as the gradient of a table that is also the head, the next one is folded as well.
    """
    reads = collections.Counter(v for op in ops for v in op.reads)
    reads.update(results)
    products = graph.makers(ops)
    swapped: dict[ir.Value, ir.Op] = {}  # by what the product made at first
    folded: dict[ir.Value, ir.Value] = {}  # from the result of a transpose to this
    for op in ops:
        if op.prim.name != "transpose" or not isinstance(op.ins[0], ir.Value):
            continue
        first = folded.get(op.ins[0], op.ins[0])
        product = swapped.get(first, products.get(first))
        if product is not None and reads[op.ins[0]] == 1 and _swaps_operands(product, op.params["permutation"]):
            swapped[first] = replace(product, ins=product.ins[::-1], params=_swap(product.params), outs=op.outs)
            folded[op.outs[0]] = first
    return tuple(swapped.get(op.outs[0], op) if op.outs else op for op in ops if folded.keys().isdisjoint(op.outs))


def _swaps_operands(product: ir.Op, permutation: Sequence[int]) -> bool:
    """Return whether a permutation of a product's dimensions only exchanges those of its two operands."""
    layout = product.params.get("out_sharding")  # where the compiler chooses it, JAX has none or an empty one
    chosen = layout is not None and any(kind != AxisType.Auto for kind in layout.mesh.axis_types)
    if product.prim.name != "dot_general" or chosen:
        return False
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = len(batch)
    second = product.ins[0].aval.ndim - len(contracted)
    count = product.outs[0].aval.ndim
    return tuple(permutation) == (*range(first), *range(second, count), *range(first, second))


def _swap(params: dict[str, Any]) -> dict[str, Any]:
    (lhs, rhs), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    return params | {
        "out_sharding": None,
        "dimension_numbers": ((rhs, lhs), (rhs_batch, lhs_batch)),
        "precision": _swap_precision(params.get("precision")),
    }


def _swap_precision(precision: Any) -> Any:
    """Swap the precisions of two operands: one each, or an algorithm, which is a tuple as well."""
    if not isinstance(precision, lax.DotAlgorithm):
        return precision[::-1] if isinstance(precision, tuple) else precision
    return precision._replace(
        lhs_precision_type=precision.rhs_precision_type,
        rhs_precision_type=precision.lhs_precision_type,
        lhs_component_count=precision.rhs_component_count,
        rhs_component_count=precision.lhs_component_count,
    )
