"""Block Jacobi eigenvalues and eigenvectors of a Hermitian matrix, inside `jax.shard_map`.

The columns are cut into two blocks for each device. In a round each device diagonalizes the square of its two blocks,
and all apply these rotations to columns and rows. Then blocks travel to the neighbours. In a sweep of
``2 * devices - 1`` rounds each pair of blocks meets once, as in a round-robin tournament. Of two blocks the one with
the smaller number gets the smaller eigenvalues, so the end is also sorted. Sweeps go on until what is left beside the
diagonal is rounding; near the end each squares it. Clustered and equal eigenvalues need nothing special.

Rounding of all these rotations adds up. So the eigenvectors V are made orthogonal once more, and the last sweeps begin
with V^H A V of the matrix itself.

R. Brent and F. Luk, "The solution of singular-value and symmetric eigenvalue problems on multiprocessor arrays", SIAM
Journal on Scientific and Statistical Computing 6 (1985).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from multimesh.core.specs import permute

from multimesh_numerics.linalg import rings
from multimesh_numerics.linalg.layout import Layout
from multimesh_numerics.linalg.rings import adjoint, matmul

MOST = 60  # sweeps; 5 to 10 are usual


class _State(NamedTuple):
    a: Array  # (devices, 2b, 2b): my columns of what becomes diagonal; rows are cut into the pairs of all devices
    v: Array  # (n, 2b): my columns of the eigenvectors
    scale: Array  # largest eigenvalue, by its magnitude
    residual: Array  # norm of what is beside the diagonal
    before: Array  # the same, a sweep ago
    sorted: Array
    sweeps: Array


def _numbers(devices: int) -> np.ndarray:
    """The numbers of the two blocks of each device in each round, (rounds, devices, 2): the first stays, others go on.

    They go round by one place: to the last device as its first block, and back as the second.
    """
    places = np.r_[2 * np.arange(1, devices), 2 * np.arange(devices)[::-1] + 1]
    numbers = np.zeros((2 * devices - 1, 2 * devices), int)
    numbers[:, places] = [np.roll(places, k) for k in range(2 * devices - 1)]
    return numbers.reshape(-1, devices, 2)


def _send_on(x: Array, layout: Layout) -> Array:
    """Exchange blocks for the next round; my two lie beside each other in the last dimension."""
    p, me = layout.devices, lax.axis_index(layout.axes)
    top, bottom = jnp.split(x, 2, -1)
    from_left = permute(jnp.where(me == 0, bottom, top), layout.axes, [(k, k + 1) for k in range(p - 1)])
    from_right = permute(bottom, layout.axes, [(k, k - 1) for k in range(1, p)])
    return jnp.concatenate([jnp.where(me == 0, top, from_left), jnp.where(me == p - 1, top, from_right)], -1)


def _diagonal(a: Array, layout: Layout) -> Array:
    """The diagonal of my square."""
    return jnp.real(jnp.diagonal(lax.dynamic_index_in_dim(a, lax.axis_index(layout.axes), keepdims=False)))


def _judge(state: _State, layout: Layout) -> _State:
    diagonal = _diagonal(state.a, layout)
    columns = jnp.arange(len(diagonal)) + lax.axis_index(layout.axes) * len(diagonal)
    rows = state.a.reshape(-1, len(diagonal))
    beside = jnp.where(jnp.arange(len(rows))[:, None] == columns, 0, rows)
    residual = jnp.sqrt(lax.psum(jnp.sum(jnp.real(beside) ** 2 + jnp.imag(beside) ** 2), layout.axes))
    w = lax.all_gather(diagonal, layout.axes, tiled=True)
    scale = jnp.max(jnp.where(w < 1, jnp.abs(w), 0))
    in_order = jnp.all(w[1:] >= w[:-1] - 64 * jnp.finfo(w.dtype).eps * scale)
    return _State(state.a, state.v, scale, residual, state.residual, in_order, state.sweeps + 1)


def eigh_of_shards(a: Array, layout: Layout) -> tuple[Array, Array]:
    """Return the eigenvalues, ascending, and my rows of the eigenvectors, (local_rows, n), from my shard of the matrix.

    ``layout`` has two superpanels. If the sweeps do not converge, which we have never seen, all is NaN.
    """
    p, size, me = layout.devices, 2 * layout.height, lax.axis_index(layout.axes)
    a = layout.rows_of_hermitian(a)
    real = jnp.finfo(a.dtype).dtype
    norm = 2 * rings.norm(a, layout.axes)  # all eigenvalues are below one half now; rows of the identity come last
    x = layout.pad_matrix(a / norm).reshape(size, p * size)
    x = (x + rings.adjoint_of(x, layout.axes)) / 2  # the rounding of a matrix from lower precision would never leave
    v = jnp.eye(p * size, dtype=x.dtype).reshape(p * size, p, size)
    v = lax.dynamic_index_in_dim(v, me, 1, keepdims=False)
    numbers = jnp.asarray(_numbers(p))
    move = _numbers(p)[1].reshape(-1)

    def play(round: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        a, v = carry
        square = lax.dynamic_index_in_dim(a, me, keepdims=False)
        turn = jnp.linalg.eigh(square)[1]
        number = numbers[round, me]
        turn = jnp.where(number[0] < number[1], turn, jnp.roll(turn, layout.height, 1))
        turns = lax.all_gather(turn, layout.axes)
        a = jnp.einsum("kji,kjl->kil", turns.conj(), matmul(a, turn), precision=lax.Precision.HIGHEST)
        a = a.reshape(2 * p, layout.height, size)[move].reshape(p, size, size)
        return _send_on(a, layout), _send_on(matmul(v, turn), layout)

    def sweep(state: _State) -> _State:
        a, v = lax.fori_loop(0, 2 * p - 1, play, (state.a, state.v))
        return _judge(state._replace(a=a, v=v), layout)

    eps = float(jnp.finfo(real).eps)
    tolerance = 2 * math.sqrt(layout.n) * eps
    rounding = max(tolerance, layout.n / 2 * eps)  # at most this is left of many rotations

    def converge(a: Array, v: Array, tolerance: float) -> _State:
        def goes_on(state: _State) -> Array:
            shrinks = (state.residual > 0.01 * state.scale) | (state.residual < 0.8 * state.before)
            unfinished = (state.residual > tolerance * state.scale) & shrinks | ~state.sorted
            return unfinished & (state.sweeps < MOST) & ~jnp.isnan(state.residual)

        big = jnp.asarray(jnp.inf, real)
        start = _State(a.reshape(p, size, size), v, big, big, big, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
        return lax.while_loop(goes_on, sweep, start)

    vh = adjoint(converge(adjoint(x), v, rounding).v)
    vh = rings.orthogonal(vh, rings.gram(vh, layout.axes), layout.axes)
    again = rings.times_adjoint(rings.times(vh, x, layout.axes), vh, layout.axes)
    state = converge(adjoint(again), adjoint(vh), tolerance)
    vh = adjoint(state.v)
    v = adjoint(rings.orthogonal(vh, rings.gram(vh, layout.axes), layout.axes))
    failed = ~(state.residual <= 100 * tolerance * state.scale) | ~state.sorted
    w = jnp.sort(lax.all_gather(_diagonal(state.a, layout), layout.axes, tiled=True)) * norm
    rows = lax.all_to_all(v.reshape(p, size, size), layout.axes, 0, 2, tiled=True).reshape(size, p * size)
    nan = jnp.where(failed, jnp.nan, 0).astype(real)
    return w[: layout.n] + nan, rows[: layout.local_rows, : layout.n] + nan
