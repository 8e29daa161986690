"""How a matrix is cut: the rows of each device, and the order in which they are eliminated.

Device ``d`` of ``p`` holds contiguous rows of a Hermitian matrix. Columns are conjugate rows. One all-to-all brings a
matrix that is cut both ways to rows. A superpanel is ``height`` rows of *every* device, ``width = p * height`` in all.
Elimination goes superpanel by superpanel. That is a symmetric permutation of the matrix under which contiguous shards
are block-cyclic, so all devices have the same work at all times. Rows of the identity fill the last superpanel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes, entry, lay_out, size
from multimesh.errors import UsageError

FEWEST, USUAL, MOST = 8, 16, 32  # superpanels: fewer do more work in more memory, more make larger executables


@dataclasses.dataclass(frozen=True)
class ShardedMatrix:
    """A matrix of shape (m, n) with its rows and columns sharded over mesh axes."""

    mesh: AnyMesh
    rows: Axes
    cols: Axes
    m: int
    n: int

    @cached_property
    def axes(self) -> Axes:
        """All axes along which the work is split."""
        return self.rows + self.cols

    @cached_property
    def devices(self) -> int:
        """The number of devices that share the work."""
        return size(self.mesh, self.axes)

    @property
    def spec(self) -> P:
        """The spec of the matrix."""
        return P(entry(self.rows), entry(self.cols))

    @cached_property
    def shard_rows(self) -> int:
        """Rows of a shard."""
        return self.m // size(self.mesh, self.rows)

    @cached_property
    def local_rows(self) -> int:
        """Rows of a device, if the matrix is cut by rows only."""
        return math.ceil(self.shard_rows / size(self.mesh, self.cols))

    def place(self, a: Array) -> Array:
        """Lay out ``a``, and its gradient, as the matrix."""
        return lay_out(a, self.mesh, self.rows, self.cols)

    def cut(self, a: Array) -> Array:
        """Cut an (n, n) result out of ``a``, which may be larger for the devices, and shard its rows if they divide."""
        if len(a) > self.n:
            a = lay_out(a, self.mesh)[: self.n, : self.n]
        return lay_out(a, self.mesh, () if self.n % self.devices else self.axes)

    def on_shards(
        self, f: Callable[..., Any], in_specs: Any, out_specs: Any, on_one_device: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Run ``f`` on the shards of each device, or ``on_one_device``, a function of JAX, where one device has all."""
        run = on_one_device if on_one_device is not None and self.devices == 1 else f
        # Unchecked: JAX can't infer that what an `all_gather` returns is the same on all devices.
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # The methods below, and those of `Layout`, work on the shards of one device, inside `jax.shard_map`.

    def to_rows(self, a: Array) -> Array:
        """My shard -> my rows, with rows of zeros at the end where the devices do not divide them."""
        if not self.cols:
            return a
        a = jnp.pad(a, ((0, -a.shape[0] % size(self.mesh, self.cols)), (0, 0)))
        return lax.all_to_all(a, self.cols, 0, 1, tiled=True)

    def from_rows(self, a: Array) -> Array:
        """My rows of a matrix with as many rows -> my shard."""
        return (lax.all_to_all(a, self.cols, 1, 0, tiled=True) if self.cols else a)[: self.shard_rows]

    def real_rows(self) -> Array:
        """Flag those of my rows that are rows of the matrix, not padding: (rows, 1)."""
        first = lax.axis_index(self.cols) * self.local_rows if self.cols else 0
        return (first + jnp.arange(self.local_rows) < self.shard_rows)[:, None]


@dataclasses.dataclass(frozen=True)
class Layout(ShardedMatrix):
    """An (n, n) matrix, cut into ``count`` superpanels."""

    height: int = 0
    count: int = 0

    @property
    def width(self) -> int:
        """Rows of a superpanel."""
        return self.devices * self.height

    @property
    def padded(self) -> int:
        """Rows of a device, including rows of the identity."""
        return self.count * self.height

    @cached_property
    def groups(self) -> int:
        """Number of contiguous ranges into which the rows are cut before each is padded for its devices."""
        return size(self.mesh, self.rows) if self.rows else self.devices

    @property
    def panel_spec(self) -> P:
        """The spec of my rows of superpanels, (count, padded, width)."""
        return P(None, entry(self.axes))

    def with_panels(self, tile: int | None = None) -> Layout:
        """Choose superpanels of about ``tile`` rows of each device: 8 to 32, by default 16, if the rows suffice.

        More than 16 devices have more superpanels, so that a gathered block has at most a quarter of a shard.
        """
        enough = 2 * math.isqrt(self.devices)
        fewest, usual, most = (math.ceil(self.local_rows / max(count, enough)) for count in (FEWEST, USUAL, MOST))
        height = max(min(tile or usual, fewest), most)
        return self.cut_into(math.ceil(self.local_rows / height))

    def in_order(self) -> Layout:
        """Choose a number of superpanels that the devices divide; `to_cyclic` needs that."""
        return self.cut_into(self.devices * max(1, math.ceil(min(USUAL, self.local_rows) / self.devices)))

    def cut_into(self, count: int) -> Layout:
        """Choose the number of superpanels."""
        return dataclasses.replace(self, height=math.ceil(self.local_rows / count), count=count)

    @property
    def rows_at_a_time(self) -> int:
        """Rows of whole superpanels, at most an eighth of all, that divide them."""
        return self.height * max(some for some in range(1, max(1, self.count // FEWEST) + 1) if self.count % some == 0)

    def rows_of_hermitian(self, a: Array) -> Array:
        """My shard of a Hermitian matrix -> my rows, (local_rows, n)."""
        return self.to_rows(a) if self.rows else a.conj().T

    def pad(self, b: Array) -> Array:
        """Pad rows in natural order, (n, r), with zeros to (devices, padded, r)."""
        b = b.reshape(self.groups, self.n // self.groups, -1)
        split = self.devices // self.groups
        b = jnp.pad(b, ((0, 0), (0, split * self.local_rows - b.shape[1]), (0, 0))).reshape(
            self.devices, self.local_rows, -1
        )
        return jnp.pad(b, ((0, 0), (0, self.padded - self.local_rows), (0, 0)))

    def unpad(self, b: Array) -> Array:
        """Undo `pad`."""
        b = b[:, : self.local_rows].reshape(self.groups, -1, b.shape[-1])
        return b[:, : self.n // self.groups].reshape(self.n, -1)

    def pad_matrix(self, a: Array) -> Array:
        """Pad my rows, (local_rows, n), with rows and columns of the identity to (padded, devices, padded)."""
        if self.devices * self.padded == self.n:
            return a.reshape(self.padded, self.devices, self.padded)
        a = jnp.pad(a, ((0, self.padded - self.local_rows), (0, 0)))
        a = self.pad(a.T).transpose(2, 0, 1)
        me, row = lax.axis_index(self.axes), jnp.arange(self.padded)
        split = self.devices // self.groups
        missing = (row >= self.local_rows) | (me % split * self.local_rows + row >= self.n // self.groups)
        is_local = (jnp.arange(self.devices) == me)[:, None] & (row[:, None, None] == row) & missing[:, None, None]
        return jnp.where(is_local, jnp.ones((), a.dtype), jnp.where(missing[:, None, None], 0, a))

    def superpanels(self, a: Array) -> Array:
        """Move columns from natural order, (padded, devices, padded), to elimination's, (count, padded, width)."""
        a = a.reshape(self.padded, self.devices, self.count, self.height)
        return a.transpose(2, 0, 1, 3).reshape(self.count, self.padded, self.width)

    def to_panels(self, b: Array) -> Array:
        """Move rows from natural order, (n, r), to order of elimination, (count, width, r)."""
        b = self.pad(b).reshape(self.devices, self.count, self.height, -1)
        return b.swapaxes(0, 1).reshape(self.count, self.width, -1)

    def from_panels(self, b: Array) -> Array:
        """Undo `to_panels`."""
        b = b.reshape(self.count, self.devices, self.height, -1).swapaxes(0, 1)
        return self.unpad(b.reshape(self.devices, self.padded, -1))

    def to_cyclic(self, a: Array) -> Array:
        """Swap my padded rows, (padded, k), for every ``devices``-th block of ``height`` rows of the whole matrix."""
        a = a.reshape(self.count // self.devices, self.devices, self.height, -1)
        return lax.all_to_all(a, self.axes, 1, 0, tiled=True).reshape(self.padded, -1)

    def from_cyclic(self, a: Array) -> Array:
        """Undo `to_cyclic`."""
        a = a.reshape(self.devices, self.count // self.devices, 1, self.height, -1)
        return lax.all_to_all(a, self.axes, 0, 2, tiled=True).reshape(self.padded, -1)


def matrix_of(
    func: str, a: Any, mesh: AnyMesh | None, spec: P | None, *, square: bool = False, tall: bool = False
) -> tuple[Array, ShardedMatrix]:
    """Return a matrix as an array, and its shape and sharding, checked."""
    a = specs.as_array(a)
    if a.ndim != 2 or (square and a.shape[0] != a.shape[1]):
        need = "the matrix must be square" if square else "needs a matrix"
        raise UsageError(f"{func}: {need}, got shape {a.shape}; use jax.vmap for a stack of matrices")
    specs.check_dtype(func, a)
    specs.check_not_empty(func, a)
    mesh, (rows, cols) = specs.find(func, a, mesh, spec)
    for length, axes, name in zip(a.shape, (rows, cols), ("rows", "columns"), strict=True):
        if length % size(mesh, axes):
            remedy = "; append rows and columns of the identity" if square else ""
            raise UsageError(
                f"{func}: {length} {name} can't be cut evenly for the {size(mesh, axes)} devices along "
                f"{entry(axes)!r}{remedy}"
            )
    if tall and a.shape[0] < a.shape[1]:
        raise UsageError(f"{func}: needs at least as many rows as columns, got shape {a.shape}; pass a.conj().T")
    return a, ShardedMatrix(mesh, rows, cols, *a.shape)


def layout_of(func: str, a: Any, mesh: AnyMesh | None, spec: P | None, tile: int | None = None) -> tuple[Array, Layout]:
    """Return a square matrix, cut into superpanels of about ``tile`` rows of each device, by default into 16."""
    a, matrix = matrix_of(func, a, mesh, spec, square=True)
    return a, Layout(matrix.mesh, matrix.rows, matrix.cols, *a.shape).with_panels(tile)
