"""The `Plan` of a program that is cut and ordered: kernels, slots and instructions."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.ir import graph
from multimesh.ir.program import task_meshes
from multimesh.passes.cutting.parts import Fragment, Parts, Pipeline, Segment
from multimesh.plan.instructions import Free, Instruction, Kernel, Recv, Run, Send, Slot, Transfer
from multimesh.plan.plan import Plan
from multimesh.schedules import Cell

_Ends = tuple[int, int, str, int | None]  # from submesh, to submesh, task, microbatch


def build_plan(parts: Parts, donated: frozenset[int] = frozenset(), replaced: Mapping[int, int] | None = None) -> Plan:
    """Return the plan of the parts of a program. The buffers of ``donated`` argument leaves may be reused.

    ``replaced`` maps result leaves to the argument leaves that they replace, whose layouts they take.
    """
    builder = _Builder(parts.program, parts.parts)
    for part in parts.parts:
        if isinstance(part, Segment):
            builder.segment(part)
        else:
            builder.loop(part)
    return builder.finish(donated, replaced or {})


@dataclass
class _Builder:
    """The slots, kernels and instructions of a plan, added in global order."""

    program: ir.Program
    parts: Sequence[Segment | Pipeline]
    meshes: list[Mesh] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    inputs: dict[tuple[int, int], None] = field(default_factory=dict)
    constants: list[tuple[Any, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._index: dict[Any, int] = {}
        self._number: dict[Mesh, int] = {}
        self._arg = {v: i for i, v in enumerate(self.program.inputs)}
        self._accumulators: list[int] = []
        self._states: dict[int, int] = {}  # slot to that of the first microbatch
        self._over: dict[int, tuple[str, ...]] = {}
        for mesh in task_meshes(self.program):
            self._submesh(mesh)
        self._readers: dict[ir.Value, dict[int, None]] = collections.defaultdict(dict)
        for part in self.parts:
            for f in part.fragments:
                for outer in (outer for v in f.ins for outer in _read(part, v)):
                    self._readers[outer][self._submesh(f.mesh)] = None

    def _submesh(self, mesh: Mesh) -> int:
        if mesh not in self._number:
            self._number[mesh] = len(self.meshes)
            self.meshes.append(mesh)
        return self._number[mesh]

    def _slot(self, value: ir.Value, submesh: int, microbatch: int | None = None) -> int:
        """Return the slot of a value on a submesh: an argument, a constant, or a value made or received there."""
        key = (value, submesh, microbatch)
        if key not in self._index:
            self._index[key] = self._new_slot(value.aval, submesh)
            if value in self._arg:
                self.inputs[self._arg[value], self._index[key]] = None
            elif value in self.program.consts:
                self.constants.append((self.program.consts[value], self._index[key]))
        return self._index[key]

    def _new_slot(self, aval: Any, submesh: int) -> int:
        kind = _compat.memory_kind(aval)  # of an argument, or what jax.checkpoint offloads waits on the host
        self.slots.append(Slot(submesh, tuple(aval.shape), aval.dtype, _compat.nbytes(aval), kind))
        return len(self.slots) - 1

    def _number_slot(self, number: int, submesh: int) -> int:
        """Return the slot of a microbatch number, a constant on its submesh."""
        key = (number, submesh)
        if key not in self._index:
            array = np.int32(number)
            self._index[key] = self._new_slot(array, submesh)
            self.constants.append((array, self._index[key]))
        return self._index[key]

    def _kernel(self, kernel: Kernel) -> int:
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def _run(self, kernel: Kernel, ins: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Run a kernel once, and return the slots of its results."""
        ins = tuple(self._slot(v, kernel.submesh) for v in kernel.ins) if ins is None else ins
        outs = tuple(self._slot(v, kernel.submesh) for v in kernel.outs)
        self.instructions.append(Run(kernel.submesh, self._kernel(kernel), kernel.name, ins, outs))
        return outs

    def _send(self, values: Iterable[ir.Value], submesh: int, task: str) -> None:
        """Send a kernel's results to every other submesh that uses them."""
        self._transfer((v, (submesh, other, task, None)) for v in values for other in self._others(v, submesh))

    def _others(self, value: ir.Value, submesh: int) -> list[int]:
        """Return the other submeshes that use a value of this one."""
        return [other for other in self._readers[value] if other != submesh]

    def _transfer(self, sent: Iterable[tuple[ir.Value, _Ends]]) -> None:
        """Add a SEND and a RECV for the values of each source, target, task and microbatch."""
        for (submesh, other, task, microbatch), values in group((ends, v) for v, ends in sent).items():
            ins = tuple(self._slot(v, submesh, microbatch) for v in values)
            outs = tuple(self._slot(v, other, microbatch) for v in values)
            number = len(self.transfers)
            self.transfers.append(Transfer(number, submesh, other, ins, outs))
            self.instructions.append(Send(submesh, other, number, ins, task, microbatch))
            self.instructions.append(Recv(other, submesh, number, outs, task, microbatch))

    def segment(self, part: Segment) -> None:
        """Run each fragment once."""
        for f in part.fragments:
            kernel = Kernel(f.task or "unmarked", self._submesh(f.mesh), _sort(f.ops), ins=f.ins, outs=f.outs)
            self._run(kernel)
            self._send(f.outs, kernel.submesh, kernel.name)

    def loop(self, part: Pipeline) -> None:
        """Zero the accumulators, run every cell of the schedule, then stack."""
        sums = group((self._submesh(self.program.homes[s.out]), s) for s in part.loop.sums)
        for submesh, mesh_sums in sorted(sums.items()):
            outs = self._run(Kernel("zeros", submesh, outs=tuple(s.out for s in mesh_sums), make="zeros"))
            self._accumulators += outs
            self._over.update((slot, s.over) for slot, s in zip(outs, mesh_sums, strict=True) if s.over)
        kernels = [self._stage_kernel(part.loop, f) for f in part.fragments]
        waiting: dict[int, list[tuple[ir.Value, _Ends]]] = collections.defaultdict(list)
        for n, (index, microbatch) in enumerate(part.cells):
            self._transfer(waiting.pop(n, ()))
            task = self._cell(part, index, microbatch, *kernels[index])
            _, kernel, _ = kernels[index]
            for v in kernel.outs:
                for other in self._others(v, kernel.submesh):
                    due = part.issue(n, v, self.meshes[other])
                    waiting[due].append((v, (kernel.submesh, other, task, microbatch)))
        self._transfer(waiting.pop(len(part.cells), ()))
        for out, inner in part.loop.stacks.items():
            submesh = self._submesh(self.program.homes[out])
            rows = tuple(self._slot(inner, submesh, k) for k in range(part.loop.mark.count))
            self._run(Kernel("stack", submesh, ins=(inner,) * len(rows), outs=(out,), make="stack"), rows)
        for c in part.loop.carries.values():
            home = self._submesh(self.program.homes[c.out])
            self._index[c.out, home, None] = self._slot(c.leaf, home, part.loop.mark.count - 1)
        for out in part.loop.outs:
            self._send([out], self._submesh(self.program.homes[out]), "sum")

    def _stage_kernel(self, loop: ir.Loop, f: Fragment) -> tuple[int, Kernel, tuple[ir.Sum, ...]]:
        values = f.values
        sums = tuple(s for s in loop.sums if s.leaf in values)
        rows = tuple(v for v in f.ins if v in loop.slices)
        other_leaves = loop.leaves[len(loop.sums) :]  # leave the kernel otherwise than through an accumulator
        kernel = Kernel(
            f"{f.phase}{f.stage}.{f.task or 'unmarked'}",
            self._submesh(f.mesh),
            _sort(f.ops),
            sums=tuple(s.leaf for s in sums),
            rows=rows,
            ins=tuple(v for v in f.ins if v not in loop.slices),
            outs=tuple(v for v in f.outs if self._readers[v] or v in other_leaves),
        )
        return self._kernel(kernel), kernel, sums

    def _cell(
        self, part: Pipeline, index: int, microbatch: int, number: int, kernel: Kernel, kernel_sums: tuple[ir.Sum, ...]
    ) -> str:
        loop, f, submesh = part.loop, part.fragments[index], kernel.submesh
        sums = tuple(self._slot(s.out, submesh) for s in kernel_sums)
        ins = list(sums)
        if kernel.rows:
            ins.append(self._number_slot(microbatch, submesh))
            ins += [self._slot(loop.slices[v], submesh) for v in kernel.rows]
        for v in kernel.ins:
            if v in loop.consts:
                ins.append(self._slot(loop.consts[v], submesh))
            elif v in loop.carries:
                ins.append(self._state(loop.carries[v], submesh, microbatch))
            elif v in self.program.consts:
                ins.append(self._slot(v, submesh))
            else:
                ins.append(self._slot(loop.linked.get(v, v), submesh, microbatch))
        outs = (*sums, *(self._slot(v, submesh, microbatch) for v in kernel.outs))
        cell = Cell(f.phase, f.stage, microbatch) if f.phase and f.stage is not None else None
        self.instructions.append(Run(submesh, number, f.task, tuple(ins), outs, cell))
        return f.task

    def _state(self, carry: ir.Carry, submesh: int, microbatch: int) -> int:
        """Return the slot of the state that a microbatch reads."""
        first = self._slot(carry.init, submesh)
        read = first if microbatch == 0 else self._slot(carry.leaf, submesh, microbatch - 1)
        self._states.update(dict.fromkeys((first, read, self._slot(carry.leaf, submesh, microbatch)), first))
        return read

    def finish(self, donated: frozenset[int], replaced: Mapping[int, int]) -> Plan:
        """Return the plan, with results, layouts, donations and frees."""
        outputs, passed = self._outputs()
        like = self._layouts(outputs, replaced) | passed
        results = {value for kind, value in outputs if kind == "slot"}
        last = {slot: n for n, i in enumerate(self.instructions) for slot in (*i.ins, *i.outs)}  # its last use
        loops = [part for part in self.parts if isinstance(part, Pipeline)]
        keys = ((arg, self.slots[slot].submesh) for arg, slot in self.inputs)
        places = {(arg, n): (self.program.inputs[arg], self.meshes[n]) for arg, n in keys}
        derived = {key: self.program.specs[at] for key, at in places.items() if at in self.program.specs}
        plan = Plan(
            tuple(self.meshes),
            tuple(self.kernels),
            tuple(self.slots),
            tuple(self.instructions),
            tuple(self.transfers),
            tuple(self.inputs),
            tuple(self.constants),
            outputs,
            derived=derived,
            like=like,
            over=self._over,
            stacks=self.program.stacks,
            schedules=tuple(part.loop.mark.schedule.name for part in loops),
            choices=tuple(part.choice for part in loops if part.choice is not None),
        )
        donations = _donations(plan, last, results, donated)
        never_freed = results | {slot for _, slot in self.constants}
        return replace(plan, donations=donations, instructions=tuple(_with_frees(plan, last, never_freed)))

    def _outputs(self) -> tuple[tuple[tuple[str, Any], ...], dict[int, tuple[int, ...]]]:
        """Return the place of each result, a copy of what has a place already, and the arguments that these copy."""
        staged = dict(reversed(self.inputs))  # the first of each
        outputs = [self._output(o, staged) for o in self.program.outputs]
        arg_of = {slot: arg for arg, slot in self.inputs}
        used_slots: set[int] = set()
        copied: dict[int, list[int]] = collections.defaultdict(list)
        for position, (kind, slot) in enumerate(outputs):
            if kind == "slot" and (slot in arg_of or slot in used_slots):
                copied[self.slots[slot].submesh].append(position)
            elif kind == "slot":
                used_slots.add(slot)
        passed: dict[int, tuple[int, ...]] = {}
        for submesh, positions in copied.items():
            ops = tuple(
                ir.Op(_compat.copy_p, {}, (value,), (ir.Value(value.aval),), mesh=self.meshes[submesh])
                for value in (self.program.outputs[p] for p in positions)
            )
            values = tuple(dict.fromkeys(v for op in ops for v in op.reads))
            outs = self._run(Kernel("results", submesh, ops, ins=values, outs=tuple(op.outs[0] for op in ops)))
            for position, slot in zip(positions, outs, strict=True):
                source = outputs[position][1]
                outputs[position] = "slot", slot
                if source in arg_of:
                    passed[slot] = (arg_of[source],)
        return tuple(outputs), passed

    def _output(self, atom: ir.Atom, staged: Mapping[int, int]) -> tuple[str, Any]:
        if not isinstance(atom, ir.Value):
            return "literal", atom.val
        if atom in self._arg:
            arg = self._arg[atom]
            return ("slot", staged[arg]) if arg in staged else ("arg", arg)
        if atom in self.program.consts:
            return "literal", self.program.consts[atom]
        return "slot", self._slot(atom, self._submesh(self.program.homes[atom]))

    def _layouts(self, outputs: Sequence[tuple[str, Any]], replaced: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Map the slots of results and accumulators to the arguments that they replace, whose layouts they take."""
        producer = graph.makers(i for i in self.program.items if isinstance(i, ir.Op))
        label: dict[ir.Value, int] = {}

        def has_layout(v: ir.Value) -> bool:
            op = producer.get(v)  # what is constrained has a layout of its own
            return v in label or v in self._arg or (op is not None and op.prim is _compat.sharding_constraint_p)

        terms = {s.out for loop in self.program.loops for s in loop.sums if s.over}
        for position, arg in replaced.items():  # all results first: a new moment is also a part of the new parameter
            label.update({v: arg for v in ir.values([self.program.outputs[position]]) if not has_layout(v)})
        for result, arg in tuple(label.items()):
            stack = [result]
            while stack:
                v = stack.pop()
                label[v] = arg
                reads = producer[v].reads if v in producer else ()
                stack += [r for r in reads if (r in terms or r.aval.shape == v.aval.shape) and not has_layout(r)]
        like: dict[int, tuple[int, ...]] = {}
        for key, slot in self._index.items():
            if len(key) == 3 and key[2] is None and key[0] in label:
                like[slot] = (label[key[0]],)
        argument_slots = ((self.slots[slot], arg) for arg, slot in self.inputs)
        args_by_type = group(((of.submesh, of.shape, of.dtype), arg) for of, arg in argument_slots)
        for slot in self._accumulators:
            target = self.slots[slot]
            shape = target.shape[1:] if slot in self._over else target.shape
            if slot not in like and (args := args_by_type[target.submesh, shape, target.dtype]):
                like[slot] = tuple(args)
        arg_of = {slot: arg for arg, slot in self.inputs}
        like.update({slot: (arg_of[first],) if first in arg_of else () for slot, first in self._states.items()})
        return like


def _read(part: Segment | Pipeline, value: ir.Value) -> tuple[ir.Atom, ...]:
    """Return the values that a fragment reads as ``value``: outside of its loop, of another loop or microbatch."""
    if isinstance(part, Segment):
        return (value,)
    loop = part.loop
    if value in loop.carries:
        return loop.carries[value].init, loop.carries[value].leaf
    return (loop.consts.get(value, loop.slices.get(value, loop.linked.get(value, value))),)


def _donations(plan: Plan, last: dict[int, int], outs: set[int], donated: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Return the donated operands of each kernel: accumulators, and donated arguments at their last use."""
    on = group((arg, set(plan.submeshes[plan.slots[slot].submesh].devices.flat)) for arg, slot in plan.inputs)
    # On submeshes that share devices, the slots of an argument may be one buffer.
    donated = donated - {arg for arg, sets in on.items() if sum(map(len, sets)) > len(set().union(*sets))}
    arg_of = {slot: arg for arg, slot in plan.inputs}
    never_freed = outs | {slot for _, slot in plan.constants}
    donations: dict[int, tuple[int, ...]] = {}
    for n, run in enumerate(plan.instructions):
        if not isinstance(run, Run):
            continue
        kernel = plan.kernels[run.kernel]
        if kernel.sums:
            donations[run.kernel] = tuple(range(len(kernel.sums)))
        elif kernel.make == "ops" and run.cell is None:
            free = [
                i
                for i, slot in enumerate(run.ins)
                if last[slot] == n and slot not in never_freed and (slot not in arg_of or arg_of[slot] in donated)
            ]
            donations[run.kernel] = _match_results(plan, run, free, arg_of)
    return donations


def _match_results(plan: Plan, run: Run, free: Sequence[int], arg_of: dict[int, int]) -> tuple[int, ...]:
    """Return positions among ``free`` whose buffers can hold one result each, the result's own argument first."""
    chosen: list[int] = []
    open_results = list(run.outs)
    for i in free:
        arg = arg_of.get(run.ins[i])
        kind = plan.slots[run.ins[i]].memory
        fit = (o for o in open_results if arg is not None and plan.like.get(o) == (arg,))
        match = next((o for o in fit if plan.slots[o].memory == kind), None)
        if match is not None:
            open_results.remove(match)
            chosen.append(i)
    return tuple(sorted(chosen))


def _with_frees(plan: Plan, last: dict[int, int], never_freed: set[int]) -> Iterable[Instruction]:
    ends = group((n, slot) for slot, n in last.items() if slot not in never_freed)
    for n, instruction in enumerate(plan.instructions):
        yield instruction
        if ends[n]:
            yield Free(instruction.submesh, tuple(ends[n]))


def _sort(ops: Sequence[ir.Op]) -> tuple[ir.Op, ...]:
    """Return operations without the values of other submeshes that they wait for, which the order has seen to."""
    return tuple(replace(op, after=()) if op.after else op for op in ops)
