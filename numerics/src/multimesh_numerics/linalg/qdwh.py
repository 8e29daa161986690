"""The polar decomposition A = U H of a tall matrix by QDWH, inside `jax.shard_map`.

Each iteration maps the singular values of X to x (a + b x^2) / (1 + c x^2), with weights that bring all of them to 1
as fast as possible. While c is large, [sqrt(c) X; 1] = Q R comes from two Cholesky factorizations, the second of Q^H Q
(CholeskyQR2); at the end from one. Zero singular values would stay zero. So noise of the size of rounding is added
first, as it is in any computation, and U always has orthonormal columns. Noise may happen to have a singular value
that is smaller than the weights assume, so the last iteration is repeated until the columns are orthonormal.

Y. Nakatsukasa, Z. Bai and F. Gygi, "Optimizing Halley's iteration for computing the matrix polar decomposition", SIAM
Journal on Matrix Analysis and Applications 31 (2010).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from multimesh.core.specs import Axes

from multimesh_numerics.linalg import rings
from multimesh_numerics.linalg.cholesky import cholesky_of_shards, forward_columns, solve_columns
from multimesh_numerics.linalg.layout import Layout, ShardedMatrix
from multimesh_numerics.linalg.rings import adjoint

PANELS = 8  # superpanels of the factorizations
MOST = 60  # iterations by one factorization; 2 are usual, and each triples what is too small


class _State(NamedTuple):
    x: Array  # my rows
    gram: Array  # my rows of X^H X
    done: Array  # iterations by one factorization
    orthonormal: Array


def _weights(eps: float, order: int) -> tuple[np.ndarray, np.ndarray]:
    """The weights a, b and c of all iterations: of those by two factorizations, and of those by one."""
    least, weights = eps / (10 * order**2), []
    while abs(1 - least) > 10 * eps:
        root = (4 * (1 - least**2) / least**4) ** (1 / 3)
        a = math.sqrt(1 + root) + math.sqrt(8 - 4 * root + 8 * (2 - least**2) / (least**2 * math.sqrt(1 + root))) / 2
        a = min(a, 2 * math.sqrt(1 + 0.01 / eps) - 1)  # two factorizations are enough for c below 0.01 / eps
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        weights.append((a, b, c))
        least = min(1.0, least * (a + b * least**2) / (1 + c * least**2))
    many = sum(c > 100 for _, _, c in weights)
    table = np.array(weights)
    return table[:many], table[many:]


def _noise(x: Array, axes: Axes) -> Array:
    """A random matrix with the shape of ``x`` on each device, whose largest singular value is about 1."""
    real = jnp.finfo(x.dtype).dtype
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index(axes))
    noise = jax.random.normal(key, (2, *x.shape), real) / (
        math.sqrt(x.shape[0] * lax.axis_size(axes)) + math.sqrt(x.shape[1])
    )
    return lax.complex(noise[0], noise[1]) if jnp.iscomplexobj(x) else noise[0]


def polar_of_shards(a: Array, matrix: ShardedMatrix) -> tuple[Array, Array]:
    """My rows of U and of H, from my shard of A, which has at least as many rows as columns.

    H has rows and columns of zeros at the end, so that the devices divide its rows.
    """
    a, p, axes, order = matrix.to_rows(a), matrix.devices, matrix.axes, matrix.n
    padded = -(-order // p) * p
    added = ((0, 0), (0, padded - order))
    eps = float(jnp.finfo(a.dtype).eps)
    x = a / rings.norm(a, axes) + eps / math.sqrt(order) * jnp.where(matrix.real_rows(), _noise(a, axes), 0)
    x = jnp.pad(x, added)
    layout = Layout(matrix.mesh, axes, (), padded, padded)
    layout = layout.with_panels(math.ceil(layout.local_rows / PANELS))
    row = lax.axis_index(axes) * (padded // p) + jnp.arange(padded // p)[:, None]
    one = (row == jnp.arange(padded)).astype(a.dtype)
    real = jnp.finfo(a.dtype).dtype

    def divide(x: Array, z: Array) -> Array:  # x @ inv(R), for a Z = R^H R; R is triangular in order of elimination
        l = cholesky_of_shards(z, layout).l
        return adjoint(layout.from_panels(forward_columns(l, layout.to_panels(adjoint(x)), layout)))

    def by_two(x: Array, weights: Array) -> Array:
        a, b, c = weights
        q = divide(jnp.concatenate([jnp.sqrt(c) * x, one]), one + c * rings.gram(x, axes))
        q = divide(q, rings.gram(q, axes))
        product = rings.times_adjoint(q[: len(x)], q[len(x) :], axes)
        return b / c * x + (a - b / c) / jnp.sqrt(c) * product

    many, few = (jnp.asarray(weights, real) for weights in _weights(eps, padded))

    def orthonormal(g: Array) -> Array:  # so far that `rings.orthogonal` does the rest
        return ~(lax.psum(jnp.sum(jnp.abs(g - jnp.where(row < order, one, 0)) ** 2), axes) > eps)  # NaN stays NaN

    def by_one(state: _State) -> _State:
        a, b, c = few[jnp.minimum(state.done, len(few) - 1)]
        panels = cholesky_of_shards(one + c * state.gram, layout)
        x = b / c * state.x + (a - b / c) * adjoint(solve_columns(panels, adjoint(state.x), layout))
        g = rings.gram(x, axes)
        return _State(x, g, state.done + 1, orthonormal(g))

    x = lax.fori_loop(0, len(many), lambda i, x: by_two(x, many[i]), x)
    g = rings.gram(x, axes)
    state = lax.while_loop(
        lambda state: (state.done < len(few)) | ~state.orthonormal & (state.done < MOST),
        by_one,
        _State(x, g, jnp.zeros((), jnp.int32), orthonormal(g)),
    )
    u = rings.orthogonal(state.x, state.gram, axes)[:, :order]
    h = rings.adjoint_times(jnp.pad(u, added), jnp.pad(a, added), axes)
    return u, (h + rings.adjoint_of(h, axes)) / 2
