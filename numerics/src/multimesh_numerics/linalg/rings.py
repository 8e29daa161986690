"""Products of sharded matrices inside `jax.shard_map`: blocks pass by in a ring, so no device holds a whole matrix.

All matrices are sharded by rows, over the same axes; a device has rows ``me`` of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from multimesh.core.specs import Axes, permute

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # no TF32 on GPUs


def adjoint(x: Array) -> Array:
    """Conjugate transpose of a matrix."""
    return x.conj().T


def norm(x: Array, axes: Axes) -> Array:
    """Return the Frobenius norm of X, which neither overflows nor underflows; 1 for zeros."""
    largest = lax.pmax(jnp.max(jnp.abs(x), initial=0), axes)
    largest = jnp.where(largest == 0, 1, largest)
    scaled = largest * jnp.sqrt(lax.psum(jnp.sum(jnp.abs(x / largest) ** 2), axes))
    return jnp.where(scaled == 0, 1, scaled)


def ring_sum(x: Array, f: Callable[[Array, Array, Array], Array], start: Array, axes: Axes) -> Array:
    """Fold ``result = f(k, x of device k, result)`` over all devices, one after the other, from ``start`` on."""
    p, me = lax.axis_size(axes), lax.axis_index(axes)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, result = carry
        result = f((me - i) % p, x, result)
        return permute(x, axes, [(k, (k + 1) % p) for k in range(p)]), result

    return lax.fori_loop(0, p, step, (x, start))[1]


def times(x: Array, y: Array, axes: Axes) -> Array:
    """My rows of ``X @ Y``."""
    size = y.shape[0]

    def add(k: Array, y: Array, z: Array) -> Array:
        return z + matmul(lax.dynamic_slice_in_dim(x, k * size, size, 1), y)

    return ring_sum(y, add, jnp.zeros((x.shape[0], y.shape[1]), x.dtype), axes)


def times_adjoint(x: Array, y: Array, axes: Axes) -> Array:
    """My rows of ``X @ Y^H``."""
    size = y.shape[0]

    def put(k: Array, y: Array, z: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(z, matmul(x, adjoint(y)), k * size, 1)

    return ring_sum(y, put, jnp.zeros((x.shape[0], size * lax.axis_size(axes)), x.dtype), axes)


def adjoint_times(x: Array, y: Array, axes: Axes) -> Array:
    """My rows of ``X^H @ Y``; the devices divide the columns of ``X``."""
    p, me = lax.axis_size(axes), lax.axis_index(axes)
    size = x.shape[1] // p

    def step(i: Array, z: Array) -> Array:
        z = permute(z, axes, [(k, (k + 1) % p) for k in range(p)])
        local = lax.dynamic_slice_in_dim(x, (me + p - 1 - i) % p * size, size, 1)
        return z + matmul(adjoint(local), y)

    return lax.fori_loop(0, p, step, jnp.zeros((size, y.shape[1]), x.dtype))


def adjoint_of(x: Array, axes: Axes) -> Array:
    """My rows of ``X^H``; the devices divide the columns of ``X``."""
    p = lax.axis_size(axes)
    return lax.all_to_all(adjoint(x).reshape(p, -1, x.shape[0]), axes, 0, 2, tiled=True)[0]


def gram(x: Array, axes: Axes) -> Array:
    """My rows of ``X^H @ X``; the devices divide the columns of ``X``."""
    return adjoint_times(x, x, axes)


def orthogonal(x: Array, gram: Array, axes: Axes) -> Array:
    """X (3 - X^H X) / 2, a Newton-Schulz step to the nearest matrix with orthonormal columns."""
    return 1.5 * x - 0.5 * times(x, gram, axes)
