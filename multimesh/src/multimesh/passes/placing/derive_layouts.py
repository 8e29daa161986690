"""Layouts of arguments that have none, derived from the sharding constraints of a placed program.

Each dimension takes the axes of the nearest constraint that reaches it through operations, loops and transfers. A
dimension that a constraint replicates stops others, as it does in a compiler.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh, PartitionSpec

from multimesh import ir
from multimesh.core.specs import Axes, decisions, entry
from multimesh.errors import internal_error
from multimesh.ir.axes import Array, Dimension, constraint, join, spread
from multimesh.ir.primitives import links
from multimesh.ir.program import all_ops


def derive_layouts(program: ir.Program, specs: Sequence[PartitionSpec | None]) -> ir.Program:
    """Derive the specs of inputs that have none, on each submesh that reads them, as far as constraints reach."""
    if None not in specs:
        return program
    arrays = spread_constraints(program)
    derived = {
        (value, mesh): PartitionSpec(*map(entry, array.divided))
        for value, spec in zip(program.inputs, specs, strict=True)
        for mesh, array in arrays[value].items()
        if spec is None and any(array.divided)
    }
    return replace(program, specs=derived)


Arrays = Mapping[ir.Value, Mapping[Mesh, Array]]
"""The array of each value on each submesh that makes or reads it."""


Bodies = Mapping[ir.Op, ir.Loop]


def spread_constraints(
    program: ir.Program, specs: Mapping[ir.Value, PartitionSpec] | None = None, bodies: Bodies | None = None
) -> Arrays:
    """Return the arrays with the axes of every dimension that a constraint or an input's spec reaches.

    The specs of inputs hold on each submesh that reads them. Unlike a constraint, an input that is replicated stops no
    other layout. Layouts pass through the scans that have an entry in ``bodies``, whose values are among the arrays.
    """
    arrays: dict[ir.Value, dict[Mesh, Array]] = collections.defaultdict(dict)
    sources: list[tuple[Dimension, Axes]] = []  # constrained dimensions
    bodies = bodies or {}

    def array(value: ir.Value, mesh: Mesh) -> Array:
        return arrays[value].setdefault(mesh, Array(ir.shape(value), mesh, 1))

    ops = list(all_ops(program))
    for op in ops:
        if op.mesh is None:
            raise internal_error(f"unplaced operation {op}")
        env = {v: array(v, op.mesh) for v in (*op.reads, *op.outs)}
        if op in bodies:
            ops += bodies[op].ops
            for inner, outer, shift in edges_of(bodies[op]):
                if isinstance(inner, ir.Value) and isinstance(outer, ir.Value):
                    _join_arrays(array(inner, op.mesh), array(outer, op.mesh), shift)
            continue
        fixed = constraint(op)
        if fixed is None:
            for group in links(op):
                join((env[value], d) for value, d in group)
            continue
        sources += [((operand, d), axes) for operand in env.values() for d, axes in fixed]
        open_dims = set(range(len(ir.shape(op.outs[0])))).difference(d for d, _ in fixed)
        for value, d in itertools.product(op.reads, open_dims):
            join([(env[value], d), (env[op.outs[0]], d)])
    for inner, outer, shift in (edge for loop in reversed(program.loops) for edge in edges_of(loop)):
        if isinstance(inner, ir.Value) and isinstance(outer, ir.Value):
            for mesh, inner_array in tuple(arrays.get(inner, {}).items()):
                _join_arrays(inner_array, array(outer, mesh), shift)
    for first, *others in map(list[Array], map(dict.values, arrays.values())):
        for other in others:
            _join_arrays(first, other)
    for value, spec in (specs or {}).items():
        for placed in arrays[value].values():
            sources += [((placed, d), axes) for d, axes in decisions(spec, len(placed.shape)) if axes]
    spread([(placed, d) for (placed, d), axes in sources if placed.take(d, axes)])
    return arrays


def edges_of(loop: ir.Loop) -> list[tuple[ir.Atom, ir.Atom, int]]:
    """Return pairs of values inside and outside of a loop, and how many leading dimensions the outer one adds."""
    pairs = [(inner, outer, 0) for inner, outer in (*loop.consts.items(), *loop.linked.items())]
    pairs += [(inner, outer, 1) for inner, outer in loop.slices.items()]
    pairs += [(s.leaf, s.out, 0) for s in loop.sums]
    pairs += [(inner, outer, 1) for outer, inner in loop.stacks.items()]
    for inner, carry in loop.carries.items():
        pairs += [(atom, state, 0) for atom in (inner, carry.leaf) for state in (carry.init, carry.out)]
    return pairs


def _join_arrays(inner: Array, outer: Array, shift: int = 0) -> None:
    for d in range(len(inner.shape)):
        join([(inner, d), (outer, d + shift)])
