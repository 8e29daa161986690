"""Layouts of arguments that have none, derived from the sharding constraints of a placed program.

Each dimension takes the axes of the nearest constraint that reaches it through operations, loops and transfers. A
dimension that a constraint replicates stops others, as it does in a compiler.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh, PartitionSpec

from multimesh import ir
from multimesh.core.specs import Axes, decided, entry
from multimesh.errors import internal_error
from multimesh.ir.primitives import links
from multimesh.ir.program import all_ops
from multimesh.passes.laying_out.axes import Array, Dimension, constraint, join, spread


def autoshard(program: ir.Program, given: Sequence[PartitionSpec | None]) -> ir.Program:
    """Derive the specs of those inputs that have none, on each submesh that reads them, as far as constraints reach."""
    if None not in given:
        return program
    arrays = spread_constraints(program)
    specs = {
        (value, mesh): PartitionSpec(*map(entry, array.divided))
        for value, spec in zip(program.inputs, given, strict=True)
        for mesh, array in arrays[value].items()
        if spec is None and any(array.divided)
    }
    return replace(program, specs=specs)


Arrays = Mapping[ir.Value, Mapping[Mesh, Array]]
"""Each value on the submeshes that make or read it."""


def spread_constraints(program: ir.Program, given: Mapping[ir.Value, PartitionSpec] | None = None) -> Arrays:
    """Axes of every dimension that a constraint of a placed program reaches, or the spec of an input.

    The specs of inputs hold on each submesh that reads them. Unlike a constraint, an input that is replicated stops no
    other layout.
    """
    graph = _Graph(program)
    sources = graph.constrained
    for value, spec in (given or {}).items():
        for array in graph.arrays[value].values():
            sources += [((array, d), axes) for d, axes in decided(spec, len(array.shape)) if axes]
    spread([(array, d) for (array, d), axes in sources if array.take(d, axes)])
    return graph.arrays


class _Graph:
    """Dimensions of a placed program: which of them go together, and which are constrained."""

    def __init__(self, program: ir.Program):
        self.arrays: dict[ir.Value, dict[Mesh, Array]] = collections.defaultdict(dict)
        self.constrained: list[tuple[Dimension, Axes]] = []
        for op in all_ops(program):
            self._operation(op)
        for loop in reversed(program.loops):
            self._loop(loop)
        for first, *others in map(list[Array], map(dict.values, self.arrays.values())):
            for other in others:
                self._same(first, other)

    def _array(self, value: ir.Value, mesh: Mesh) -> Array:
        return self.arrays[value].setdefault(mesh, Array(ir.shape(value), mesh, 1))

    def _operation(self, op: ir.Op) -> None:
        if op.mesh is None:
            raise internal_error(f"unplaced operation {op}")
        env = {v: self._array(v, op.mesh) for v in (*op.reads, *op.outs)}
        fixed = constraint(op)
        if fixed is None:
            for group in links(op):
                join((env[value], d) for value, d in group)
            return
        self.constrained += [((array, d), axes) for array in env.values() for d, axes in fixed]
        open_dims = set(range(len(ir.shape(op.outs[0])))).difference(d for d, _ in fixed)
        for value in op.reads:
            for d in open_dims:
                join([(env[value], d), (env[op.outs[0]], d)])

    def _loop(self, loop: ir.Loop) -> None:
        pairs = [(inner, outer, 0) for inner, outer in (*loop.consts.items(), *loop.linked.items())]
        pairs += [(inner, outer, 1) for inner, outer in loop.slices.items()]
        pairs += [(s.leaf, s.out, 0) for s in loop.sums]
        pairs += [(inner, outer, 1) for outer, inner in loop.stacks.items()]
        for inner, carry in loop.carries.items():
            pairs += [(atom, state, 0) for atom in (inner, carry.leaf) for state in (carry.init, carry.out)]
        for inner, outer, shift in pairs:
            if isinstance(inner, ir.Value) and isinstance(outer, ir.Value):
                for mesh, array in tuple(self.arrays.get(inner, {}).items()):
                    self._same(array, self._array(outer, mesh), shift)

    def _same(self, inner: Array, outer: Array, shift: int = 0) -> None:
        """A value inside a loop and the one outside, which has ``shift`` dimensions more in front."""
        for d in range(len(inner.shape)):
            join([(inner, d), (outer, d + shift)])
