"""Checks of a finished plan, and warnings about it, at the user's line."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import axis_names, check_fits
from multimesh.core.submesh import describe
from multimesh.core.text import amount
from multimesh.errors import UsageError
from multimesh.ir.program import all_ops
from multimesh.passes.placing.owners import find_extra_copies
from multimesh.plan.instructions import PlanData
from multimesh.plan.plan import Plan
from multimesh.stacked.row_blocks import numbers, repeat, split_stacks

_WORK = ("dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call")
_ALL = ("shard_map", "custom_partitioning")  # operations that use axes in ways of their own


@dataclass(frozen=True, eq=False)
class Remarks:
    """A plan, with the names of the function and of its argument leaves in messages."""

    function: str
    plan: Plan
    names: tuple[str, ...]

    @property
    def _blocks(self) -> list[str]:
        """Names of argument leaves, with the name of a stack for each of its blocks."""
        return split_stacks(self.names, self.plan.stacks.arguments, repeat)

    def warn_of_stacks(self) -> None:
        """Warn of arguments whose rows belong to several submeshes, and that lie or go elsewhere."""
        for number, why in self.plan.stacks.remarks.items():
            _compat.warn_at(_compat.caller_line(), f"{self.names[number]}: {why}")

    def warn_of_donations(self, donated: Collection[int]) -> None:
        """Warn of donated leaves that a kernel reads, and that no result replaces in their buffers, as JAX does."""
        plan = self.plan
        replaced = {arg for args in plan.like.values() for arg in args}
        replaced |= {arg for kind, arg in plan.outputs if kind == "arg"}
        sizes = {arg: math.prod(plan.slots[slot].shape) for arg, slot in plan.inputs}
        blocks = numbers(len(self.names), plan.stacks.arguments)
        lost = [
            self.names[leaf]
            for leaf in sorted(donated)
            if replaced.isdisjoint(blocks[leaf]) and all(sizes.get(n, 0) > 1 for n in blocks[leaf])
        ]
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            _compat.warn_at(
                _compat.caller_line(),
                f"{self.function}: {', '.join(lost[:3])}{more} donated, but no result of its type on its submesh can "
                "take over the buffer; return what replaces it, or leave it out of donate_argnums=",
            )

    def warn_of_copies(self, placed: ir.Program) -> None:
        """Warn of arguments that an operation outside of tasks places on one more submesh."""
        for argument, meshes, op in find_extra_copies(placed):
            size = amount(placed.inputs[argument].nbytes, "bytes")
            _compat.warn_at(
                _compat.user_line(op.source),
                f"{self._blocks[argument]} ({size}) lies on {len(meshes)} submeshes: outside of tasks, {op.prim.name} "
                f"reads it on {describe(meshes[-1])} too; make that part of a task on the submesh that it belongs to",
            )

    def warn_of_idle_axes(self) -> None:
        """Warn of axes of submeshes along which nothing is laid out."""
        axes = sorted(idle_axes(self.plan), key=lambda idle: idle[0])  # a batch goes to the first submesh
        if axes:
            submesh, axis, op = axes[0]
            more = f", nor do {len(axes) - 1} more axes of submeshes" if len(axes) > 1 else ""
            _compat.warn_at(
                _compat.user_line(op.source),
                f"axis {axis!r} of submesh {describe(self.plan.submeshes[submesh])} shards nothing{more}: its devices "
                f"all compute the same; lay out an argument that it reads first, as jax.device_put(x, "
                f"NamedSharding(mesh, P({axis!r}))) with its mesh, or a value in a task by with_sharding_constraint",
            )

    def check_layouts(self, in_specs: Sequence[PartitionSpec | None], out: Mapping[int, PartitionSpec]) -> None:
        """Refuse a layout of an argument or result if no submesh has its axes, or if the array can't have it there."""
        plan = self.plan
        stacks = (*plan.stacks.arguments.values(), *plan.stacks.results.values())
        meshes = (*plan.submeshes, *(stack.mesh for stack in stacks))
        axes = {axis for mesh in meshes for axis in mesh.axis_names}
        for spec in filter(None, (*in_specs, *out.values())):
            missing = set(axis_names(spec)) - axes
            if missing:
                raise UsageError(
                    f"{self.function}: in_shardings or out_shardings name axis {min(missing)!r}, which no "
                    f"submesh has; axes are {sorted(axes)}"
                )
        specs = split_stacks(in_specs, plan.stacks.arguments, repeat)
        requests = [(f"in_shardings: {self._blocks[n]}", specs[n], slot) for n, slot in plan.inputs if n < len(specs)]
        slots = {n: slot for n, (kind, slot) in enumerate(plan.outputs) if kind == "slot"}
        last = max(out, default=-1) + 1
        at = numbers(last, plan.stacks.results)
        requests += [(f"out_shardings: result {n}", out[n], slots[at[n][0]]) for n in out if at[n][0] in slots]
        for place, spec, slot in requests:
            if spec is not None:
                check_fits(f"{self.function}: {place}", plan.slots[slot].shape, spec, plan.layouts[slot].mesh)


def refuse_other_devices(program: ir.Program, devices: Sequence[jax.Device]) -> None:
    """Refuse tasks on devices that are not among those of ``jit(devices=...)``."""
    allowed = set(devices)
    for op in all_ops(program):
        if op.task is not None and not allowed.issuperset(op.task.mesh.devices.flat):
            raise UsageError(
                f"{_compat.user_line(op.source)}: task {op.task.name!r} is on devices that are not among "
                "jit(devices=...)"
            )


def idle_axes(plan: PlanData) -> Iterator[tuple[int, str, Any]]:
    """Yield (submesh, axis, operation) for each axis of several devices along which a submesh shards nothing.

    The operation is the first matrix product or convolution of the submesh; without one it has no work to share.
    """
    used: list[set[str]] = [set() for _ in plan.submeshes]
    for slot, layout in zip(plan.slots, plan.layouts, strict=True):
        used[slot.submesh].update(axis_names(layout.spec))
    first: dict[int, Any] = {}
    for kernel in plan.kernels:
        for op in kernel.ops:
            used[kernel.submesh].update(_axes(op.prim, op.params, plan.submeshes[kernel.submesh].axis_names))
            if kernel.submesh not in first and _works(op.prim, op.params):
                first[kernel.submesh] = op
    for submesh, op in first.items():
        for axis, size in plan.submeshes[submesh].shape.items():
            if size > 1 and axis not in used[submesh]:
                yield submesh, axis, op


def _works(prim: Any, params: dict[str, Any]) -> bool:
    inner = (eqn for jaxpr in _compat.subjaxprs(params) for eqn in jaxpr.eqns)
    return prim.name in _WORK or any(_works(eqn.primitive, eqn.params) for eqn in inner)


def _axes(prim: Any, params: dict[str, Any], all_axes: Iterable[str]) -> Iterator[str]:
    """Yield the axes that an operation names, or one inside of it."""
    if prim.name in _ALL:
        yield from all_axes
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, NamedSharding):
                yield from axis_names(item.spec)
            elif isinstance(item, PartitionSpec):
                yield from axis_names(item)
    for jaxpr in _compat.subjaxprs(params):
        for eqn in jaxpr.eqns:
            yield from _axes(eqn.primitive, eqn.params, all_axes)
