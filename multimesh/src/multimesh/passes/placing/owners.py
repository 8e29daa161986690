"""The owner of an argument: the submesh whose tasks read most of it.

A value of arguments alone floats: any submesh can compute it. A floating value belongs to the submesh whose forward
tasks read most of it, else to that of its backward tasks. An argument that no task reads (the moments of a weight)
belongs to its other readers. Data belongs nowhere: integers, what loops cut into microbatches, and what follows.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from multimesh import ir
from multimesh.ir.primitives import halves, is_small
from multimesh.ir.program import all_ops


class Owners:
    """Values that float (depend on arguments only), and the submesh that owns each."""

    def __init__(self, program: ir.Program, order: Sequence[Mesh], homes: Mapping[ir.Value, Mesh]):
        """Find the floating values and their users. ``homes`` are those of an earlier placement, if there was one."""
        self.floating: set[ir.Value] = {*program.inputs, *program.consts}
        self.data = _cut_by_loops(program) | {
            v for v in program.inputs if not jnp.issubdtype(v.aval.dtype, jnp.inexact)
        }
        self.order = {mesh: i for i, mesh in enumerate(order)}
        self._input_homes = {v: mesh for v, mesh in program.input_homes.items() if mesh in self.order}
        self.pinned = program.pinned  # blocks of a stack, and rows of one, which are made where it lies
        self._homes, self._arguments = homes, frozenset(program.inputs)
        self._outer: dict[ir.Value, ir.Value] = {}
        # Readers by forward tasks, by backward tasks, by others.
        self._read: list[dict[ir.Value, dict[Mesh, int]]] = [collections.defaultdict(dict) for _ in range(3)]
        self._whole: dict[ir.Value, set[Mesh]] = collections.defaultdict(set)
        for item in program.items:
            if isinstance(item, ir.Loop):
                outer = {**item.consts, **item.slices}
                self._outer |= {inner: v for inner, v in outer.items() if isinstance(v, ir.Value)}
                for values in (self.floating, self.data):
                    values.update(inner for inner, v in self._outer.items() if v in values)
            for op in item.ops if isinstance(item, ir.Loop) else (item,):
                if op.task is None and not op.effects and self.floating.issuperset(op.reads):
                    self.floating.update(op.outs)
                    if any(op.reads) and self.data.issuperset(op.reads):
                        self.data.update(op.outs)
        for op in reversed(tuple(all_ops(program))):
            self._note(op)

    def _note(self, op: ir.Op) -> None:
        for v in (v for v in op.reads if v in self.floating):
            if op.task is not None:
                self._add(v, op.task.mesh, v.nbytes, int(op.backward))
                self._whole[self.outside(v)].add(op.task.mesh)
            for o in op.outs:
                if o in self._homes and op.task is None:
                    self._add(v, self._homes[o], v.nbytes, 2)
                if o not in self.floating:
                    continue
                for kind, read in enumerate(self._read):
                    for mesh, nbytes in read[o].items():
                        self._add(v, mesh, nbytes, kind)
                if not halves(op, v):
                    self._whole[self.outside(v)] |= self._whole[o]

    def _add(self, value: ir.Value, mesh: Mesh, nbytes: int, kind: int) -> None:
        for v in {value, self.outside(value)}:
            load = self._read[kind][v]
            load[mesh] = min(v.nbytes, load.get(mesh, 0) + nbytes)

    def outside(self, value: ir.Value) -> ir.Value:
        """Return the value outside of the loop that a body's value stands for, or is a row of."""
        return self._outer.get(value, value)

    def tasks_on(self, value: ir.Value) -> set[Mesh]:
        """Return the submeshes whose tasks use a floating value, or a floating value computed from it."""
        return {mesh for read in self._read[:2] for mesh in read[value]}

    def first_on(self, value: ir.Value) -> tuple[Mesh, ...]:
        """Return the submeshes of the forward tasks that use a floating value, or else of the backward ones."""
        read = next((read[value] for read in self._read[:2] if read[value]), {})
        return tuple(sorted(read, key=lambda mesh: self.order.get(mesh, 0)))

    def of(self, value: ir.Value) -> Mesh | None:
        """Return the owner of a floating value that tasks use, or of an argument that others use or that is given."""
        outer = self.outside(value)
        if outer in self.pinned:
            return self.pinned[outer]
        if outer in self._input_homes and not self.tasks_on(value) and not self.tasks_on(outer):
            return self._input_homes[outer]
        for v in () if value in self.data else (value, self.outside(value)):
            for read in self._read if v in self._arguments else self._read[:2]:
                if read[v]:
                    return max(read[v], key=lambda mesh, on=read[v]: (on[mesh], -self.order.get(mesh, 0)))  # type: ignore[misc]
        return None

    def readers(self, placed: ir.Program) -> dict[ir.Value, dict[Mesh, ir.Op]]:
        """Map each large input other than data to the submeshes that read it, each with its first reader."""
        readers: dict[ir.Value, dict[Mesh, ir.Op]] = {
            v: {} for v in placed.inputs if not is_small(v) and v not in self.data
        }
        for op in all_ops(placed):
            for v in map(self.outside, op.reads):
                if op.mesh is not None and v in readers:
                    readers[v].setdefault(op.mesh, op)
        return readers

    def sliced_at_home(self, op: ir.Op) -> Mesh | None:
        """Return the owner of a floating operand if another submesh uses only a part of it, and is sent that part."""
        for v in op.reads:
            owner = self.of(v)
            if owner is not None and halves(op, v) and not is_small(v):
                read_on = {mesh for o in op.outs for mesh in self.tasks_on(o)}
                if read_on - self._whole[self.outside(v)] - {owner}:
                    return owner
        return None


def find_task_inputs(ops: Iterable[ir.Op]) -> set[ir.Value]:
    """Return the values that a task uses, directly or through other operations."""
    leading: set[ir.Value] = set()
    for op in reversed(tuple(ops)):
        if op.task is not None or any(o in leading for o in op.outs):
            leading.update(op.reads)
    return leading


def find_extra_copies(program: ir.Program) -> Iterator[tuple[int, tuple[Mesh, ...], ir.Op]]:
    """Yield arguments, except data, that also lie where no task reads them, the submeshes, and a reader on the last."""
    owners = Owners(program, (), {})
    readers = owners.readers(program)
    for n, v in enumerate(program.inputs):
        copies = readers.get(v, {})
        foreign = [mesh for mesh in copies if mesh not in owners.tasks_on(v)]
        if len(copies) > 1 and foreign:
            yield n, tuple(sorted(copies, key=lambda mesh: mesh in foreign)), copies[foreign[0]]


def _cut_by_loops(program: ir.Program) -> set[ir.Value]:
    """Return the values whose rows a loop reads one by one, and the largest source of each, outside of tasks."""
    sources: set[ir.Value] = set()
    for item in reversed(program.items):
        if isinstance(item, ir.Loop):
            sources.update(ir.values(item.slices.values()))
        elif item.task is None and any(o in sources for o in item.outs):
            sources.update(sorted(item.reads, key=lambda v: v.nbytes)[-1:])
    return sources
