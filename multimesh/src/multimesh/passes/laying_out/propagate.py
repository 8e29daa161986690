"""Layouts of all slots of a plan, fixed before anything is compiled.

A slot has the layout that was asked for: that of an argument, of a result, of the argument that it replaces. Elsewhere
layouts follow the data: a result takes the axes of its operands' dimensions (`primitives.links`), in the order in which
the plan runs, until a constraint says otherwise. What is still open then takes axes from what reads it. The rest is
replicated.

No layout changes a result, so a link that is missed costs time or memory, never correctness. Layouts are those that XLA
would choose, as far as the boundaries of programs show them.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir.primitives import links
from multimesh.passes.laying_out.autoshard import constraint, entries
from multimesh.plan.instructions import Kernel, Run, Send
from multimesh.plan.plan import Plan

Axes = tuple[tuple[str, ...], ...]
"""For each dimension of an array the axes of the mesh that it is divided over; axes of size one are left out."""

Known = Mapping[ir.Value, Axes]

_PARTS = frozenset(("slice", "split", "dynamic_slice", "pad", "concatenate"))
"""Operations whose results have other sizes: the compiler divides what is left of a divided dimension too."""


def ways(axes: Axes, mesh: Mesh) -> int:
    """Into how many parts an array is divided."""
    return math.prod(mesh.shape[axis] for names in axes for axis in names)


def fix_layouts(
    plan: Plan,
    specs: Sequence[PartitionSpec | None],
    out_specs: Mapping[int, PartitionSpec],
) -> tuple[NamedSharding, ...]:
    """Layout of every slot of a plan.

    Parameters
    ----------
    plan
        The plan.
    specs
        Partition spec of each argument leaf, carried over to each submesh that reads it; None is what was derived for
        it there, or else replicated.
    out_specs
        Result leaf to the spec that it must have.
    """
    pinned = _pinned(plan, specs, out_specs)
    slots = _Slots(plan, pinned)
    found = []
    for number, slot in enumerate(plan.slots):
        layout = pinned.get(number) or NamedSharding(plan.submeshes[slot.submesh], slots.array[number].spec)
        kind = slots.memory_kinds.get(number)
        found.append(layout if kind is None else layout.with_memory_kind(kind))
    return tuple(found)


def kernel_axes(plan: Plan) -> tuple[dict[int, Known], Mapping[ir.Op, Inner]]:
    """Axes of the values of every kernel, and the programs that their operations run."""
    slots = _Slots(plan, dict(enumerate(plan.layouts)))
    return {k: {v: array.divided for v, array in env.items()} for k, env in slots.values.items()}, slots.bodies


def propagate(ops: Iterable[ir.Op], known: Known, mesh: Mesh) -> dict[ir.Value, Axes]:
    """Axes of what operations make, and of what was known before."""
    arrays = _Arrays()
    env: dict[ir.Value, _Array] = {}
    for value, axes in known.items():
        env[value] = arrays.new(value, mesh)
        env[value].decide(enumerate(axes))
    arrays.operations(ops, env, mesh)
    arrays.fill()
    return {value: array.divided for value, array in env.items()}


def _pinned(
    plan: Plan,
    specs: Sequence[PartitionSpec | None],
    out_specs: Mapping[int, PartitionSpec],
) -> dict[int, NamedSharding]:
    """Slots whose layout does not follow from the data."""

    def given(arg: int, slot: int) -> PartitionSpec:
        spec = plan.derived.get((arg, plan.slots[slot].submesh), specs[arg])
        return PartitionSpec() if spec is None else spec

    pinned = {slot: plan.layout(slot, given(arg, slot)) for arg, slot in plan.inputs}
    pinned |= {slot: plan.layout(slot, PartitionSpec()) for _, slot in plan.constants}
    fixed = set(pinned)
    zeros = {k for k, kernel in enumerate(plan.kernels) if kernel.make == "zeros"}
    sums = {slot for run in plan.runs if run.kernel in zeros for slot in run.outs}
    pinned |= {slot: plan.layout(slot, PartitionSpec()) for slot in sums}
    for slot, args in plan.like.items():
        agreed = {plan.layout(slot, spec) for spec in {given(arg, slot) for arg in args} or {PartitionSpec()}}
        if len(agreed) == 1 and slot not in fixed:
            pinned[slot] = agreed.pop()
    states = {s for run in plan.runs if run.cell for s in run.outs} - sums  # these keep one layout in all microbatches
    for position, spec in out_specs.items():
        kind, slot = plan.outputs[position]
        if kind == "slot" and slot not in fixed | states:
            pinned[slot] = plan.layout(slot, spec)
    return pinned


class _Array:
    """Axes of the dimensions of an array: None where nothing is known yet, () where it is replicated for good."""

    __slots__ = ("axes", "joined", "mesh", "shape")

    def __init__(self, shape: Sequence[int], mesh: Mesh):
        self.shape, self.mesh = tuple(shape), mesh
        self.axes: list[tuple[str, ...] | None] = [None] * len(self.shape)
        self.joined: list[list[_Node]] = [[] for _ in self.shape]

    def take(self, d: int, axes: tuple[str, ...]) -> bool:
        """Divide an open dimension over axes that are free; whether that was possible."""
        if self.axes[d] is not None or not axes or any(self.mesh.shape.get(axis, 1) == 1 for axis in axes):
            return False
        used = {axis for other in self.axes for axis in other or ()}
        if not used.isdisjoint(axes) or self.shape[d] % math.prod(self.mesh.shape[axis] for axis in axes):
            return False
        self.axes[d] = axes
        return True

    def decide(self, given: Iterable[tuple[int, tuple[str, ...]]]) -> None:
        """Fix dimensions; one that its axes do not divide is replicated."""
        for d, axes in given:
            self.axes[d] = None
            if not self.take(d, tuple(axis for axis in axes if self.mesh.shape.get(axis, 0) != 1)):
                self.axes[d] = ()

    @property
    def divided(self) -> Axes:
        """The axes of each dimension."""
        return tuple(axes or () for axes in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """The axes as a spec."""
        found = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.axes]
        while found and found[-1] is None:
            found.pop()
        return PartitionSpec(*found)


_Node = tuple[_Array, int]  # a dimension of an array


@dataclass(frozen=True)
class Inner:
    """A program that an operation runs: once, or in every iteration of a loop."""

    ops: tuple[ir.Op, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Atom, ...]


class _Arrays:
    """Arrays with the axes of their dimensions, and which dimensions go together."""

    def __init__(self) -> None:
        self._all: list[_Array] = []
        self.bodies: dict[ir.Op, Inner] = {}

    def new(self, value: Any, mesh: Mesh) -> _Array:
        """An array of which nothing is known; ``value`` has a shape, or an aval that has one."""
        self._all.append(_Array(getattr(getattr(value, "aval", value), "shape", ()), mesh))
        return self._all[-1]

    def same(self, source: _Array, target: _Array, shift: int = 0) -> None:
        """One array under two names; with a ``shift`` of 1 the target has the source as rows, of -1 the reverse."""
        for d in range(max(0, -shift), len(source.shape)):
            self._flow([(source, d)], [(target, d + shift)])

    def _flow(self, sources: Sequence[_Node], targets: Sequence[_Node]) -> None:
        """Dimensions of results that are those of operands: the operand that is divided most decides.

        Where a dimension is summed over, operands are the targets; they take axes in the end only.
        """
        given = [(axes, array.mesh) for array, d in sources if (axes := array.axes[d])]
        if len(given) > 1:
            given.sort(key=lambda item: -ways((item[0],), item[1]))
        for array, d in targets:
            if (array, d) not in sources:
                any(array.take(d, axes) for axes, _ in given)
            for other, at in sources:
                array.joined[d].append((other, at))
                other.joined[at].append((array, d))

    def fill(self) -> None:
        """Carry axes to what is open still, the nearest first, from results to operands too."""
        queue = collections.deque((array, d) for array in self._all for d, axes in enumerate(array.axes) if axes)
        while queue:
            array, d = queue.popleft()
            queue.extend((other, at) for other, at in array.joined[d] if other.take(at, array.axes[d] or ()))

    def operations(self, ops: Iterable[ir.Op], env: dict[ir.Value, _Array], mesh: Mesh) -> None:
        """Carry axes forward through operations; ``env`` holds what they read and receives what they make."""
        for op in ops:
            ins = [env[atom] if isinstance(atom, ir.Value) else None for atom in op.ins]
            outs = [self.new(out, mesh) for out in op.outs]
            env.update(zip(op.outs, outs, strict=True))
            decided = constraint(op)
            if decided is not None and ins[0] is not None:
                outs[0].decide(decided)
                self.same(ins[0], outs[0])
            elif op.prim.name == "shard_map":
                for out, spec in zip(outs, op.params["out_specs"], strict=True):
                    out.decide(entries(spec, len(out.shape)))
            elif op.prim.name == "cond":
                for branch in op.params["branches"]:
                    self._leave(self._body(op, branch, ins[1:], env, mesh), outs)
            elif op.prim.name in ("scan", "while"):
                self._loop(op, ins, outs, env, mesh)
            elif (called := _called(op)) is not None:
                self._leave(self._body(op, called, ins, env, mesh), outs)
            else:
                results = set(op.outs)
                for group in list(links(op)) or _alike(op):
                    nodes = [(env[atom], d) for atom, d in group if atom not in results]
                    self._flow(nodes, [(env[atom], d) for atom, d in group if atom in results] or nodes[1:])
                if op.prim.name in _PARTS:
                    for given, out in itertools.product(filter(None, ins), outs):
                        self.same(given, out)

    def _loop(
        self, op: ir.Op, ins: Sequence[_Array | None], outs: Sequence[_Array], env: dict[ir.Value, _Array], mesh: Mesh
    ) -> None:
        """What an iteration carries is also what the next one reads; a scan reads and makes rows beside."""
        params = op.params
        if op.prim.name == "scan":
            body, (fixed, carried) = params["jaxpr"], _compat.scan_counts(params)
        else:
            ins = ins[params["cond_nconsts"] :]
            body, fixed, carried = params["body_jaxpr"], params["body_nconsts"], len(outs)
        rows = len(ins) - fixed - carried
        results = self._body(op, body, ins, env, mesh, rows)
        for result, given in zip(results[:carried], self.bodies[op].inputs[fixed:], strict=False):
            if result is not None:
                self.same(result, env[given])
        self._leave(results[:carried], outs[:carried])
        self._leave(results[carried:], outs[carried:], 1)

    def _leave(self, results: Sequence[_Array | None], outs: Sequence[_Array], shift: int = 0) -> None:
        for result, out in zip(results, outs, strict=True):
            if result is not None:
                self.same(result, out, shift)

    def _body(
        self,
        op: ir.Op,
        called: Any,
        ins: Sequence[_Array | None],
        env: dict[ir.Value, _Array],
        mesh: Mesh,
        rows: int = 0,
    ) -> list[_Array | None]:
        """Results of a program that an operation runs; of its last ``rows`` operands it reads a row."""
        inner = self.bodies[op] = _inner(op, called)
        for number, (value, given) in enumerate(zip(inner.inputs, ins, strict=True)):
            env[value] = self.new(value, mesh)
            if given is not None:
                self.same(given, env[value], -1 if number >= len(ins) - rows else 0)
        for value in {v: None for part in inner.ops for v in part.reads if v not in env}:
            env.setdefault(value, self.new(value, mesh))  # what it captures, or makes itself
        self.operations(inner.ops, env, mesh)
        return [env[v] if isinstance(v, ir.Value) else None for v in inner.outputs]


def _called(op: ir.Op) -> Any:
    """The program that an operation stands for; None for one that computes by itself."""
    called = op.params.get("jaxpr") or op.params.get("call_jaxpr")
    if called is None:
        return None
    jaxpr = getattr(called, "jaxpr", called)
    shapes = [[ir.shape(v) for v in part] for part in (op.ins, op.outs)]
    if [[ir.shape(v) for v in part] for part in (jaxpr.invars, jaxpr.outvars)] != shapes:
        return None
    return called


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


def _alike(op: ir.Op) -> Iterable[Sequence[tuple[ir.Value, int]]]:
    """Where no rule says which dimensions go together: those of one size at one place."""
    for out in op.outs:
        operands = [v for v in op.reads if len(ir.shape(v)) == len(ir.shape(out))]
        yield from ([(out, d), *((v, d) for v in operands if ir.shape(v)[d] == n)] for d, n in enumerate(ir.shape(out)))


class _Slots(_Arrays):
    """The slots of a plan; one array for all that a program writes at one place, whatever the microbatch."""

    def __init__(self, plan: Plan, pinned: Mapping[int, NamedSharding]):
        super().__init__()
        self._plan = plan
        self.array: dict[int, _Array] = {}
        self.values: dict[int, dict[ir.Value, _Array]] = {}  # of each kernel
        self.memory_kinds: dict[int, str] = {}
        self._sent: dict[tuple[_Array, int], _Array] = {}
        self._settled: set[tuple[_Array, _Array]] = set()
        given: dict[tuple[tuple[int, ...], NamedSharding], _Array] = {}  # nothing changes these, so one stands for all
        for slot, layout in pinned.items():
            key = (plan.slots[slot].shape, layout)
            if key not in given:
                given[key] = self.new(plan.slots[slot], layout.mesh)
                given[key].decide(entries(layout.spec, len(plan.slots[slot].shape)))
            self.array[slot] = given[key]
        self._follow()
        self.fill()

    def _follow(self) -> None:
        """Carry axes through the plan in its order: from operands to results, from sender to receiver."""
        made: dict[int, tuple[_Array, ...]] = {}
        for instruction in self._plan.instructions:
            if isinstance(instruction, Send):
                transfer = self._plan.transfers[instruction.transfer]
                for source, target in zip(transfer.ins, transfer.outs, strict=True):
                    self._settle(target, self._received(self.array[source], transfer.target))
                    if source in self.memory_kinds:
                        self.memory_kinds[target] = self.memory_kinds[source]
            elif isinstance(instruction, Run):
                number, outs = instruction.kernel, instruction.outs
                kernel = self._plan.kernels[number]
                if number not in made:
                    made[number] = self._program(number, kernel, instruction)
                for slot, array in zip(outs, made[number], strict=True):
                    self._settle(slot, array)
                for slot, value in zip(outs, (*kernel.sums, *kernel.outs), strict=True):
                    kind = _compat.memory_kind(value.aval)  # what jax.checkpoint offloads waits on the host
                    if kind is not None:
                        self.memory_kinds[slot] = kind

    def _settle(self, slot: int, array: _Array) -> None:
        """Let a slot hold an array; one with a layout of its own only hands it on."""
        known = self.array.setdefault(slot, array)
        if known is not array and (array, known) not in self._settled:
            self._settled.add((array, known))
            self.same(array, known)

    def _received(self, source: _Array, submesh: int) -> _Array:
        if (source, submesh) not in self._sent:
            self._sent[source, submesh] = self.new(source, self._plan.submeshes[submesh])
            self.same(source, self._sent[source, submesh])
        return self._sent[source, submesh]

    def _program(self, number: int, kernel: Kernel, run: Run) -> tuple[_Array, ...]:
        """Arrays of the results of a kernel."""
        mesh = self._plan.submeshes[kernel.submesh]
        given = [self.array[slot] for slot in run.ins]
        env = self.values[number] = {}
        if kernel.make == "ops":
            rest = given[len(kernel.sums) :]
            if kernel.rows:
                for value, stack in zip(kernel.rows, rest[1 : 1 + len(kernel.rows)], strict=True):
                    env[value] = self.new(value, mesh)
                    self.same(stack, env[value], -1)
                rest = rest[1 + len(kernel.rows) :]
            env.update(zip(kernel.ins, rest, strict=True))
            self.operations(kernel.ops, env, mesh)
        else:
            env.update((value, self.new(value, mesh)) for value in kernel.outs)
            for row in given:
                self.same(row, env[kernel.outs[0]], 1)
        return tuple(env[value] for value in (*kernel.sums, *kernel.outs))
