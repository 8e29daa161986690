"""Left-looking Cholesky factorization over superpanels, and solves with the factor, inside `jax.shard_map`.

For superpanel ``s`` of ``layout``, of width W, on a device that has m rows left:

    C = A[mine, s] - L[mine, :s] @ all_gather(my rows of superpanel s of L[:, :s])^H      (m, W), one gemm
    l = cholesky(all_gather(C[first rows]))                                               (W, W)
    L[mine, s] = C @ inv(l)^H                                                             (m, W), one trsm

No block is ever inverted: a product with an inverse loses the last digits of a nearly singular matrix. Every shape is
static and the same on all devices. The gathers move N^2 / 2 numbers to each device in all. Each gather waits until the
one before is used. So at one time a device holds gathered numbers as large as a quarter of a shard.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from multimesh.linalg.layout import Layout

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # no TF32 on GPUs


class Panels(NamedTuple):
    """My rows of the factor L, from each superpanel on. The first ``height`` rows are in its diagonal block."""

    below: tuple[Array, ...]  # (padded - s * height, width)
    logdet: Array
    status: Array  # 0, or the number (from 1) of the first superpanel that is not positive definite


def adjoint(x: Array) -> Array:
    """Conjugate transpose of a matrix."""
    return x.conj().T


def _cholesky(block: Array, layout: Layout) -> Array:
    """The factor of a diagonal block."""
    factor = functools.partial(lax.linalg.cholesky, symmetrize_input=False)

    def on_first(block: Array) -> Array:
        # Concurrent LAPACK calls of a threaded OpenBLAS wait for each other, and CPU devices share the cores anyway.
        return lax.psum(lax.cond(lax.axis_index(layout.axes) == 0, factor, jnp.zeros_like, block), layout.axes)

    return lax.platform_dependent(block, cpu=on_first, default=factor)


def _gather(mine: Array, after: Array, layout: Layout) -> tuple[Array, Array]:
    """Gather rows from all devices once ``after`` is known; return them and ``after``."""
    mine, after = lax.optimization_barrier((mine, after))
    return lax.all_gather(mine, layout.axes, tiled=True), after


_solved = lax.linalg.triangular_solve
_forward = functools.partial(_solved, left_side=True, lower=True)  # of l and b: inv(l) @ b
_back = functools.partial(_forward, transpose_a=True, conjugate_a=True)  # of l and b: inv(l)^H @ b
_divided = functools.partial(_solved, lower=True, transpose_a=True, conjugate_a=True)  # of l and c: c @ inv(l)^H


def factorize(a: Array, layout: Layout, *, in_order: bool = False) -> Panels:
    """Factor my shard of ``A``.

    With ``in_order`` it is the factor of ``A`` itself, and not of a permutation of it.
    """
    padded = layout.pad_matrix(layout.to_rows(a))
    height, width = layout.height, layout.width
    if in_order:
        columns = layout.to_cyclic(padded).reshape(layout.padded, 1, layout.count, width)
    else:
        columns = padded.reshape(layout.padded, layout.devices, layout.count, height)
    below: list[Array] = []
    start = lax.axis_index(layout.axes) * height
    for s in range(layout.count):
        c = columns[s * height :, :, s].reshape(-1, width)
        for some in reversed(layout.at_a_time(s)):  # last panel first: nothing of this superpanel runs before it
            left = jnp.concatenate([below[j][(s - j) * height :] for j in some], 1)
            rows, c = _gather(left[:height], c, layout)
            c = c - matmul(left, adjoint(rows))
        l = _cholesky(lax.all_gather(c[:height], layout.axes, tiled=True), layout)
        # My rows of l are taken as they are. A solve for them would multiply errors by the condition of l.
        mine = lax.dynamic_slice_in_dim(l, start, height)
        below.append(jnp.concatenate([mine, _divided(l, c[height:])]))
    diagonals = [jnp.diagonal(lax.dynamic_slice_in_dim(panel[:height], start, height, 1)) for panel in below]
    each = lax.psum(2 * jnp.log(jnp.real(jnp.stack(diagonals))).sum(1), layout.axes)
    bad = ~jnp.isfinite(each)
    status = jnp.where(bad.any(), jnp.argmax(bad) + 1, 0).astype(jnp.int32)
    return Panels(tuple(below), each.sum(), status)


def solve(panels: Panels, b: Array, layout: Layout) -> Array:
    """``inv(A) @ b``, for ``b`` of shape (N, r), whole on every device."""
    height = layout.height
    x = layout.to_panels(b)
    done = jnp.zeros((layout.padded, b.shape[-1]), b.dtype)  # known part of L @ y, on my rows from this superpanel on
    for s, below in enumerate(panels.below):
        l, done = _gather(below[:height], done, layout)
        c = x[s] - lax.all_gather(done[:height], layout.axes, tiled=True) if s else x[s]
        x = x.at[s].set(_forward(l, c))
        done = done[height:] + matmul(below[height:], x[s])
    mine = done  # my rows of x behind this superpanel; none at first
    start = lax.axis_index(layout.axes) * height
    for s in reversed(range(layout.count)):
        l, mine = _gather(panels.below[s][:height], mine, layout)
        below = panels.below[s][height:]
        c = x[s] - lax.psum(matmul(adjoint(below), mine), layout.axes) if below.shape[0] else x[s]
        x = x.at[s].set(_back(l, c))
        mine = jnp.concatenate([lax.dynamic_slice_in_dim(x[s], start, height), mine])
    return layout.from_panels(x)


def _solve_own(panels: Panels, x: Array, layout: Layout) -> Array:
    """``inv(A) @ x``, for my own columns of ``x``, (count, width, k) in order of elimination.

    Either sweep writes a superpanel of ``x`` once, when nothing reads its old value any more, so XLA writes in place.
    """
    height, width, count = layout.height, layout.width, layout.count
    x = x.reshape(count * width, -1)

    def before(s: int, some: range, c: Array) -> tuple[Array, Array]:  # of L: rows of s, columns of some earlier ones
        below, c = lax.optimization_barrier((panels.below[some.start : some.stop], c))
        mine = [panel[(s - j) * height : (s - j + 1) * height] for j, panel in zip(some, below, strict=True)]
        return lax.all_gather(jnp.concatenate(mine, 1), layout.axes, tiled=True), c

    def behind(s: int, some: range, c: Array) -> tuple[Array, Array]:  # of L: rows of some later ones, columns of s
        below, c = lax.optimization_barrier((panels.below[s], c))
        mine = below[(some.start - s) * height : (some.stop - s) * height].reshape(len(some), height, width)
        return lax.all_gather(mine, layout.axes, axis=1, tiled=True).reshape(-1, width), c

    def get(x: Array, some: range) -> Array:
        return x[some.start * width : some.stop * width]

    def put(x: Array, s: int, rows: Array) -> Array:
        # Not x.at[]: of all rows it captures an empty array, with which the Shardy of jax 0.11.2 ends the process.
        return lax.optimization_barrier(lax.dynamic_update_slice_in_dim(x, rows, s * width, 0))

    for s in range(count):
        c = get(x, range(s, s + 1))
        for some in layout.at_a_time(s):
            l, c = before(s, some, c)
            c = c - matmul(l, get(x, some))
        l, c = before(s, range(s, s + 1), c)
        x = put(x, s, _forward(l, c))
    for s in reversed(range(count)):
        c = get(x, range(s, s + 1))
        for some in layout.at_a_time(count - s - 1):
            later = range(s + 1 + some.start, s + 1 + some.stop)
            l, c = behind(s, later, c)
            c = c - matmul(adjoint(l), get(x, later))
        l, c = before(s, range(s, s + 1), c)
        x = put(x, s, _back(l, c))
    return x.reshape(count, width, -1)


def solve_columns(panels: Panels, b: Array, layout: Layout) -> Array:
    """``inv(A) @ b``, for my own columns of ``b``, (N, r / devices)."""
    return layout.from_panels(_solve_own(panels, layout.to_panels(b), layout))


def inverse(panels: Panels, layout: Layout) -> Array:
    """My shard of ``inv(A)``."""
    mine = (jnp.arange(layout.devices) == lax.axis_index(layout.axes))[:, None, None]
    eye = jnp.where(mine, jnp.eye(layout.padded, layout.held, dtype=panels.below[0].dtype), 0)
    eye = eye.reshape(layout.devices, layout.count, layout.height, -1).swapaxes(0, 1)
    x = layout.from_panels(_solve_own(panels, eye.reshape(layout.count, layout.width, -1), layout))
    return x if not layout.rows else layout.from_rows(adjoint(x))


def lower_factor(panels: Panels, layout: Layout) -> Array:
    """My shard of L, from panels that were made ``in_order``."""
    height = layout.height
    columns = [jnp.pad(below, ((s * height, 0), (0, 0))) for s, below in enumerate(panels.below)]
    rows = layout.from_cyclic(jnp.concatenate(columns, 1))[: layout.held]
    columns_first = rows.T.reshape(layout.devices, layout.padded, -1)
    return layout.from_rows(layout.unpad(columns_first).T)
