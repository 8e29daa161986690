"""Propagation of mesh axes between dimensions of arrays that go together.

`autoshard` reads a placed program as such a graph, to lay out arguments; `propagate` reads a plan, to lay out slots.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import Axes, decisions, size, translate


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
