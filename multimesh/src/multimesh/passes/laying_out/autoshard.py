"""Layouts of arguments that have none, derived from the sharding constraints of a placed program.

Each dimension takes the axes of the nearest constraint that reaches it through operations, loops and transfers. A
dimension that a constraint replicates stops others, as it does in a compiler.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.submesh import translate
from multimesh.errors import internal_error
from multimesh.ir.primitives import links
from multimesh.ir.program import all_ops

Axes = tuple[str, ...]
Node = tuple[ir.Value, Mesh, int]  # a dimension of a value on a submesh


def autoshard(program: ir.Program, given: Sequence[PartitionSpec | None]) -> ir.Program:
    """Derive the specs of those inputs that have none, on each submesh that reads them, as far as constraints reach."""
    if None not in given:
        return program
    graph = Layouts(program)
    axes = graph.spread()
    specs: dict[tuple[ir.Value, Mesh], PartitionSpec] = {}
    for value in (value for value, spec in zip(program.inputs, given, strict=True) if spec is None):
        for mesh in graph.meshes[value]:
            found = [axes.get((value, mesh, d), ()) for d in range(len(value.aval.shape))]
            if any(found):
                specs[value, mesh] = PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in found))
    return replace(program, specs=specs)


class Layouts:
    """Dimensions of a placed program, which of them go together, and which have a layout: by a constraint, or given.

    ``given`` maps inputs to their partition specs, which hold on each submesh that reads them; unlike a constraint, an
    input that is replicated stops no other layout.
    """

    def __init__(self, program: ir.Program, given: Mapping[ir.Value, PartitionSpec] | None = None):
        self.meshes: dict[ir.Value, dict[Mesh, None]] = collections.defaultdict(dict)
        self._next: dict[Node, list[Node]] = collections.defaultdict(list)
        self._sources: list[tuple[Node, Axes]] = []
        for op in all_ops(program):
            self._operation(op)
        for loop in reversed(program.loops):
            self._loop(loop)
        for value, meshes in self.meshes.items():
            first, *others = meshes
            for other in others:
                for d in range(len(ir.shape(value))):
                    self._join([(value, first, d), (value, other, d)])
        for value, spec in (given or {}).items():
            divided = [(d, axes) for d, axes in entries(spec, len(ir.shape(value))) if axes]
            self._sources += [((value, mesh, d), axes) for mesh in self.meshes[value] for d, axes in divided]

    def _join(self, nodes: Iterable[Node]) -> None:
        first, *others = nodes
        for other in others:
            self._next[first].append(other)
            self._next[other].append(first)

    def _operation(self, op: ir.Op) -> None:
        mesh = op.mesh
        if mesh is None:
            raise internal_error(f"unplaced operation {op}")
        for v in (*op.reads, *op.outs):
            self.meshes[v][mesh] = None
        given = constraint(op)
        if given is None:
            for group in links(op):
                self._join((value, mesh, d) for value, d in group)
            return
        decided = dict(given)
        for value in (*op.reads, *op.outs):
            self._sources += [((value, mesh, d), axes) for d, axes in given]
        for value in op.reads:
            for d in set(range(len(ir.shape(value)))).difference(decided):
                self._join([(value, mesh, d), (op.outs[0], mesh, d)])

    def _loop(self, loop: ir.Loop) -> None:
        for inner, outer in (*loop.consts.items(), *loop.linked.items()):
            self._same(inner, outer, 0)
        for inner, outer in loop.slices.items():
            self._same(inner, outer, 1)
        for s in loop.sums:
            self._same(s.leaf, s.out, 0)
        for out, inner in loop.stacks.items():
            self._same(inner, out, 1)
        for inner, carry in loop.carries.items():
            for atom in (inner, carry.leaf):
                self._same(atom, carry.init, 0)
                self._same(atom, carry.out, 0)

    def _same(self, inner: ir.Atom, outer: ir.Atom, shift: int) -> None:
        """A value inside a loop and the one outside, which has ``shift`` dimensions more in front."""
        if isinstance(inner, ir.Value) and isinstance(outer, ir.Value):
            for mesh in tuple(self.meshes.get(inner, ())):
                self.meshes[outer][mesh] = None
                for d in range(len(ir.shape(inner))):
                    self._join([(inner, mesh, d), (outer, mesh, d + shift)])

    def spread(self) -> dict[Node, Axes]:
        """Axes of every dimension that a layout reaches, the nearest first."""
        found: dict[Node, Axes] = {}
        used: dict[tuple[ir.Value, Mesh], set[str]] = collections.defaultdict(set)
        queue = collections.deque(self._sources)
        while queue:
            (value, mesh, d), axes = queue.popleft()
            node = (value, mesh, d)
            if node in found or used[value, mesh].intersection(axes) or not _fits(axes, mesh, ir.shape(value)[d]):
                continue
            found[node] = axes
            used[value, mesh].update(axes)
            queue.extend((other, axes) for other in self._next[node])
        return found


def _fits(axes: Axes, mesh: Mesh, size: int) -> bool:
    ways = math.prod(mesh.shape.get(axis, 0) for axis in axes)
    return bool(ways) and size % ways == 0


def constraint(op: ir.Op) -> list[tuple[int, Axes]] | None:
    """Dimensions that a constraint decides with their axes; None for what is no constraint."""
    if op.prim is not _compat.sharding_constraint_p or op.params.get("identity"):
        return None
    rank = len(ir.shape(op.outs[0]))
    if "logical" in op.params:
        if op.task is None or op.params["rank"] != rank:
            return None
        spec = translate(op.params["logical"], op.task)
    else:
        sharding = op.params["sharding"]
        if not isinstance(sharding, NamedSharding):
            return None
        spec = sharding.spec
    return list(entries(spec, rank))


def entries(spec: PartitionSpec, rank: int) -> Iterator[tuple[int, Axes]]:
    """Dimensions that a spec decides, with their axes."""
    for d, entry in zip(range(rank), (*spec, *(None for _ in range(rank))), strict=False):
        if entry is not PartitionSpec.UNCONSTRAINED:
            yield d, () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
