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


def autoshard(program: ir.Program, given: Sequence[PartitionSpec | None]) -> ir.Program:
    """Derive the specs of inputs that have none, on each submesh that reads them, as far as constraints reach."""
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
    """Return the arrays with the axes of every dimension that a constraint or an input's spec reaches.

    The specs of inputs hold on each submesh that reads them. Unlike a constraint, an input that is replicated stops no
    other layout.
    """
    arrays, sources = _join_dimensions(program)
    for value, spec in (given or {}).items():
        for array in arrays[value].values():
            sources += [((array, d), axes) for d, axes in decisions(spec, len(array.shape)) if axes]
    spread([(array, d) for (array, d), axes in sources if array.take(d, axes)])
    return arrays


def _join_dimensions(program: ir.Program) -> tuple[dict[ir.Value, dict[Mesh, Array]], list[tuple[Dimension, Axes]]]:
    """Return the arrays of a placed program, related dimensions joined, and the dimensions that are constrained."""
    arrays: dict[ir.Value, dict[Mesh, Array]] = collections.defaultdict(dict)
    constrained: list[tuple[Dimension, Axes]] = []

    def array(value: ir.Value, mesh: Mesh) -> Array:
        return arrays[value].setdefault(mesh, Array(ir.shape(value), mesh, 1))

    for op in all_ops(program):
        if op.mesh is None:
            raise internal_error(f"unplaced operation {op}")
        env = {v: array(v, op.mesh) for v in (*op.reads, *op.outs)}
        fixed = constraint(op)
        if fixed is None:
            for group in links(op):
                join((env[value], d) for value, d in group)
            continue
        constrained += [((each, d), axes) for each in env.values() for d, axes in fixed]
        open_dims = set(range(len(ir.shape(op.outs[0])))).difference(d for d, _ in fixed)
        for value, d in itertools.product(op.reads, open_dims):
            join([(env[value], d), (env[op.outs[0]], d)])
    for inner, outer, shift in (edge for loop in reversed(program.loops) for edge in _edges(loop)):
        if isinstance(inner, ir.Value) and isinstance(outer, ir.Value):
            for mesh, each in tuple(arrays.get(inner, {}).items()):
                _same(each, array(outer, mesh), shift)
    for first, *others in map(list[Array], map(dict.values, arrays.values())):
        for other in others:
            _same(first, other)
    return arrays, constrained


def _edges(loop: ir.Loop) -> list[tuple[ir.Atom, ir.Atom, int]]:
    """Return pairs of values inside and outside of a loop, and how many leading dimensions the outer one adds."""
    pairs = [(inner, outer, 0) for inner, outer in (*loop.consts.items(), *loop.linked.items())]
    pairs += [(inner, outer, 1) for inner, outer in loop.slices.items()]
    pairs += [(s.leaf, s.out, 0) for s in loop.sums]
    pairs += [(inner, outer, 1) for outer, inner in loop.stacks.items()]
    for inner, carry in loop.carries.items():
        pairs += [(atom, state, 0) for atom in (inner, carry.leaf) for state in (carry.init, carry.out)]
    return pairs


def _same(inner: Array, outer: Array, shift: int = 0) -> None:
    for d in range(len(inner.shape)):
        join([(inner, d), (outer, d + shift)])
