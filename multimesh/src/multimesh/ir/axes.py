"""Propagation of mesh axes between dimensions of arrays that go together.

`autoshard` reads a placed program as such a graph, to lay out arguments; `propagate` reads a plan, to lay out slots.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import Axes, decisions, size, translate
from multimesh.ir.primitives import Group, is_cheap, links


class Array:
    """An array on a submesh, with the mesh axes of each dimension: None while it is open, () if it is replicated.

    An axis of fewer devices than ``least`` is no axis to it.
    """

    __slots__ = ("axes", "joined", "least", "mesh", "shape")

    def __init__(self, shape: Sequence[int], mesh: Mesh, least: int):
        self.shape, self.mesh, self.least = tuple(shape), mesh, least
        self.axes: list[Axes | None] = [None] * len(self.shape)
        self.joined: list[list[Dimension]] = [[] for _ in self.shape]

    def take(self, d: int, axes: Axes) -> bool:
        """Divide an open dimension over axes that are free. Return whether that was possible."""
        if self.axes[d] is not None or any(self.mesh.shape.get(axis, 0) < self.least for axis in axes):
            return False
        used = {axis for other in self.axes for axis in other or ()}
        if not used.isdisjoint(axes) or self.shape[d] % size(self.mesh, axes):
            return False
        self.axes[d] = axes
        return True

    def decide(self, dims: Iterable[tuple[int, Axes]]) -> None:
        """Fix the axes of dimensions. One that its axes do not divide is replicated."""
        for d, axes in dims:
            self.axes[d] = None
            if not self.take(d, self.present(axes)):
                self.axes[d] = ()

    def present(self, axes: Axes) -> Axes:
        """Return the axes without those of one device."""
        return tuple(axis for axis in axes if self.mesh.shape.get(axis) != 1)

    @property
    def divided(self) -> tuple[Axes, ...]:
        """The axes of each dimension."""
        return tuple(axes or () for axes in self.axes)


Dimension = tuple[Array, int]


def join(dimensions: Iterable[Dimension]) -> None:
    """Note that dimensions go together, so that they take the same axes."""
    (array, d), *others = dimensions
    for other, at in others:
        array.joined[d].append((other, at))
        other.joined[at].append((array, d))


def spread(sources: Iterable[Dimension]) -> None:
    """Propagate axes to open dimensions, the nearest first."""
    queue = collections.deque(sources)
    while queue:
        array, d = queue.popleft()
        queue.extend((other, at) for other, at in array.joined[d] if other.take(at, array.axes[d] or ()))


def constraint(op: ir.Op) -> Sequence[tuple[int, Axes]] | None:
    """Return the dimensions that a sharding constraint decides, with their axes; None for any other operation."""
    if op.prim is not _compat.sharding_constraint_p or op.params.get("identity"):
        return None
    rank = len(ir.shape(op.outs[0]))
    if "logical" in op.params:
        if op.task is None or op.params["rank"] != rank:
            return None
        return list(decisions(translate(op.params["logical"], op.task), rank))
    sharding = op.params["sharding"]
    return list(decisions(sharding.spec, rank)) if isinstance(sharding, NamedSharding) else None


def find_constraints(
    ops: Sequence[ir.Op], sums: Mapping[ir.Value, Array] | None = None
) -> dict[ir.Value, list[tuple[int, Axes]]]:
    """Map values to dimensions and axes of the nearest constraint, or of ``sums``, that cheap operations lead to."""
    nearest: dict[ir.Value, list[tuple[int, Axes]]] = {}
    distance: dict[ir.Value, int] = {}

    def note(atom: ir.Atom, dimensions: list[tuple[int, Axes]], steps: int) -> None:
        if isinstance(atom, ir.Value) and dimensions and steps < distance.get(atom, steps + 1):
            nearest[atom], distance[atom] = dimensions, steps

    for value, total in (sums or {}).items():
        note(value, [(d, axes) for d, axes in enumerate(total.divided) if axes], 0)
    for op in reversed(ops):
        fixed = None if sums else constraint(op)
        if fixed is not None:
            note(op.ins[0], [(d, axes) for d, axes in fixed if axes], 0)
        elif _lies_alike(op) and (dimensions := {(o, d): axes for o in op.outs for d, axes in nearest.get(o, ())}):
            linked = link_dimensions(op)
            groups = [(group, next((dimensions[at] for at in group if at in dimensions), ())) for group in linked]
            for value in op.reads:
                carried = [(d, axes) for group, axes in groups if axes for atom, d in group if atom is value]
                note(value, carried, 1 + min(distance[o] for o in op.outs if o in distance))
    return nearest


def _lies_alike(op: ir.Op) -> bool:
    """Return whether operands may lie as the result: those of cheap operations, of names and of products that scale."""
    scales = op.prim.name == "dot_general" and not any(op.params["dimension_numbers"][0])
    return scales or op.prim.name == "name" or is_cheap(op.prim)


def link_dimensions(op: ir.Op) -> Sequence[Group]:
    """Return the groups of dimensions that go together: by the operation's rule, or else equal ones at equal places."""
    return list(links(op)) or [
        ((out, d), *((v, d) for v in op.reads if len(ir.shape(v)) == len(ir.shape(out)) and ir.shape(v)[d] == n))
        for out in op.outs
        for d, n in enumerate(ir.shape(out))
    ]
