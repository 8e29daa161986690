"""A matrix with any number of rows and columns, sharded over a mesh: its rows on each device, and checks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes, entry, lay_out, size
from multimesh.errors import UsageError

from multimesh_numerics.linalg.layout import ShardedMatrix, from_rows, to_rows


@dataclasses.dataclass(frozen=True)
class Tall(ShardedMatrix):
    """A matrix of shape (m, n) with at least as many rows as columns."""

    m: int
    n: int

    @property
    def square(self) -> Axes:
        """The axes that share the rows of an (n, n) result; none if they do not divide them."""
        return () if self.n % self.devices else self.axes

    def to_rows(self, a: Array) -> Array:
        """Move my shard to my rows, with rows of zeros at the end where the devices do not divide them."""
        return to_rows(a, self.mesh, self.cols)

    def present(self) -> Array:
        """Flag those of my rows that are rows of the matrix, not padding: (rows, 1)."""
        shard, ways = self.m // size(self.mesh, self.rows), size(self.mesh, self.cols)
        rows = -(-shard // ways)
        first = lax.axis_index(self.cols) * rows if self.cols else 0
        return (first + jnp.arange(rows) < shard)[:, None]

    def from_rows(self, a: Array) -> Array:
        """Undo `to_rows`, for a matrix with as many columns."""
        return from_rows(a, self.cols)[: self.m // size(self.mesh, self.rows)]

    def cut(self, a: Array) -> Array:
        """Cut the rows and columns that were added for the devices off an (n, n) result."""
        if len(a) > self.n:
            a = lay_out(a, self.mesh)[: self.n, : self.n]
        return lay_out(a, self.mesh, self.square)


def tall_of(func: str, a: Any, mesh: AnyMesh | None, spec: P | None) -> Tall:
    """Return the shape and sharding of a matrix, checked."""
    if a.ndim != 2:
        raise UsageError(f"{func}: needs a matrix, got shape {a.shape}; use jax.vmap for a stack of matrices")
    specs.check_dtype(func, a)
    specs.check_not_empty(func, a)
    mesh, (rows, cols) = specs.find(func, a, mesh, spec)
    for length, axes, name in zip(a.shape, (rows, cols), ("rows", "columns"), strict=True):
        if length % size(mesh, axes):
            raise UsageError(
                f"{func}: {length} {name} can't be cut evenly for the {size(mesh, axes)} devices along {entry(axes)!r}"
            )
    return Tall(mesh, rows, cols, *a.shape)


def needs_rows(func: str, layout: Tall) -> None:
    """Refuse a matrix with more columns than rows."""
    if layout.m < layout.n:
        raise UsageError(
            f"{func}: needs at least as many rows as columns, got shape ({layout.m}, {layout.n}); pass a.conj().T"
        )
