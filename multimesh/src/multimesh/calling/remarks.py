"""Checks of a finished plan, and warnings about it, at the user's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.row_blocks import numbers, repeat, split_stacks
from multimesh.core.specs import axis_names, check_fits
from multimesh.core.submesh import describe
from multimesh.core.text import amount
from multimesh.errors import UsageError
from multimesh.ir.program import all_ops
from multimesh.passes.placing.owners import find_extra_copies
from multimesh.plan.idle import idle_axes
from multimesh.plan.plan import Plan


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
        found = list(idle_axes(self.plan))
        if found:
            submesh, axis, op = found[0]
            more = f", nor do {len(found) - 1} more axes of submeshes" if len(found) > 1 else ""
            _compat.warn_at(
                _compat.user_line(op.source),
                f"axis {axis!r} of submesh {describe(self.plan.submeshes[submesh])} shards nothing{more}: its devices "
                "all compute the same; lay out an argument along it, as jax.device_put(x, NamedSharding(mesh, "
                "P(axis))), or a value in a task by with_sharding_constraint",
            )

    def check_layouts(self, given: Sequence[PartitionSpec | None], out: Mapping[int, PartitionSpec]) -> None:
        """Refuse a layout of an argument or result if no submesh has its axes, or if the array can't have it there."""
        plan = self.plan
        stacks = (*plan.stacks.arguments.values(), *plan.stacks.results.values())
        meshes = (*plan.submeshes, *(stack.mesh for stack in stacks))
        known = {axis for mesh in meshes for axis in mesh.axis_names}
        for spec in filter(None, (*given, *out.values())):
            missing = set(axis_names(spec)) - known
            if missing:
                raise UsageError(
                    f"{self.function}: in_shardings or out_shardings name axis {min(missing)!r}, which no "
                    f"submesh has; axes are {sorted(known)}"
                )
        specs = split_stacks(given, plan.stacks.arguments, repeat)
        asked = [(f"in_shardings: {self._blocks[n]}", specs[n], slot) for n, slot in plan.inputs if n < len(specs)]
        made = {n: slot for n, (kind, slot) in enumerate(plan.outputs) if kind == "slot"}
        last = max(out, default=-1) + 1
        at = numbers(last, plan.stacks.results)
        asked += [(f"out_shardings: result {n}", out[n], made[at[n][0]]) for n in out if at[n][0] in made]
        for what, spec, slot in asked:
            if spec is not None:
                check_fits(f"{self.function}: {what}", plan.slots[slot].shape, spec, plan.layouts[slot].mesh)


def check_devices(program: ir.Program, devices: Sequence[jax.Device]) -> None:
    """Refuse tasks on devices that are not among those of ``jit(devices=...)``."""
    known = set(devices)
    for op in all_ops(program):
        if op.task is not None and not known.issuperset(op.task.mesh.devices.flat):
            raise UsageError(
                f"{_compat.user_line(op.source)}: task {op.task.name!r} is on devices that are not among "
                "jit(devices=...)"
            )
