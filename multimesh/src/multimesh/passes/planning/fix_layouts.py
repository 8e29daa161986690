"""Fixes the layout of every slot of a plan before anything is compiled.

Arguments, results and what replaces arguments have the layout that was asked for. Elsewhere a result takes the axes of
the constraint that it reaches through cheap operations and scales, then those of its operands (`primitives.links`) in
the order of the plan; what is still open takes those of its readers. Where one axis divides two operands and the result
can have it once, that operand keeps it which has it as the sum over microbatches to which the result is added, or else
the one with more bytes on a device, so that the compiler gathers the other; a broadcast has the bytes of its operand,
and what the kernel gathered before, for another operation, has none. Layouts never change a result, but the compiler
must obey those of a kernel's results: a wrong one costs collectives, time and memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import Axes, axes_of, decisions, entry, size, strip
from multimesh.ir.axes import Array, Dimension, constraint, find_constraints, join, link_dimensions, spread
from multimesh.ir.primitives import Group, is_cheap
from multimesh.plan.instructions import Kernel, Run, Send
from multimesh.plan.plan import Plan

ValueAxes = Mapping[ir.Value, tuple[Axes, ...]]
"""For each dimension of values the axes of the mesh that it is divided over; axes of size one are left out."""

_PARTS = frozenset(("slice", "split", "dynamic_slice", "pad", "concatenate"))
"""Operations whose results have other sizes: the compiler divides what is left of a divided dimension too."""


def ways(axes: Iterable[Axes], mesh: Mesh) -> int:
    """Return the number of shards into which the axes divide an array."""
    return size(mesh, tuple(itertools.chain(*axes)))


def fix_layouts(
    plan: Plan,
    specs: Sequence[PartitionSpec | None],
    out_specs: Mapping[int, PartitionSpec],
    types: Mapping[int, PartitionSpec],
) -> tuple[NamedSharding, ...]:
    """Return the layout of every slot, from the specs of argument leaves and those that result leaves must have.

    ``types`` has the specs that types of result leaves say, for Explicit axes.
    An argument has its spec on each submesh that reads it; None is what was derived for it there, or else replicated.
    """
    pinned = _pin_layouts(plan, specs, out_specs, types)
    slots = _Slots(plan, pinned)
    layouts = []
    for number, slot in enumerate(plan.slots):
        spec = strip(PartitionSpec(*map(entry, slots.array[number].divided)))
        layout = pinned.get(number) or NamedSharding(plan.submeshes[slot.submesh], spec)
        layouts.append(layout if slot.memory is None else layout.with_memory_kind(slot.memory))
    return tuple(layouts)


def kernel_axes(plan: Plan) -> tuple[dict[int, ValueAxes], Mapping[int, Array], Mapping[ir.Op, Inner]]:
    """Return the axes of the values of every kernel, the array of every slot, and the jaxprs that operations run."""
    slots = _Slots(plan, dict(enumerate(plan.layouts)))
    values: dict[int, ValueAxes]
    values = {k: {v: array.divided for v, array in env.items()} for k, env in slots.values.items()}
    return values, slots.array, slots.bodies


def _pin_layouts(
    plan: Plan,
    specs: Sequence[PartitionSpec | None],
    out_specs: Mapping[int, PartitionSpec],
    types: Mapping[int, PartitionSpec],
) -> dict[int, NamedSharding]:
    """Map slots whose layout does not follow from operands to their layout."""

    def argument_spec(arg: int, slot: int) -> PartitionSpec:
        spec = plan.derived.get((arg, plan.slots[slot].submesh), specs[arg])
        return PartitionSpec() if spec is None else spec

    pinned = {slot: plan.layout(slot, argument_spec(arg, slot)) for arg, slot in plan.inputs}
    pinned |= {slot: plan.layout(slot, PartitionSpec()) for _, slot in plan.constants}
    fixed = set(pinned)
    zeros = {k for k, kernel in enumerate(plan.kernels) if kernel.make == "zeros"}
    sums = {slot for run in plan.runs if run.kernel in zeros for slot in run.outs}
    pinned |= {slot: plan.layout(slot, PartitionSpec()) for slot in sums}
    for slot, args in plan.like.items():
        agreed = {plan.layout(slot, spec) for spec in {argument_spec(arg, slot) for arg in args} or {PartitionSpec()}}
        if len(agreed) == 1 and slot not in fixed:
            pinned[slot] = agreed.pop()
    states = {s for run in plan.runs if run.cell for s in run.outs} - sums  # these keep one layout in all microbatches
    for position, spec in (*types.items(), *out_specs.items()):
        kind, slot = plan.outputs[position]
        if kind == "slot" and slot not in fixed | states:
            layout = plan.layout(slot, spec)
            pinned[slot] = layout if position in out_specs else _fit_type(layout, pinned.get(slot))
    return pinned


def _fit_type(layout: NamedSharding, derived: NamedSharding | None) -> NamedSharding:
    """Return a layout on Explicit axes with the Auto axes of the derived one, where it leaves dimensions open."""
    kinds = zip(layout.mesh.axis_names, layout.mesh.axis_types, strict=True)
    auto = {name for name, kind in kinds if kind == AxisType.Auto}
    if derived is None or not auto:
        return layout
    pairs = itertools.zip_longest(*([axes_of(e) for e in s.spec] for s in (layout, derived)), fillvalue=())
    merged = (entry(axes or tuple(axis for axis in other if axis in auto)) for axes, other in pairs)
    return NamedSharding(layout.mesh, strip(PartitionSpec(*merged)))


@dataclass(frozen=True)
class Inner:
    """A jaxpr that an operation runs: once, or in every iteration of a loop."""

    ops: tuple[ir.Op, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Atom, ...]


class Flow:
    """A propagation of axes: forward through operations, then from users to operands that are still open."""

    def __init__(self) -> None:
        self._all: list[Array] = []
        self._origin: dict[ir.Value, int] = {}  # bytes of a value, or of what cheap operations make it of if fewer
        self._root: dict[ir.Value, ir.Value] = {}  # what cheap operations make a value of, if that is one value
        self.gathers: set[tuple[ir.Value, Axes]] = set()  # of roots, by the operations of a kernel so far
        self.bodies: dict[ir.Op, Inner] = {}

    def new(self, value: Any, mesh: Mesh) -> Array:
        """Return an array of which nothing is known. ``value`` has a shape, or an aval that has one."""
        self._all.append(Array(getattr(getattr(value, "aval", value), "shape", ()), mesh, 2))
        return self._all[-1]

    def join_arrays(self, source: Array, target: Array, shift: int = 0) -> None:
        """Join the dimensions of two arrays that hold the same values.

        With a ``shift`` of 1 the target has the source as rows, with -1 the reverse.
        """
        for d in range(max(0, -shift), len(source.shape)):
            self._flow([(source, d)], [(target, d + shift)])

    def _flow(self, sources: Sequence[Dimension], targets: Sequence[Dimension]) -> None:
        """Let dimensions of results take the axes of operands. The operand that is divided most decides."""
        operand_axes = [(axes, size(array.mesh, axes)) for array, d in sources if (axes := array.axes[d])]
        operand_axes.sort(key=lambda pair: -pair[1])
        for array, d in targets:
            if (array, d) not in sources:
                any(array.take(d, axes) for axes, _ in operand_axes)
            join([(array, d), *sources])

    def fill(self) -> None:
        """Propagate axes to open dimensions, from results to operands too."""
        spread([(array, d) for array in self._all for d, axes in enumerate(array.axes) if axes])

    def operations(
        self, ops: Sequence[ir.Op], env: dict[ir.Value, Array], mesh: Mesh, sums: Mapping[ir.Value, Array] | None = None
    ) -> None:
        """Propagate axes forward through operations. ``env`` has their operands and receives their results.

        ``sums`` has the arrays to which results are added.
        """
        nearest, added = find_constraints(ops), find_constraints(ops, sums) if sums else {}
        for op in ops:
            ins = [env[atom] if isinstance(atom, ir.Value) else None for atom in op.ins]
            outs = [self.new(out, mesh) for out in op.outs]
            env.update(zip(op.outs, outs, strict=True))
            for value, out in zip(op.outs, outs, strict=True):
                if is_cheap(op.prim):
                    sizes = (self._origin.get(v, v.nbytes) for v in op.reads)
                    self._origin[value] = min(value.nbytes, max(sizes, default=0))
                    if len(reads := set(op.reads)) == 1:
                        first = reads.pop()
                        self._root[value] = self._root.get(first, first)
                for d, axes in nearest.get(value, ()):
                    out.take(d, out.present(axes))
            fixed = constraint(op)
            if fixed is not None and ins[0] is not None:
                outs[0].decide(fixed)
                self.join_arrays(ins[0], outs[0])
            elif op.prim.name == "shard_map":
                for out, spec in zip(outs, op.params["out_specs"], strict=True):
                    out.decide(decisions(spec, len(out.shape)))
                self._body(op, op.params["jaxpr"], [None] * len(ins), env, mesh)  # of the parts that a device has
            elif op.prim.name == "cond":
                for branch in op.params["branches"]:
                    self._leave(self._body(op, branch, ins[1:], env, mesh), outs)
            elif op.prim.name in ("scan", "while"):
                self._loop(op, ins, outs, env, mesh)
            elif (called := _find_body(op)) is not None:
                self._leave(self._body(op, called, ins, env, mesh), outs)
            else:
                results = set(op.outs)
                groups = link_dimensions(op)
                others = results.union([*op.reads][:1] if op.prim.name == "gather" else ())  # rows lie as their numbers
                sums_axes = {(o, d): axes for o in op.outs for d, axes in added.get(o, ())}
                for group in sorted(
                    groups,
                    key=lambda group: (
                        not any(
                            sums_axes.get(at) == env[v].axes[d] for at in group for v, d in group if v not in results
                        ),
                        -self._gathered(group, env, others),
                    ),
                ):
                    nodes = [(env[atom], d) for atom, d in group if atom not in results]
                    self._flow(nodes, [(env[atom], d) for atom, d in group if atom in results] or nodes[1:])
                self._note_gathers(groups, env, results)
                if op.prim.name in _PARTS:
                    for operand, out in itertools.product(filter(None, ins), outs):
                        self.join_arrays(operand, out)

    def _gathered(self, group: Group, env: Mapping[ir.Value, Array], results: Collection[ir.Value]) -> int:
        """Bytes on a device of the largest operand with these dimensions if nothing divided them."""
        sizes = (
            self._origin.get(v, v.nbytes) // ways(env[v].divided[:d] + env[v].divided[d + 1 :], env[v].mesh)
            for v, d in group
            if v not in results and env[v].axes[d] and (self._root.get(v, v), env[v].axes[d]) not in self.gathers
        )
        return max(sizes, default=0)

    def _note_gathers(
        self, groups: Iterable[Group], env: Mapping[ir.Value, Array], results: Collection[ir.Value]
    ) -> None:
        """Note the operands with an axis that a result has for another dimension."""
        used = {axis for value in results for axes in env[value].divided for axis in axes}
        for group in groups:
            divided = {env[v].axes[d] for v, d in group if v in results}
            for value, d in group:
                axes = env[value].axes[d]
                if axes and axes not in divided and not used.isdisjoint(axes):
                    self.gathers.add((self._root.get(value, value), axes))

    def _loop(
        self, op: ir.Op, ins: Sequence[Array | None], outs: Sequence[Array], env: dict[ir.Value, Array], mesh: Mesh
    ) -> None:
        """Propagate axes through a loop: the next iteration reads the carries of this one; a scan also has rows."""
        params = op.params
        if op.prim.name == "scan":
            body, (fixed, carried) = params["jaxpr"], _compat.scan_counts(params)
        else:
            ins = ins[params["cond_nconsts"] :]
            body, fixed, carried = params["body_jaxpr"], params["body_nconsts"], len(outs)
        rows = len(ins) - fixed - carried
        results = self._body(op, body, ins, env, mesh, rows)
        for result, carry in zip(results[:carried], self.bodies[op].inputs[fixed:], strict=False):
            if result is not None:
                self.join_arrays(result, env[carry])
        self._leave(results[:carried], outs[:carried])
        self._leave(results[carried:], outs[carried:], 1)

    def _leave(self, results: Sequence[Array | None], outs: Sequence[Array], shift: int = 0) -> None:
        for result, out in zip(results, outs, strict=True):
            if result is not None:
                self.join_arrays(result, out, shift)

    def _body(
        self,
        op: ir.Op,
        called: Any,
        ins: Sequence[Array | None],
        env: dict[ir.Value, Array],
        mesh: Mesh,
        rows: int = 0,
    ) -> list[Array | None]:
        """Return the results of a jaxpr that an operation runs. It reads a row of its last ``rows`` operands each."""
        inner = self.bodies[op] = _inner(op, called)
        for number, (value, operand) in enumerate(zip(inner.inputs, ins, strict=True)):
            env[value] = self.new(value, mesh)
            if operand is not None:
                self.join_arrays(operand, env[value], -1 if number >= len(ins) - rows else 0)
        for value in {v: None for part in inner.ops for v in part.reads if v not in env}:
            env.setdefault(value, self.new(value, mesh))  # what it captures, or makes itself
        self.operations(inner.ops, env, mesh)
        return [env[v] if isinstance(v, ir.Value) else None for v in inner.outputs]


def _find_body(op: ir.Op) -> Any:
    """Return the jaxpr that an operation stands for; None for one that computes by itself."""
    called = op.params.get("jaxpr") or op.params.get("call_jaxpr")
    if called is None:
        return None
    jaxpr = getattr(called, "jaxpr", called)
    shapes = [[ir.shape(v) for v in part] for part in (op.ins, op.outs)]
    return called if [[ir.shape(v) for v in part] for part in (jaxpr.invars, jaxpr.outvars)] == shapes else None


def _inner(op: ir.Op, called: Any) -> Inner:
    jaxpr = getattr(called, "jaxpr", called)
    values = {v: ir.Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
    ops = []
    for eqn in jaxpr.eqns:
        ins = tuple(v if isinstance(v, _compat.Literal) else values[v] for v in eqn.invars)
        values |= {v: ir.Value(v.aval) for v in eqn.outvars}
        ops.append(ir.Op(eqn.primitive, eqn.params, ins, tuple(values[v] for v in eqn.outvars), op.task, op.mesh))
    outputs = tuple(v if isinstance(v, _compat.Literal) else values[v] for v in jaxpr.outvars)
    return Inner(tuple(ops), tuple(values[v] for v in jaxpr.invars), outputs)


class _Slots(Flow):
    """The arrays behind the slots of a plan. A kernel's result is one array, whatever the microbatch."""

    def __init__(self, plan: Plan, pinned: Mapping[int, NamedSharding]):
        super().__init__()
        self._plan = plan
        self.array: dict[int, Array] = {}
        self.values: dict[int, dict[ir.Value, Array]] = {}  # of each kernel
        self._joined: set[tuple[Array, Array]] = set()
        arrays: dict[tuple[tuple[int, ...], NamedSharding], Array] = {}  # nothing changes these, so one stands for all
        for slot, layout in pinned.items():
            key = (plan.slots[slot].shape, layout)
            if key not in arrays:
                arrays[key] = self.new(plan.slots[slot], layout.mesh)
                arrays[key].decide(decisions(layout.spec, len(plan.slots[slot].shape)))
            self.array[slot] = arrays[key]
        self._follow()
        self.fill()

    def _follow(self) -> None:
        """Propagate axes through the plan in its order: from operands to results, from sender to receiver."""
        results: dict[int, tuple[Array, ...]] = {}
        sent: dict[tuple[Array, int], Array] = {}  # a sender's array on a submesh
        for instruction in self._plan.instructions:
            if isinstance(instruction, Send):
                transfer = self._plan.transfers[instruction.transfer]
                for slot, target in zip(transfer.ins, transfer.outs, strict=True):
                    source, at = self.array[slot], transfer.target
                    if (source, at) not in sent:
                        sent[source, at] = self.new(source, self._plan.submeshes[at])
                        self.join_arrays(source, sent[source, at])
                    self._settle(target, sent[source, at])
            elif isinstance(instruction, Run):
                number, outs = instruction.kernel, instruction.outs
                kernel = self._plan.kernels[number]
                if number not in results:
                    results[number] = self._kernel(number, kernel, instruction)
                for slot, array in zip(outs, results[number], strict=True):
                    self._settle(slot, array)

    def _settle(self, slot: int, array: Array) -> None:
        """Assign an array to a slot. A slot with a layout of its own only propagates that."""
        first = self.array.setdefault(slot, array)
        if first is not array and (array, first) not in self._joined:
            self._joined.add((array, first))
            self.join_arrays(array, first)

    def _kernel(self, number: int, kernel: Kernel, run: Run) -> tuple[Array, ...]:
        """Return the arrays of the results of a kernel."""
        mesh = self._plan.submeshes[kernel.submesh]
        operands = [self.array[slot] for slot in run.ins]
        env = self.values[number] = {}
        if kernel.make == "ops":
            inputs = operands[len(kernel.sums) :]
            if kernel.rows:
                for value, stack in zip(kernel.rows, inputs[1 : 1 + len(kernel.rows)], strict=True):
                    env[value] = self.new(value, mesh)
                    self.join_arrays(stack, env[value], -1)
                inputs = inputs[1 + len(kernel.rows) :]
            env.update(zip(kernel.ins, inputs, strict=True))
            self.gathers.clear()
            self.operations(kernel.ops, env, mesh, dict(zip(kernel.sums, operands, strict=False)))
        else:
            env.update((value, self.new(value, mesh)) for value in kernel.outs)
            for row in operands:
                self.join_arrays(row, env[kernel.outs[0]], 1)
        return tuple(env[value] for value in (*kernel.sums, *kernel.outs))
