"""Checks of a finished plan, and warnings about it, at the user's line."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.calling.arguments import Layout, spec_in
from multimesh.core import _compat
from multimesh.core.specs import axis_names, check_fits
from multimesh.core.submesh import describe
from multimesh.core.text import amount
from multimesh.errors import UsageError
from multimesh.ir.program import all_ops
from multimesh.passes.placing.owners import find_extra_copies
from multimesh.plan.plan import Plan
from multimesh.stacked.row_blocks import numbers, repeat, split_stacks

_WORK = ("dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call")
_ALL = ("shard_map", "custom_partitioning")  # operations that use axes in ways of their own


def warn_of_costs(
    function: str, plan: Plan, names: Sequence[str], donated: Collection[int], placed: ir.Program
) -> None:
    """Warn of what costs more than it need, at the user's line; ``names`` are those of argument leaves.

    Of stacks whose rows lie or go elsewhere; of donated leaves that a kernel reads and no result replaces, as JAX does;
    of arguments that an operation outside of tasks places on one more submesh; of axes that lay out nothing.
    """
    line, blocks = _compat.caller_line(), split_stacks(names, plan.stacks.arguments, repeat)
    for number, why in plan.stacks.remarks.items():
        _compat.warn_at(line, f"{names[number]}: {why}")
    if lost := [names[leaf] for leaf in _find_lost_donations(plan, len(names), donated)]:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        _compat.warn_at(
            line,
            f"{function}: {', '.join(lost[:3])}{more} donated, but no result of its type on its submesh can take over "
            "the buffer; return what replaces it, or leave it out of donate_argnums=",
        )
    for argument, meshes, op in find_extra_copies(placed):
        size = amount(placed.inputs[argument].nbytes, "bytes")
        _compat.warn_at(
            _compat.user_line(op.source),
            f"{blocks[argument]} ({size}) lies on {len(meshes)} submeshes: outside of tasks, {op.prim.name} reads it "
            f"on {describe(meshes[-1])} too; make that part of a task on the submesh that it belongs to",
        )
    if axes := sorted(_idle_axes(plan), key=lambda idle: idle[0]):  # a batch goes to the first submesh
        submesh, axis, op = axes[0]
        more = f", nor do {len(axes) - 1} more axes of submeshes" if len(axes) > 1 else ""
        _compat.warn_at(
            _compat.user_line(op.source),
            f"axis {axis!r} of submesh {describe(plan.submeshes[submesh])} shards nothing{more}: its devices all "
            "compute the same; lay out an argument that it reads first, as jax.device_put(x, NamedSharding(mesh, "
            f"P({axis!r}))) with its mesh, or a value in a task by with_sharding_constraint",
        )


def _find_lost_donations(plan: Plan, count: int, donated: Collection[int]) -> Iterator[int]:
    replaced = {arg for args in plan.like.values() for arg in args}
    replaced |= {arg for kind, arg in plan.outputs if kind == "arg"}
    sizes = {arg: math.prod(plan.slots[slot].shape) for arg, slot in plan.inputs}
    blocks = numbers(count, plan.stacks.arguments)
    for leaf in sorted(donated):
        if replaced.isdisjoint(blocks[leaf]) and all(sizes.get(n, 0) > 1 for n in blocks[leaf]):
            yield leaf


def check_layouts(
    function: str, plan: Plan, names: Sequence[str], entries: Sequence[Layout], out: Mapping[int, PartitionSpec]
) -> None:
    """Refuse a layout of an argument or result if no submesh has its axes, or if the array can't have it there."""
    in_specs, arguments = [*map(spec_in, entries)], plan.stacks.arguments
    stacks = (*arguments.values(), *plan.stacks.results.values())
    axes = {axis for mesh in (*plan.submeshes, *(stack.mesh for stack in stacks)) for axis in mesh.axis_names}
    for spec in filter(None, (*in_specs, *out.values())):
        if missing := set(axis_names(spec)) - axes:
            raise UsageError(
                f"{function}: in_shardings or out_shardings name axis {min(missing)!r}, which no submesh has; axes are "
                f"{sorted(axes)}"
            )
    specs, blocks = split_stacks(in_specs, arguments, repeat), split_stacks(names, arguments, repeat)
    requests = [(f"in_shardings: {blocks[n]}", specs[n], slot) for n, slot in plan.inputs if n < len(specs)]
    at = numbers(max(out, default=-1) + 1, plan.stacks.results)
    results = [(n, spec, plan.outputs[at[n][0]]) for n, spec in out.items()]
    requests += [(f"out_shardings: result {n}", spec, slot) for n, spec, (kind, slot) in results if kind == "slot"]
    for place, spec, slot in requests:
        if spec is not None:
            check_fits(f"{function}: {place}", plan.slots[slot].shape, spec, plan.layouts[slot].mesh)


def refuse_other_devices(program: ir.Program, devices: Sequence[jax.Device]) -> None:
    """Refuse tasks on devices that are not among those of ``jit(devices=...)``."""
    allowed = set(devices)
    for op in all_ops(program):
        if op.task is not None and not allowed.issuperset(op.task.mesh.devices.flat):
            raise UsageError(
                f"{_compat.user_line(op.source)}: task {op.task.name!r} is on devices that are not among "
                "jit(devices=...)"
            )


def _idle_axes(plan: Plan) -> Iterator[tuple[int, str, Any]]:
    """Yield (submesh, axis, operation) for each axis of several devices along which a submesh shards nothing.

    The operation is the first matrix product or convolution of the submesh; without one it has no work to share.
    """
    used: list[set[str]] = [set() for _ in plan.submeshes]
    for slot, layout in zip(plan.slots, plan.layouts, strict=True):
        used[slot.submesh].update(axis_names(layout.spec))
    first: dict[int, Any] = {}
    for kernel in plan.kernels:
        axes = used[kernel.submesh]
        for op in kernel.ops:
            for prim, params in _with_inner(op.prim, op.params):
                if prim.name in _WORK:
                    first.setdefault(kernel.submesh, op)
                axes.update(plan.submeshes[kernel.submesh].axis_names if prim.name in _ALL else _axes_in(params))
    for submesh, op in first.items():
        for axis, size in plan.submeshes[submesh].shape.items():
            if size > 1 and axis not in used[submesh]:
                yield submesh, axis, op


def _with_inner(prim: Any, params: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the primitive and parameters of an operation, and of those inside of it."""
    yield prim, params
    for jaxpr in _compat.subjaxprs(params):
        for eqn in jaxpr.eqns:
            yield from _with_inner(eqn.primitive, eqn.params)


def _axes_in(params: dict[str, Any]) -> Iterator[str]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            spec = item.spec if isinstance(item, NamedSharding) else item
            if isinstance(spec, PartitionSpec):
                yield from axis_names(spec)
