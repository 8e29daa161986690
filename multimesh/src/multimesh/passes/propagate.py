"""Over which axes of its submesh each value of a plan will be sharded, before anything is compiled.

XLA decides that. What it will decide is read off the layouts of the arguments and the sharding constraints in the
programs, carried forward through the operations: a dimension of a result has the axes of the operands' dimensions that
it goes with. What nothing speaks for counts as replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import _compat, ir
from multimesh.passes.primitives import links
from multimesh.plan import Instruction, Kernel, Plan
from multimesh.submesh import carry_over

Axes = tuple[tuple[str, ...], ...]
"""For each dimension of an array the axes of the mesh that it is divided over; axes of size one are left out."""

Known = Mapping[ir.Value, Axes]


def slot_axes(plan: Plan, specs: dict[int, PartitionSpec]) -> tuple[dict[int, Axes], dict[int, Known]]:
    """Return the axes of every slot of a plan, and for each kernel those of its values.

    Parameters
    ----------
    specs
        Of the slots that hold arguments.
    """
    given = dict(plan.inputs)
    like = {slot: specs[given[args[0]]] for slot, args in plan.like.items() if args[0] in given}
    slots = {slot: _divided(plan.layout(slot, spec)) for slot, spec in (specs | like).items()}
    kernels: dict[int, Known] = {}
    for step in plan.instructions:
        if step.kind == "SEND":
            transfer = plan.transfers[step.transfer or 0]
            slots |= {to: slots[of] for of, to in zip(transfer.ins, transfer.outs, strict=True) if of in slots}
        elif step.kind == "RUN" and step.kernel is not None:
            kernel = plan.kernels[step.kernel]
            if step.kernel not in kernels:
                kernels[step.kernel] = _kernel_axes(kernel, step, slots, plan.submeshes[kernel.submesh])
            for value, slot in zip((*kernel.sums, *kernel.outs), step.outs, strict=True):
                slots.setdefault(slot, kernels[step.kernel].get(value, ()))
    return slots, kernels


def ways(axes: Axes, mesh: Mesh) -> int:
    """Into how many parts an array is divided."""
    return math.prod(mesh.shape[axis] for names in axes for axis in names)


def _divided(layout: NamedSharding) -> Axes:
    named = ((e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in layout.spec)
    return tuple(tuple(axis for axis in names if layout.mesh.shape[axis] > 1) for names in named)


def _kernel_axes(kernel: Kernel, step: Instruction, slots: Mapping[int, Axes], mesh: Mesh) -> Known:
    given = [slots.get(slot, ()) for slot in step.ins[len(kernel.sums) :]]
    known: dict[ir.Value, Axes] = {}
    if kernel.rows:
        given.pop(0)  # the microbatch number
        known |= {value: given.pop(0)[1:] for value in kernel.rows}
    known |= zip(kernel.ins, given, strict=True)
    return propagate(kernel.ops, known, mesh)


def propagate(ops: Iterable[ir.Op], known: Known, mesh: Mesh) -> dict[ir.Value, Axes]:
    """Return the axes of what the operations make and of what was known before."""
    found = dict(known)
    for op in ops:
        found |= zip(op.outs, (_fitting(axes, out, mesh) for axes, out in _results(op, found, mesh)), strict=True)
    return found


@dataclass(frozen=True)
class Inner:
    """A program that an operation runs, once or in a scan; ``known`` are the axes of its inputs."""

    ops: tuple[ir.Op, ...]
    outputs: tuple[ir.Atom, ...]
    known: Known


def inside(op: ir.Op, known: Known) -> Inner | None:
    """Return the program that an operation runs; None for an operation that runs none, or several."""
    closed = op.params.get("jaxpr") or op.params.get("call_jaxpr")
    if closed is None or op.prim.name == "while":
        return None
    jaxpr = getattr(closed, "jaxpr", closed)
    values = {v: ir.Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
    ops = []
    for eqn in jaxpr.eqns:
        ins = tuple(v if isinstance(v, _compat.Literal) else values[v] for v in eqn.invars)
        values |= {v: ir.Value(v.aval) for v in eqn.outvars}
        ops.append(ir.Op(eqn.primitive, eqn.params, ins, tuple(values[v] for v in eqn.outvars)))
    outputs = tuple(v if isinstance(v, _compat.Literal) else values[v] for v in jaxpr.outvars)
    whole = len(op.ins) if op.prim.name != "scan" else op.params["num_consts"] + op.params["num_carry"]
    given = [known.get(atom, ()) for atom in op.ins]  # of the rest, a scan takes a row at a time
    axes = [names if i < whole else names[1:] for i, names in enumerate(given)]
    return Inner(tuple(ops), outputs, dict(zip((values[v] for v in jaxpr.invars), axes, strict=True)))


def _results(op: ir.Op, known: Known, mesh: Mesh) -> list[tuple[Axes, ir.Value]]:
    sharding = op.params.get("sharding")
    if op.prim is _compat.sharding_constraint_p and isinstance(sharding, NamedSharding):
        return [(_divided(carry_over(sharding.spec, out.aval.shape, mesh)), out) for out in op.outs]
    nested = inside(op, known)
    if nested is not None:
        found = propagate(nested.ops, nested.known, mesh)
        whole = len(op.outs) if op.prim.name != "scan" else op.params["num_carry"]
        axes = [found.get(v, ()) if isinstance(v, ir.Value) else () for v in nested.outputs]
        return [(a if i < whole else ((), *a), out) for i, (a, out) in enumerate(zip(axes, op.outs, strict=True))]
    return [(axes, out) for out, axes in _carried(op, known).items()]


def _carried(op: ir.Op, known: Known) -> dict[ir.Value, Axes]:
    """Of results whose dimensions go with some of the operands'; where no rule says which, with those of equal size."""
    result: dict[ir.Value, list[tuple[str, ...]]] = {out: [()] * len(_shape(out)) for out in op.outs}
    for group in list(links(op)) or _alike(op):
        axes = next((known[v][d] for v, d in group if v in known and d < len(known[v]) and known[v][d]), ())
        for v, d in group:
            if v in result:
                result[v][d] = axes
    return {out: tuple(axes) for out, axes in result.items()}


def _alike(op: ir.Op) -> Iterable[Sequence[tuple[ir.Value, int]]]:
    for out in op.outs:
        shape = _shape(out)
        operands = [v for v in op.reads if len(_shape(v)) == len(shape)]
        yield from ([(out, d), *((v, d) for v in operands if _shape(v)[d] == n)] for d, n in enumerate(shape))


def _shape(value: ir.Value) -> tuple[int, ...]:
    return tuple(getattr(value.aval, "shape", ()))


def _fitting(axes: Axes, value: ir.Value, mesh: Mesh) -> Axes:
    """An axis divides one dimension, and without a rest."""
    taken: set[str] = set()
    found = []
    for names, size in zip(axes, _shape(value), strict=False):
        fits = taken.isdisjoint(names) and size % ways((names,), mesh) == 0
        found.append(names if fits else ())
        taken.update(found[-1])
    return tuple(found)
