"""Over which axes of its submesh each value of a plan will be sharded, before anything is compiled.

XLA decides that. What it will decide is read off the layouts of the arguments and the sharding constraints in the
program, carried through the operations: a product keeps the axes of the dimensions that it does not sum over, an
element-wise operation those of its operands, and so on. What nothing speaks for counts as replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.plan import Instruction, Kernel, Plan
from multimesh.submesh import carry_over

Axes = tuple[tuple[str, ...], ...]
"""For each dimension of an array the axes of the mesh that it is divided over."""


def axes_of(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> Axes:
    """Return how a spec divides an array on a mesh; axes of size one are left out."""
    return _divided(carry_over(spec, shape, mesh), len(shape))


def _divided(layout: NamedSharding, rank: int) -> Axes:
    named = ((e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in layout.spec)
    axes = [tuple(axis for axis in names if layout.mesh.shape[axis] > 1) for names in named]
    return (*axes, *[()] * (rank - len(axes)))


def ways(axes: Axes, mesh: Mesh) -> int:
    """Return into how many parts an array is divided."""
    return math.prod(mesh.shape[axis] for names in axes for axis in names)


def slot_axes(plan: Plan, specs: Sequence[PartitionSpec]) -> tuple[dict[int, Axes], dict[int, dict[ir.Value, Axes]]]:
    """Return the axes of every slot of a plan, and for each kernel those of its values.

    Parameters
    ----------
    specs
        Of each argument leaf.
    """
    slots: dict[int, Axes] = {}
    for arg, slot in plan.inputs:
        slots[slot] = _on(plan, slot, specs[arg])
    for slot, args in plan.like.items():
        slots[slot] = _on(plan, slot, specs[args[0]])
    kernels: dict[int, dict[ir.Value, Axes]] = {}
    for step in plan.instructions:
        if step.kind == "SEND":
            transfer = plan.transfers[step.transfer or 0]
            slots |= {to: slots[of] for of, to in zip(transfer.ins, transfer.outs, strict=True) if of in slots}
        elif step.kind == "RUN" and step.kernel is not None:
            kernel = plan.kernels[step.kernel]
            if step.kernel not in kernels:
                kernels[step.kernel] = _kernel_axes(plan, kernel, step, slots)
            made = (*kernel.sums, *kernel.outs)
            for value, slot in zip(made, step.outs, strict=True):
                slots.setdefault(slot, kernels[step.kernel].get(value, _whole(plan.slots[slot].shape)))
    return slots, kernels


def _on(plan: Plan, slot: int, spec: PartitionSpec) -> Axes:
    return _divided(plan.layout(slot, spec), len(plan.slots[slot].shape))


def _whole(shape: Sequence[int]) -> Axes:
    return ((),) * len(shape)


def _kernel_axes(plan: Plan, kernel: Kernel, step: Instruction, slots: Mapping[int, Axes]) -> dict[ir.Value, Axes]:
    given = [slots.get(slot, _whole(plan.slots[slot].shape)) for slot in step.ins[len(kernel.sums) :]]
    known: dict[ir.Value, Axes] = {}
    if kernel.rows:
        given.pop(0)  # the microbatch number
        known |= {value: given.pop(0)[1:] for value in kernel.rows}
    known |= dict(zip(kernel.ins, given, strict=True))
    mesh = plan.submeshes[kernel.submesh]
    for op in kernel.ops:
        operands = [
            known.get(i, _whole(i.aval.shape)) if isinstance(i, ir.Value) else _whole(i.aval.shape) for i in op.ins
        ]
        shapes = [i.aval.shape for i in op.ins]
        results = carried(op.prim.name, op.params, operands, shapes, [o.aval.shape for o in op.outs], mesh)
        known |= zip(op.outs, results, strict=True)
    return known


def carried(
    name: str,
    params: Mapping[str, Any],
    operands: Sequence[Axes],
    shapes: Sequence[tuple[int, ...]],
    outs: Sequence[tuple[int, ...]],
    mesh: Mesh,
) -> list[Axes]:
    """Return the axes of an operation's results, given those of its operands and all shapes."""
    if name == "sharding_constraint" and isinstance(params.get("sharding"), NamedSharding):
        return [axes_of(params["sharding"].spec, outs[0], mesh)]
    inner = nested(name, params)
    if inner is not None:
        return _results(name, params, inner, operands, mesh)
    rule = _RULES.get(name)
    if rule is not None and len(outs) == 1:
        return [_fitting(rule(params, operands, shapes, outs[0]), outs[0], mesh)]
    return [_fitting(_alike(operands, shapes, out), out, mesh) for out in outs]


def _fitting(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> Axes:
    """An axis divides one dimension, and without a rest."""
    taken: set[str] = set()
    found = []
    for names, size in zip(axes, shape, strict=True):
        fits = taken.isdisjoint(names) and size % ways((names,), mesh) == 0
        found.append(names if fits else ())
        taken.update(found[-1])
    return tuple(found)


def _alike(operands: Sequence[Axes], shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> Axes:
    """Of operands with as many dimensions, those of equal size: element-wise operations, slices, concatenation."""
    best = list(_whole(out))
    for parts, shape in zip(operands, shapes, strict=True):
        if len(shape) == len(out):
            best = [b or p if s == o else b for b, p, s, o in zip(best, parts, shape, out, strict=True)]
    return tuple(best)


def _product(params: Mapping[str, Any], operands: Sequence[Axes], _shapes: Any, _out: Any) -> Axes:
    (sum_left, sum_right), (batch_left, batch_right) = params["dimension_numbers"]
    left, right = operands
    batch = [left[i] or right[j] for i, j in zip(batch_left, batch_right, strict=True)]
    free_left = [names for i, names in enumerate(left) if i not in (*sum_left, *batch_left)]
    free_right = [names for i, names in enumerate(right) if i not in (*sum_right, *batch_right)]
    return (*batch, *free_left, *free_right)


def _reduced(params: Mapping[str, Any], operands: Sequence[Axes], _shapes: Any, _out: Any) -> Axes:
    return tuple(p for i, p in enumerate(operands[0]) if i not in params["axes"])


def _broadcast(params: Mapping[str, Any], operands: Sequence[Axes], shapes: Any, out: tuple[int, ...]) -> Axes:
    found = list(_whole(out))
    for i, dim in enumerate(params["broadcast_dimensions"]):
        if shapes[0][i] == out[dim]:
            found[dim] = operands[0][i]
    return tuple(found)


def _reshaped(_params: Any, operands: Sequence[Axes], shapes: Any, out: tuple[int, ...]) -> Axes:
    """A group of dimensions that is merged or split keeps the axes of its first."""
    found = list(_whole(out))
    starts = {math.prod(shapes[0][:i]): part for i, part in reversed(list(enumerate(operands[0])))}
    for i in range(len(out)):
        found[i] = starts.pop(math.prod(out[:i]), ())
    return tuple(found)


def _permuted(params: Mapping[str, Any], operands: Sequence[Axes], _shapes: Any, _out: Any) -> Axes:
    return tuple(operands[0][i] for i in params["permutation"])


def _squeezed(params: Mapping[str, Any], operands: Sequence[Axes], _shapes: Any, _out: Any) -> Axes:
    return tuple(p for i, p in enumerate(operands[0]) if i not in params["dimensions"])


def _gathered(params: Mapping[str, Any], operands: Sequence[Axes], _shapes: Any, out: tuple[int, ...]) -> Axes:
    """Rows of a table: the dimensions of the indices come from the indices."""
    offsets = params["dimension_numbers"].offset_dims
    indices = list(operands[1][:-1])
    return tuple(() if i in offsets or not indices else indices.pop(0) for i in range(len(out)))


_RULES: dict[str, Callable[..., Axes]] = {
    "dot_general": _product,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "transpose": _permuted,
    "squeeze": _squeezed,
    "gather": _gathered,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and", "argmax", "argmin"),
        _reduced,
    ),
}


def nested(name: str, params: Mapping[str, Any]) -> Any:
    """Return the jaxpr that an operation evaluates, once or in a scan; ``None`` for one that has none or several."""
    closed = params.get("jaxpr") or params.get("call_jaxpr")
    return getattr(closed, "jaxpr", closed) if name != "while" else None


def given(name: str, params: Mapping[str, Any], jaxpr: Any, operands: Sequence[Axes]) -> dict[Any, Axes]:
    """Return the axes of a nested jaxpr's inputs; a scan takes rows of some of its operands."""
    fixed = params["num_consts"] + params["num_carry"] if name == "scan" else len(operands)
    return {v: p if i < fixed else p[1:] for i, (v, p) in enumerate(zip(jaxpr.invars, operands, strict=True))}


def _results(name: str, params: Mapping[str, Any], jaxpr: Any, operands: Sequence[Axes], mesh: Mesh) -> list[Axes]:
    known = given(name, params, jaxpr, operands)
    evaluate(jaxpr, known, mesh)
    results = [known.get(v, _whole(v.aval.shape)) if _is_variable(v) else _whole(v.aval.shape) for v in jaxpr.outvars]
    carry = params["num_carry"] if name == "scan" else len(results)
    return [p if i < carry else ((), *p) for i, p in enumerate(results)]


def evaluate(jaxpr: Any, known: dict[Any, Axes], mesh: Mesh) -> None:
    """Add the axes of every variable of a jaxpr to those of its inputs."""
    for eqn in jaxpr.eqns:
        operands = [known.get(v, _whole(v.aval.shape)) if _is_variable(v) else _whole(v.aval.shape) for v in eqn.invars]
        shapes = [v.aval.shape for v in eqn.invars]
        outs = [v.aval.shape for v in eqn.outvars]
        known |= zip(eqn.outvars, carried(eqn.primitive.name, eqn.params, operands, shapes, outs, mesh), strict=True)


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")
