"""Left-looking Cholesky factorization over superpanels, and what is solved with it, inside `jax.shard_map`.

Superpanel ``s`` of ``layout``, of width W, on a device that has m rows left:

    C = A[mine, s] - L[mine, :s] @ all_gather(my rows of superpanel s of L[:, :s])^H      (m, W), one gemm
    l = cholesky(all_gather(C[first rows]))                                               (W, W)
    L[mine, s] = C @ inv(l)^H                                                             (m, W), one gemm

Every shape is static and the same on all devices. The gathers move N^2 / 2 numbers to each device in all.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from multimesh.linalg.layout import Layout

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # float32 means float32 on GPUs too: no TF32


class Panels(NamedTuple):
    """A factor: my rows of L from each superpanel on, and the inverses of its diagonal blocks."""

    below: tuple[Array, ...]  # (padded - s * height, width): above L's diagonal is rubbish
    inverses: tuple[Array, ...]  # (width, width), the same on all devices
    logdet: Array
    status: Array  # 0, or the number (from 1) of the first superpanel that is not positive definite


def adjoint(x: Array) -> Array:
    """Conjugate transpose of a matrix."""
    return x.conj().T


def _diagonal(block: Array, layout: Layout) -> tuple[Array, Array]:
    """Factor of a diagonal block, and its inverse."""

    def factor(block: Array) -> Array:
        l = lax.linalg.cholesky(block, symmetrize_input=False)
        eye = jnp.eye(layout.width, dtype=block.dtype)
        return jnp.stack([l, lax.linalg.triangular_solve(l, eye, left_side=True, lower=True)])

    def on_first(block: Array) -> Array:
        # Concurrent LAPACK calls of a threaded OpenBLAS wait for each other, and CPU devices share the cores anyway.
        first = lax.axis_index(layout.axes) == 0
        both = lax.cond(first, factor, lambda block: jnp.zeros((2, *block.shape), block.dtype), block)
        return lax.psum(both, layout.axes)

    l, inverse = lax.platform_dependent(block, cpu=on_first, default=factor)
    return l, inverse


def factorize(a: Array, layout: Layout, *, in_order: bool = False) -> Panels:
    """Factor of my shard of ``A``; ``in_order`` makes it that of ``A`` itself, not of a permutation of it."""
    padded = layout.pad_matrix(layout.to_rows(a))
    height, width, axes = layout.height, layout.width, layout.axes
    if in_order:
        columns = layout.to_cyclic(padded).reshape(layout.padded, 1, layout.count, width)
    else:
        columns = padded.reshape(layout.padded, layout.devices, layout.count, height)
    below: list[Array] = []
    inverses, logdets = [], []
    left: Array | None = None  # my rows of L from this superpanel on, so far
    for s in range(layout.count):
        c = columns[s * height :, :, s].reshape(-1, width)
        if s:
            last = below[-1][height:]
            left = last if left is None else jnp.concatenate([left[height:], last], 1)
            c = c - matmul(left, adjoint(lax.all_gather(left[:height], axes, tiled=True)))
        l, inverse = _diagonal(lax.all_gather(c[:height], axes, tiled=True), layout)
        below.append(matmul(c, adjoint(inverse)))
        inverses.append(inverse)
        logdets.append(2 * jnp.sum(jnp.log(jnp.real(jnp.diagonal(l)))))
    each = jnp.stack(logdets)
    bad = ~jnp.isfinite(each)
    status = jnp.where(bad.any(), jnp.argmax(bad) + 1, 0).astype(jnp.int32)
    return Panels(tuple(below), tuple(inverses), each.sum(), status)


def solve(panels: Panels, b: Array, layout: Layout) -> Array:
    """``inv(A) @ b`` for ``b`` of shape (N, r) that every device has whole."""
    height = layout.height
    b = layout.to_panels(b)
    y: list[Array] = []
    done = jnp.zeros((layout.padded, b.shape[-1]), b.dtype)  # L @ y so far, on my rows from this superpanel on
    for s, (below, inverse) in enumerate(zip(panels.below, panels.inverses, strict=True)):
        c = b[s] - lax.all_gather(done[:height], layout.axes, tiled=True) if s else b[s]
        y.append(matmul(inverse, c))
        done = done[height:] + matmul(below[height:], y[s])
    x = y
    mine = done  # my rows of x behind this superpanel: none yet
    start = lax.axis_index(layout.axes) * height
    for s in reversed(range(layout.count)):
        below = panels.below[s][height:]
        c = y[s] - lax.psum(matmul(adjoint(below), mine), layout.axes) if below.shape[0] else y[s]
        x[s] = matmul(adjoint(panels.inverses[s]), c)
        mine = jnp.concatenate([lax.dynamic_slice_in_dim(x[s], start, height), mine])
    return layout.from_panels(jnp.stack(x))


def _solve_own(panels: Panels, b: Array, layout: Layout) -> Array:
    """``inv(A) @ b`` for columns of ``b`` of my own, (count, width, k) in order of elimination."""
    height, width = layout.height, layout.width

    def row(s: int) -> Array:  # superpanel s of L, left of the diagonal: (width, s * width)
        mine = [panels.below[j][(s - j) * height : (s - j + 1) * height] for j in range(s)]
        return lax.all_gather(jnp.concatenate(mine, 1), layout.axes, tiled=True)

    y = matmul(panels.inverses[0], b[0])
    for s in range(1, layout.count):
        y = jnp.concatenate([y, matmul(panels.inverses[s], b[s] - matmul(row(s), y))])
    x = []
    for s in reversed(range(layout.count)):
        x.append(matmul(adjoint(panels.inverses[s]), y[s * width :]))
        y = y[: s * width] - matmul(adjoint(row(s)), x[-1]) if s else y
    return jnp.stack(x[::-1])


def solve_columns(panels: Panels, b: Array, layout: Layout) -> Array:
    """``inv(A) @ b`` for columns of ``b`` of my own, (N, r / devices)."""
    return layout.from_panels(_solve_own(panels, layout.to_panels(b), layout))


def inverse(panels: Panels, layout: Layout) -> Array:
    """My shard of ``inv(A)``."""
    me = lax.axis_index(layout.axes)
    mine = (jnp.arange(layout.devices) == me)[:, None, None]
    eye = jnp.where(mine, jnp.eye(layout.padded, layout.held, dtype=panels.inverses[0].dtype), 0)
    eye = eye.reshape(layout.devices, layout.count, layout.height, -1).swapaxes(0, 1)
    x = layout.from_panels(_solve_own(panels, eye.reshape(layout.count, layout.width, -1), layout))
    return x if not layout.rows else layout.from_rows(adjoint(x))


def lower_factor(panels: Panels, layout: Layout) -> Array:
    """My shard of L, from panels made ``in_order``."""
    height = layout.height
    columns = [jnp.pad(below, ((s * height, 0), (0, 0))) for s, below in enumerate(panels.below)]
    rows = layout.from_cyclic(jnp.concatenate(columns, 1))
    first = lax.axis_index(layout.axes) * layout.padded
    row = first + jnp.arange(layout.padded)[:, None]
    rows = jnp.where(jnp.arange(rows.shape[1]) <= row, rows, 0)[: layout.held]
    columns_first = rows.T.reshape(layout.devices, layout.padded, -1)
    return layout.from_rows(layout.unpad(columns_first).T)
