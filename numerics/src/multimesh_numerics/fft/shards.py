"""The transforms of one device's shard, inside `jax.shard_map`.

A dimension is transformed when a device has all of it. Then an all-to-all shards it instead of the next one. X, Y and Z
are the transformed dimensions, which come last; ``p`` and ``q`` are the numbers of devices along the mesh axes of X and
Y:

    slab     X/p Y Z    -> transform Y, Z -> X Y/p Z   -> transform X
    pencil   X/p Y/q Z  -> transform Z -> X/p Y Z/q    -> transform Y -> X Y/p Z/q  -> transform X

The dimension in work comes last, as FFT libraries prefer. Two dimensions are a slab without Y.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """A transform: its dimensions, their sizes, and the mesh axes that share them."""

    mesh: AnyMesh
    dims: tuple[int, ...]  # of the array: X, Y and Z, or X and Z
    sizes: tuple[int, ...]  # of these dimensions, before the transform
    first: Axes  # mesh axes that share X
    second: Axes  # mesh axes that share Y: none in a slab
    batch: tuple[Axes, ...]  # mesh axes that share each of the other dimensions
    real: bool
    transposed: bool
    norm: str | None
    chunks: int

    @property
    def devices(self) -> int:
        """The number of devices that share the transformed dimensions."""
        return specs.size(self.mesh, self.first + self.second)

    @property
    def turned(self) -> tuple[int, ...]:
        """The positions of X, Y and Z in the transposed layout."""
        return (-1, -2) if len(self.dims) == 2 else (-1, -2, -3) if self.second else (-1, -3, -2)

    def _axes(self, of_dims: Sequence[Axes]) -> tuple[Axes, ...]:
        of, batch = dict(zip(self.dims, of_dims, strict=True)), iter(self.batch)
        return tuple(of[d] if d in of else next(batch) for d in range(len(self.batch) + len(self.dims)))

    @property
    def before(self) -> tuple[Axes, ...]:
        """Mesh axes of each dimension of the array before the transform."""
        return self._axes((self.first, self.second, ())[: len(self.dims)])

    @property
    def after(self) -> tuple[Axes, ...]:
        """Mesh axes of each dimension of the transformed array."""
        if not self.transposed:
            return self._axes(((), self.first, self.second)[: len(self.dims)])
        axes = (self.second, self.first, ()) if self.second else (self.first, (), ())
        return (*self.batch, *axes[: len(self.dims)])


def _exchange(x: Array, axes: Axes, split: int, concat: int, layout: Decomposition) -> Array:
    """Shard dimension ``split``, padded with zeros to a multiple of its devices, instead of ``concat``."""
    missing = -x.shape[split] % specs.size(layout.mesh, axes)
    if missing:
        x = jnp.pad(x, [(0, missing if d == split % x.ndim else 0) for d in range(x.ndim)])
    return lax.all_to_all(x, axes, split % x.ndim, concat % x.ndim, tiled=True)


def _map_chunks(f: Callable[[Array], Array], x: Array, dim: int, to: int, chunks: int) -> Array:
    """Apply ``f``, which makes ``to`` of ``dim``, to parts of ``x``: one can travel while another is transformed."""
    chunks = min(chunks, x.shape[dim])
    return f(x) if chunks <= 1 else jnp.concatenate([f(part) for part in jnp.array_split(x, chunks, dim)], to)


def forward(x: Array, layout: Decomposition) -> Array:
    """My shard of the transform."""
    norm, chunks = layout.norm, layout.chunks
    fft = functools.partial(jnp.fft.fft, norm=norm)
    last = functools.partial(jnp.fft.rfft if layout.real else jnp.fft.fft, n=layout.sizes[-1], norm=norm)

    # Arrays are transposed before the all-to-all: to transpose its result is slower.
    def lines(x: Array, axes: Axes = layout.first) -> Array:  # X/p, Z -> Z/p, X
        return _exchange(last(x).swapaxes(-1, -2), axes, -2, -1, layout)

    def slabs(x: Array) -> Array:  # X/p, Y, Z -> Y/p, Z, X
        return _exchange(jnp.moveaxis(x, -3, -1), layout.first, -3, -1, layout)

    def planes(x: Array) -> Array:  # X/p, Z/q, Y -> Z/q, Y/p, X
        x = jnp.moveaxis(fft(x, n=layout.sizes[1]), -3, -1)
        return _exchange(x, layout.first, -2, -1, layout)

    x = jnp.moveaxis(x, layout.dims, range(-len(layout.dims), 0))
    if len(layout.dims) == 2:
        x = _map_chunks(lines, x, 0, 0, chunks) if x.ndim > 2 else lines(x)
    elif layout.second:
        pencils = functools.partial(lines, axes=layout.second)  # X/p, Y/q, Z -> X/p, Z/q, Y
        x = _map_chunks(planes, _map_chunks(pencils, x, -3, -3, chunks), -2, -3, chunks)
    elif chunks > 1:
        x = _map_chunks(lambda x: slabs(fft(x, n=layout.sizes[1], axis=-2)), last(x), -1, -2, chunks)
    else:  # one call for two dimensions is faster
        both = jnp.fft.rfftn if layout.real else jnp.fft.fftn
        x = slabs(both(x, layout.sizes[1:], axes=(-2, -1), norm=norm))
    x = fft(x, n=layout.sizes[0])
    return x if layout.transposed else jnp.moveaxis(x, layout.turned, layout.dims)


def inverse(x: Array, layout: Decomposition) -> Array:
    """My shard of the inverse transform."""
    norm, chunks = layout.norm, layout.chunks
    ifft = functools.partial(jnp.fft.ifft, norm=norm)
    last = functools.partial(jnp.fft.irfft if layout.real else jnp.fft.ifft, n=layout.sizes[-1], norm=norm)

    def lines(x: Array, axes: Axes = layout.first) -> Array:  # X, Z/p -> X/p, Z
        return last(_exchange(x, axes, -2, -1, layout))

    def slabs(x: Array) -> Array:  # X, Y/p, Z -> X/p, Y, Z
        return ifft(_exchange(x, layout.first, -3, -2, layout), n=layout.sizes[1], axis=-2)

    def planes(x: Array) -> Array:  # X, Z/q, Y/p -> X/p, Z/q, Y
        return ifft(_exchange(x, layout.first, -3, -1, layout), n=layout.sizes[1])

    if not layout.transposed:
        x = jnp.moveaxis(x, layout.dims, layout.turned)
    x = ifft(x, n=layout.sizes[0])
    if len(layout.dims) == 2:
        x = x.swapaxes(-1, -2)
        x = _map_chunks(lines, x, 0, 0, chunks) if x.ndim > 2 else lines(x)
    elif layout.second:
        x = _map_chunks(planes, jnp.moveaxis(x, -1, -3), -2, -2, chunks)
        pencils = functools.partial(lines, axes=layout.second)  # X/p, Y, Z/q -> X/p, Y/q, Z
        x = _map_chunks(pencils, x.swapaxes(-1, -2), -3, -3, chunks)
    elif chunks > 1:
        x = last(_map_chunks(slabs, jnp.moveaxis(x, -1, -3), -1, -1, chunks))
    else:
        both = jnp.fft.irfftn if layout.real else jnp.fft.ifftn
        x = _exchange(jnp.moveaxis(x, -1, -3), layout.first, -3, -2, layout)
        x = both(x, layout.sizes[1:], axes=(-2, -1), norm=norm)
    return jnp.moveaxis(x, range(-len(layout.dims), 0), layout.dims)


def transform_on_one_device(x: Array, layout: Decomposition, inverse: bool) -> Array:
    """Transform by JAX alone, where one device has all of the transformed dimensions, in the same layouts."""
    if inverse and layout.transposed:
        x = jnp.moveaxis(x, layout.turned, layout.dims)
    x = getattr(jnp.fft, f"{'i' * inverse}{'r' * layout.real}fftn")(x, layout.sizes, layout.dims, layout.norm)
    return jnp.moveaxis(x, layout.dims, layout.turned) if layout.transposed and not inverse else x
