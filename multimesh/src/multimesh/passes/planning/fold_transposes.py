"""Products of matrices and sums over microbatches in the order of dimensions in which they are used and made.

JAX makes the gradient of a weight as ``(dy.T @ x).T``, against the order of the accumulator's memory. With its operands
swapped the product has the same elements: each remains the sum of the same products in the same order.

Under FSDP a device has a part of each gradient, and of the rows of a microbatch. Compilers for GPUs share an array out
along the dimension that is first in memory, so a gradient whose later dimension is divided, as of a table of tokens by
features, comes transposed: each microbatch would transpose it back, and copy the sum. Such a sum has that dimension
first; a kernel after the last microbatch transposes it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from jax.extend.core import primitives
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core.specs import axis_names, decisions, entry
from multimesh.ir import graph
from multimesh.plan.instructions import Free, Instruction, Kernel, Run
from multimesh.plan.plan import Plan


def fold_transposes(plan: Plan) -> Plan:
    """Return the plan with sums in the order in which they are made, and transposes folded into products."""
    orders = dict(_find_orders(plan))
    kernels, slots, layouts = list(plan.kernels), list(plan.slots), list(plan.layouts)
    for slot, order in orders.items():
        spec = [entry(axes) for _, axes in decisions(layouts[slot].spec, len(order))]
        slots.append(replace(slots[slot], shape=itemgetter(*order)(slots[slot].shape)))
        layouts.append(NamedSharding(layouts[slot].mesh, PartitionSpec(*itemgetter(*order)(spec))))
    instructions = tuple(_turn_sums(plan, kernels, orders)) if orders else plan.instructions
    folded = tuple(replace(k, ops=fold_products(k.ops, (*k.sums, *k.outs))) for k in kernels)
    return replace(plan, kernels=folded, slots=tuple(slots), layouts=tuple(layouts), instructions=instructions)


def _find_orders(plan: Plan) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the slots of sums of which devices that share rows have a part each, along a later dimension."""
    runs = [(plan.kernels[number], run) for number, run in plan.first_runs.items()]
    rows = [plan.layouts[n] for k, run in runs for n in run.ins[len(k.sums) + 1 : len(k.sums) + 1 + len(k.rows)]]
    shared = {axis for layout in rows for axis in axis_names(layout.spec) if layout.mesh.shape[axis] > 1}
    for slot in (slot for kernel, run in runs if kernel.make == "zeros" for slot in run.outs if slot not in plan.over):
        divided = [axes for _, axes in decisions(plan.layouts[slot].spec, len(plan.slots[slot].shape))]
        first = next((d for d, axes in enumerate(divided) if not shared.isdisjoint(axes)), 0)
        if first:
            yield slot, (first, *(d for d in range(len(divided)) if d != first))


def _turn_sums(plan: Plan, kernels: list[Kernel], orders: Mapping[int, tuple[int, ...]]) -> Iterator[Instruction]:
    """Yield the instructions with slots of their own for sums in order. Kernels make these; others turn them back."""
    new = {slot: len(plan.slots) + n for n, slot in enumerate(orders)}
    last = {run.kernel: n for n, run in enumerate(plan.instructions) if isinstance(run, Run)}
    for n, run in enumerate(plan.instructions):
        if not isinstance(run, Run) or new.keys().isdisjoint(run.outs):
            yield run
            continue
        mesh, kernel = plan.submeshes[run.submesh], plan.kernels[run.kernel]
        if kernels[run.kernel] is kernel:
            values = kernel.outs if kernel.make == "zeros" else kernel.sums
            turns = {n: _transpose(v, orders[run.outs[n]], mesh) for n, v in enumerate(values) if run.outs[n] in orders}
            turned = tuple(turns[n].outs[0] if n in turns else v for n, v in enumerate(values))
            adding = replace(kernel, ops=(*kernel.ops, *turns.values()), sums=turned)
            kernels[run.kernel] = replace(kernel, outs=turned) if kernel.make == "zeros" else adding
        ins, outs = (tuple(new.get(slot, slot) for slot in slots) for slots in (run.ins, run.outs))
        yield replace(run, ins=ins, outs=outs)
        if n == last[run.kernel] and kernel.make == "ops":
            sums = {slot: v for slot, v in zip(run.outs, kernels[run.kernel].sums, strict=False) if slot in new}
            back = (sorted(orders[slot], key=orders[slot].__getitem__) for slot in sums)
            ops = tuple(_transpose(v, order, mesh) for v, order in zip(sums.values(), back, strict=True))
            results = tuple(op.outs[0] for op in ops)
            kernels.append(Kernel("sums", run.submesh, ops, ins=tuple(sums.values()), outs=results))
            ins = tuple(new[slot] for slot in sums)
            yield Run(run.submesh, len(kernels) - 1, "sums", ins, tuple(sums))
            yield Free(run.submesh, ins)


def _transpose(value: ir.Value, order: Sequence[int], mesh: Mesh) -> ir.Op:
    result = ir.Value(value.aval.update(shape=itemgetter(*order)(value.aval.shape)))
    return ir.Op(primitives.transpose_p, {"permutation": tuple(order)}, (value,), (result,), mesh=mesh)


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
            (lhs, rhs), (lhs_batch, rhs_batch) = product.params["dimension_numbers"]
            new = {"out_sharding": None, "dimension_numbers": ((rhs, lhs), (rhs_batch, lhs_batch))}
            swapped[first] = replace(product, ins=product.ins[::-1], params=product.params | new, outs=op.outs)
            folded[op.outs[0]] = first
    return tuple(swapped.get(op.outs[0], op) if op.outs else op for op in ops if folded.keys().isdisjoint(op.outs))


def _swaps_operands(product: ir.Op, permutation: Sequence[int]) -> bool:
    """Return whether a permutation of a product's dimensions only exchanges those of its two operands."""
    layout = product.params.get("out_sharding")  # where the compiler chooses it, JAX has none or an empty one
    chosen = layout is not None and any(kind != AxisType.Auto for kind in layout.mesh.axis_types)
    precision = product.params.get("precision")  # may be a pair for the operands, or a `DotAlgorithm`
    uneven = isinstance(precision, tuple) and (precision[0], *precision[3:4]) != (precision[1], *precision[4:5])
    if product.prim.name != "dot_general" or chosen or uneven:
        return False
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = len(batch)
    second = product.ins[0].aval.ndim - len(contracted)
    count = product.outs[0].aval.ndim
    return tuple(permutation) == (*range(first), *range(second, count), *range(first, second))
