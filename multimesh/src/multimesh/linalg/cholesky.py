"""Left-looking Cholesky factorization over superpanels, and solves with the factor, inside `jax.shard_map`.

For superpanel ``s`` of ``layout``, of width W, on a device with m rows:

    C = A[mine, s] - sum of L[mine, j] @ all_gather(my rows of superpanel s of L[:, j])^H over j < s      (m, W)
    l = cholesky(all_gather(my rows of superpanel s of C))                                                (W, W)
    L[mine, s] = C @ inv(l)^H                                                                             (m, W)

No block is ever inverted: a product with an inverse loses the last digits of a nearly singular matrix. Superpanels run
in a loop, so programs compile in the same time whatever their number. The loop has a few stages, and each leaves out
the rows that are finished. The gathers move N^2 / 2 numbers to each device in all, a quarter of a shard at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from multimesh.linalg.layout import Layout
from multimesh.linalg.rings import adjoint, matmul


class Panels(NamedTuple):
    """My rows of the factor L, with columns in order of elimination. What is above its diagonal means nothing."""

    l: Array  # (padded, count * width)
    logdet: Array
    status: Array  # 0, or the number (from 1) of the first superpanel that is not positive definite


def _cholesky(block: Array, layout: Layout) -> Array:
    """The factor of a diagonal block."""
    factor = functools.partial(lax.linalg.cholesky, symmetrize_input=False)

    def on_first(block: Array) -> Array:
        # Concurrent LAPACK calls of a threaded OpenBLAS wait for each other, and CPU devices share the cores anyway.
        return lax.psum(lax.cond(lax.axis_index(layout.axes) == 0, factor, jnp.zeros_like, block), layout.axes)

    return lax.platform_dependent(block, cpu=on_first, default=factor)


_solved = lax.linalg.triangular_solve
_forward = functools.partial(_solved, left_side=True, lower=True)  # of l and b: inv(l) @ b
_back = functools.partial(_forward, transpose_a=True, conjugate_a=True)  # of l and b: inv(l)^H @ b
_divided = functools.partial(_solved, lower=True, transpose_a=True, conjugate_a=True)  # of l and c: c @ inv(l)^H


def block(l: Array, i: Array | int, j: Array | int, layout: Layout, some: int = 1) -> Array:
    """Rows of superpanel ``i`` of the columns of ``some`` superpanels from ``j`` on, gathered: (W, some * W)."""
    mine = lax.dynamic_slice(l, (i * layout.height, j * layout.width), (layout.height, some * layout.width))
    return lax.all_gather(mine, layout.axes, tiled=True)


def columns(l: Array, j: Array | int, layout: Layout, first: int = 0, some: int = 1) -> Array:
    """My rows from ``first`` on of the columns of ``some`` superpanels from ``j`` on: (padded - first, some * W)."""
    return lax.dynamic_slice(l, (first, j * layout.width), (l.shape[0] - first, some * layout.width))


def over_earlier(
    layout: Layout, s: Array, begin: int, f: Callable[[Array | int, int, Array], Array], c: Array
) -> Array:
    """``c`` after ``f(j, some, c)`` for all superpanels before ``s``: in groups before ``begin``, then one by one."""
    step = layout.at_a_time
    for j in range(0, begin, step):
        c = f(j, min(step, begin - j), c)
    return lax.fori_loop(begin, s, lambda j, c: f(j, 1, c), c)


def factorize(a: Array, layout: Layout, *, in_order: bool = False) -> Panels:
    """Factor my shard of ``A``.

    With ``in_order`` it is the factor of ``A`` itself, and not of a permutation of it.
    """
    padded = layout.pad_matrix(layout.to_rows(a))
    height, width, count = layout.height, layout.width, layout.count
    if in_order:
        l = layout.to_cyclic(padded).reshape(layout.padded, -1)
    else:
        l = padded.reshape(layout.padded, layout.devices, count, height).swapaxes(1, 2).reshape(layout.padded, -1)
    start = lax.axis_index(layout.axes) * height

    def superpanel(s: Array, carry: tuple[Array, Array], begin: int) -> tuple[Array, Array]:
        (l, logs), first = carry, begin * height

        def subtract(j: Array | int, some: int, c: Array) -> Array:
            rows, c = lax.optimization_barrier((block(l, s, j, layout, some), c))
            return c - matmul(columns(l, j, layout, first, some), adjoint(rows))

        c = over_earlier(layout, s, begin, subtract, columns(l, s, layout, first))
        slot = s * height - first
        diagonal = _cholesky(lax.all_gather(lax.dynamic_slice_in_dim(c, slot, height), layout.axes, tiled=True), layout)
        # My rows of the diagonal block are taken as they are. A solve for them would multiply errors by its condition.
        mine = lax.dynamic_slice_in_dim(diagonal, start, height)
        c = lax.dynamic_update_slice_in_dim(_divided(diagonal, c), mine, slot, 0)
        log = 2 * jnp.log(jnp.real(jnp.diagonal(diagonal))).sum()
        return lax.dynamic_update_slice(l, c, (first, s * width)), logs.at[s].set(log)

    carry = l, jnp.zeros(count, jnp.finfo(l.dtype).dtype)
    for stage in layout.stages:
        carry = lax.fori_loop(stage.start, stage.stop, functools.partial(superpanel, begin=stage.start), carry)
    l, logs = carry
    bad = ~jnp.isfinite(logs)
    return Panels(l, logs.sum(), jnp.where(bad.any(), jnp.argmax(bad) + 1, 0).astype(jnp.int32))


def solve(panels: Panels, b: Array, layout: Layout) -> Array:
    """``inv(A) @ b``, for ``b`` of shape (N, r), whole on every device."""
    height, l = layout.height, panels.l
    start = lax.axis_index(layout.axes) * height

    def forward(s: Array, carry: tuple[Array, Array], first: int) -> tuple[Array, Array]:
        x, done = carry  # done: the known part of L @ y, on my rows from `first` on
        known = lax.all_gather(lax.dynamic_slice_in_dim(done, s * height - first, height), layout.axes, tiled=True)
        y = _forward(block(l, s, s, layout), x[s] - known)
        return x.at[s].set(y), done + matmul(columns(l, s, layout, first), y)

    def back(k: Array, carry: tuple[Array, Array], first: int) -> tuple[Array, Array]:
        x, mine = carry  # mine: my rows of x from `first` on, zero where they are not known yet
        s = layout.count - 1 - k
        known = lax.psum(matmul(adjoint(columns(l, s, layout, first)), mine), layout.axes)
        y = _back(block(l, s, s, layout), x[s] - known)
        rows = lax.dynamic_slice_in_dim(y, start, height)
        return x.at[s].set(y), lax.dynamic_update_slice_in_dim(mine, rows, s * height - first, 0)

    x, done = layout.to_panels(b), jnp.zeros((layout.padded, b.shape[-1]), b.dtype)
    for stage in layout.stages:
        first = stage.start * height
        step = functools.partial(forward, first=first)
        x, done = lax.fori_loop(stage.start, stage.stop, step, (x, done[first - layout.padded :]))
    mine = done[:0]
    for stage in reversed(layout.stages):
        first = stage.start * height
        mine = jnp.pad(mine, ((layout.padded - first - len(mine), 0), (0, 0)))
        step = functools.partial(back, first=first)
        x, mine = lax.fori_loop(layout.count - stage.stop, layout.count - stage.start, step, (x, mine))
    return layout.from_panels(x)


def forward_own(l: Array, x: Array, layout: Layout) -> Array:
    """``inv(L) @ x``, for my own columns of ``x``, (count, width, k) in order of elimination."""

    def superpanel(s: Array, x: Array) -> Array:
        c = lax.fori_loop(0, s, lambda j, c: c - matmul(block(l, s, j, layout), x[j]), x[s])
        return x.at[s].set(_forward(block(l, s, s, layout), c))

    return lax.fori_loop(0, layout.count, superpanel, x)


def back_own(l: Array, x: Array, layout: Layout) -> Array:
    """``inv(L)^H @ x``, for my own columns of ``x``, (count, width, k) in order of elimination."""

    def superpanel(k: Array, x: Array) -> Array:
        s = layout.count - 1 - k
        c = lax.fori_loop(s + 1, layout.count, lambda j, c: c - matmul(adjoint(block(l, j, s, layout)), x[j]), x[s])
        return x.at[s].set(_back(block(l, s, s, layout), c))

    return lax.fori_loop(0, layout.count, superpanel, x)


def solve_own(panels: Panels, x: Array, layout: Layout) -> Array:
    """``inv(A) @ x``, for my own columns of ``x``, (count, width, k) in order of elimination."""
    return back_own(panels.l, forward_own(panels.l, x, layout), layout)


def solve_columns(panels: Panels, b: Array, layout: Layout) -> Array:
    """``inv(A) @ b``, for my own columns of ``b``, (N, r / devices)."""
    return layout.from_panels(solve_own(panels, layout.to_panels(b), layout))


def inverse(panels: Panels, layout: Layout) -> Array:
    """My shard of ``inv(A)``."""
    mine = (jnp.arange(layout.devices) == lax.axis_index(layout.axes))[:, None, None]
    eye = jnp.where(mine, jnp.eye(layout.padded, layout.held, dtype=panels.l.dtype), 0)
    eye = eye.reshape(layout.devices, layout.count, layout.height, -1).swapaxes(0, 1)
    x = layout.from_panels(solve_own(panels, eye.reshape(layout.count, layout.width, -1), layout))
    return x if not layout.rows else layout.from_rows(adjoint(x))


def lower_factor(panels: Panels, layout: Layout) -> Array:
    """My shard of L, from panels that were made ``in_order``; what is above its diagonal means nothing."""
    rows = layout.from_cyclic(panels.l)[: layout.held]
    columns_first = rows.T.reshape(layout.devices, layout.padded, -1)
    return layout.from_rows(layout.unpad(columns_first).T)
