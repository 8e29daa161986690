"""Frequencies, sharded like the transforms, and the removal of padding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes, lay_out
from multimesh.errors import UsageError


def fftfreq(n: int, d: float = 1.0, *, mesh: AnyMesh, spec: P, dtype: jnp.dtype | None = None) -> Array:
    """``jnp.fft.fftfreq(n, d)``, sharded by the one entry of ``spec``, and padded with zeros to a multiple of devices.

    With the entry of a dimension of a transform's result, it has the length and placement of that dimension.
    """
    return _sharded("fftfreq", n, d, mesh, spec, dtype)


def rfftfreq(n: int, d: float = 1.0, *, mesh: AnyMesh, spec: P, dtype: jnp.dtype | None = None) -> Array:
    """``jnp.fft.rfftfreq(n, d)``, sharded and padded as in `fftfreq`."""
    return _sharded("rfftfreq", n, d, mesh, spec, dtype)


def _sharded(what: str, n: int, d: float, mesh: AnyMesh, spec: P, dtype: jnp.dtype | None) -> Array:
    size = jax.ShapeDtypeStruct((n,), float)
    if not specs.axis_names(spec):
        axes: Axes = ()
    else:
        mesh, (axes,) = specs.find(what, size, mesh, spec)

    def values() -> Array:
        found = getattr(jnp.fft, what)(n, d, dtype=dtype)
        return jnp.pad(found, (0, -len(found) % specs.size(mesh, axes)))

    return jax.jit(values, out_shardings=NamedSharding(mesh, P(specs.entry(axes))))()


def unpad(x: Array, shape: tuple[int, ...]) -> Array:
    """Cut an array to its leading part of this shape: the shape of the same result of ``jnp.fft``.

    Dimensions that shrink can't be sharded evenly any more, and become whole on every device.

    Raises
    ------
    UsageError
        If ``shape`` is no leading part of the shape of ``x``.
    """
    if len(shape) != x.ndim or any(not 0 <= n <= m for n, m in zip(shape, x.shape, strict=True)):
        raise UsageError(f"unpad: the shape {tuple(shape)} is no leading part of an array of shape {x.shape}")
    if tuple(shape) == x.shape:
        return x
    known = specs.sharding_of(x)
    if known is not None:
        kept = [specs.axes_of(e) for e in known.spec] + [()] * (x.ndim - len(known.spec))
        axes = tuple(a if n == m else () for a, n, m in zip(kept, shape, x.shape, strict=True))
        return _cut(x, tuple(shape), known.mesh, axes)
    return x[tuple(slice(n) for n in shape)]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _cut(x: Array, shape: tuple[int, ...], mesh: AnyMesh, axes: tuple[Axes, ...]) -> Array:
    return lay_out(lay_out(x, mesh, *axes)[tuple(slice(n) for n in shape)], mesh, *axes)
