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
from multimesh.core.specs import AnyMesh, Axes, entry, lay_out, size

FEWEST, USUAL, MOST = 8, 16, 32  # superpanels: fewer do more work in more memory, more make larger executables


def to_rows(a: Array, mesh: AnyMesh, cols: Axes) -> Array:
    """My shard of a matrix -> my rows, with rows of zeros at the end where the devices do not divide them."""
    if not cols:
        return a
    a = jnp.pad(a, ((0, -a.shape[0] % size(mesh, cols)), (0, 0)))
    return lax.all_to_all(a, cols, 0, 1, tiled=True)


def from_rows(a: Array, cols: Axes) -> Array:
    """My rows of a matrix -> my shard; rows that `to_rows` added are still there."""
    return lax.all_to_all(a, cols, 1, 0, tiled=True) if cols else a


@dataclasses.dataclass(frozen=True)
class ShardedMatrix:
    """A matrix with its rows and columns sharded over mesh axes."""

    mesh: AnyMesh
    rows: Axes
    cols: Axes

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

    def placed(self, a: Array) -> Array:
        """Lay out ``a``, and its gradient, as the matrix."""
        return lay_out(a, self.mesh, self.rows, self.cols)

    def on_shards(
        self, f: Callable[..., Any], in_specs: Any, out_specs: Any, on_one_device: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Run ``f`` on the shards of each device, or ``on_one_device``, a function of JAX, where one device has all."""
        run = on_one_device if on_one_device is not None and self.devices == 1 else f
        # Unchecked: JAX can't infer that what an `all_gather` returns is the same on all devices.
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@dataclasses.dataclass(frozen=True)
class Layout(ShardedMatrix):
    """An ``order`` x ``order`` matrix, cut into ``count`` superpanels."""

    order: int
    height: int
    count: int

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
        """Number of contiguous ranges into which ``order`` is cut before each is padded for its devices."""
        return size(self.mesh, self.rows) if self.rows else self.devices

    @property
    def rows_held(self) -> int:
        """Rows of a device, if the matrix is cut by rows only."""
        return math.ceil(self.order // self.groups / (self.devices // self.groups))

    def with_panels(self, tile: int | None = None) -> Layout:
        """Choose superpanels of about ``tile`` rows of each device: 8 to 32, by default 16, if the rows suffice.

        More than 16 devices have more superpanels, so that a gathered block has at most a quarter of a shard.
        """
        enough = 2 * math.isqrt(self.devices)
        fewest, usual, most = (math.ceil(self.rows_held / max(count, enough)) for count in (FEWEST, USUAL, MOST))
        height = max(min(tile or usual, fewest), most)
        count = math.ceil(self.rows_held / height)
        return dataclasses.replace(self, height=math.ceil(self.rows_held / count), count=count)

    def in_order(self) -> Layout:
        """Choose a number of superpanels that the devices divide; `to_cyclic` needs that."""
        count = self.devices * max(1, math.ceil(min(USUAL, self.rows_held) / self.devices))
        return dataclasses.replace(self, height=math.ceil(self.rows_held / count), count=count)

    @property
    def rows_at_a_time(self) -> int:
        """Rows of whole superpanels, at most an eighth of all, that divide them."""
        return self.height * max(some for some in range(1, max(1, self.count // FEWEST) + 1) if self.count % some == 0)

    # The methods below work on the shards of one device, inside `jax.shard_map`.

    def to_rows(self, a: Array, *, hermitian: bool = True) -> Array:
        """My shard of a matrix -> my rows, (held, order)."""
        if not self.rows and hermitian:
            return a.conj().T
        return to_rows(a, self.mesh, self.cols)

    def from_rows(self, a: Array) -> Array:
        """Move my rows of any matrix, (held, order), to my shard."""
        return from_rows(a, self.cols)[: self.order // size(self.mesh, self.rows)]

    def pad(self, b: Array) -> Array:
        """Pad rows in natural order, (order, r), with zeros to (devices, padded, r)."""
        b = b.reshape(self.groups, self.order // self.groups, -1)
        split = self.devices // self.groups
        b = jnp.pad(b, ((0, 0), (0, split * self.rows_held - b.shape[1]), (0, 0))).reshape(
            self.devices, self.rows_held, -1
        )
        return jnp.pad(b, ((0, 0), (0, self.padded - self.rows_held), (0, 0)))

    def unpad(self, b: Array) -> Array:
        """Undo `pad`."""
        b = b[:, : self.rows_held].reshape(self.groups, -1, b.shape[-1])
        return b[:, : self.order // self.groups].reshape(self.order, -1)

    def pad_matrix(self, a: Array) -> Array:
        """Pad my rows, (held, order), with rows and columns of the identity to (padded, devices, padded)."""
        if self.devices * self.padded == self.order:
            return a.reshape(self.padded, self.devices, self.padded)
        a = jnp.pad(a, ((0, self.padded - self.rows_held), (0, 0)))
        a = self.pad(a.T).transpose(2, 0, 1)
        me, row = lax.axis_index(self.axes), jnp.arange(self.padded)
        split = self.devices // self.groups
        missing = (row >= self.rows_held) | (me % split * self.rows_held + row >= self.order // self.groups)
        is_local = (jnp.arange(self.devices) == me)[:, None] & (row[:, None, None] == row) & missing[:, None, None]
        return jnp.where(is_local, jnp.ones((), a.dtype), jnp.where(missing[:, None, None], 0, a))

    def superpanels(self, a: Array) -> Array:
        """Move columns from natural order, (padded, devices, padded), to elimination's, (count, padded, width)."""
        a = a.reshape(self.padded, self.devices, self.count, self.height)
        return a.transpose(2, 0, 1, 3).reshape(self.count, self.padded, self.width)

    def to_panels(self, b: Array) -> Array:
        """Move rows from natural order, (order, r), to order of elimination, (count, width, r)."""
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
