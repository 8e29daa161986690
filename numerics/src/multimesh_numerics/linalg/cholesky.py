"""Left-looking Cholesky factorization over superpanels, and solves with the factor, inside `jax.shard_map`.

For superpanel ``s`` of ``layout``, of width W, on a device with m rows:

    C = A[mine, s] - sum of L[mine, j] @ all_gather(my rows of superpanel s of L[:, j])^H over j < s      (m, W)
    l = cholesky(all_gather(my rows of superpanel s of C))                                                (W, W)
    L[mine, s] = C @ inv(l)^H                                                                             (m, W)

No block is ever inverted: a product with an inverse loses the last digits of a nearly singular matrix. The factor
takes the place of the matrix. Superpanels run in a loop, so programs compile in the same time whatever their number.
An inner loop takes a few superpanels of rows at a time and leaves out those that are finished. The gathers move N^2 /
2 numbers to each device in all, one W x W block at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from multimesh_numerics.linalg.layout import Layout
from multimesh_numerics.linalg.rings import adjoint, matmul

T = TypeVar("T")


class Panels(NamedTuple):
    """My rows of the factor L, with columns in order of elimination. What is above its diagonal means nothing."""

    l: Array  # (count, padded, width): l[s] has the columns of superpanel s, in one piece of memory
    logdet: Array
    status: Array  # 0, or the number (from 1) of the first superpanel that is not positive definite


def _cholesky(block: Array, layout: Layout) -> Array:
    """The factor of a diagonal block."""
    factor = functools.partial(lax.linalg.cholesky, symmetrize_input=False)

    def on_first(block: Array) -> Array:
        # Concurrent LAPACK calls of a threaded OpenBLAS wait for each other, and CPU devices share the cores anyway.
        return lax.psum(lax.cond(lax.axis_index(layout.axes) == 0, factor, jnp.zeros_like, block), layout.axes)

    return lax.platform_dependent(block, cpu=on_first, default=factor)


_forward = functools.partial(lax.linalg.triangular_solve, left_side=True, lower=True)  # of l and b: inv(l) @ b
_back = functools.partial(_forward, transpose_a=True, conjugate_a=True)  # of l and b: inv(l)^H @ b


def _divide(l: Array, c: Array) -> Array:
    """Return ``c @ inv(l)^H``. LAPACK reads the rows of ``c`` as columns, so they are not moved on CPUs."""
    return adjoint(_forward(l, adjoint(c)))


def part(l: Array, row: Array | int, rows: int, s: Array | int) -> Array:
    """Slice ``rows`` of my rows, from ``row`` on, out of the columns of superpanel ``s``."""
    return lax.dynamic_slice(l, (s, row, 0), (1, rows, l.shape[2]))[0]


def block(l: Array, i: Array | int, j: Array | int, layout: Layout) -> Array:
    """Gather the rows of superpanel ``i`` of the columns of superpanel ``j``: (W, W)."""
    return lax.all_gather(part(l, i * layout.height, layout.height, j), layout.axes, tiled=True)


def columns(l: Array, s: Array | int) -> Array:
    """Return my rows of the columns of superpanel ``s``: (padded, W)."""
    return part(l, 0, l.shape[1], s)


def put_columns(l: Array, s: Array | int, c: Array) -> Array:
    """Return ``l`` with ``c`` in place of the columns of superpanel ``s``."""
    return lax.dynamic_update_slice_in_dim(l, c[None], s, 0)


def slice_rows(l: Array, i: Array, layout: Layout, s: Array) -> Array:
    """Slice ``layout.rows_at_a_time`` rows, from ``i`` on, out of the columns of superpanel ``s``."""
    return part(l, i, layout.rows_at_a_time, s)


def fold_rows(layout: Layout, s: Array, f: Callable[[Array, T], T], c: T) -> T:
    """Fold ``c = f(i, c)`` over my rows of superpanels from ``s`` on, and maybe a few before, some rows at a time.

    ``i`` is the first of ``layout.rows_at_a_time`` rows.
    """
    step = layout.rows_at_a_time
    return lax.fori_loop(s * layout.height // step, layout.padded // step, lambda k, c: f(k * step, c), c)


def map_rows(layout: Layout, s: Array, f: Callable[[Array, Array], Array], c: Array) -> Array:
    """Return ``c`` with ``f(i, rows)`` in place of its rows, for the rows that `fold_rows` visits."""

    def change(i: Array, c: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(c, f(i, lax.dynamic_slice_in_dim(c, i, layout.rows_at_a_time)), i, 0)

    return fold_rows(layout, s, change, c)


def cholesky_of_shards(a: Array, layout: Layout, wrong: Array | bool = False, *, in_order: bool = False) -> Panels:
    """Factor my shard of ``A``; all is NaN if it is ``wrong``.

    With ``in_order`` it is the factor of ``A`` itself, and not of a permutation of it.
    """
    height, count = layout.height, layout.count
    start = lax.axis_index(layout.axes) * height
    a = layout.pad_matrix(layout.to_rows(a))
    if in_order:
        a = layout.to_cyclic(a.reshape(layout.padded, -1)).reshape(layout.padded, count, -1).swapaxes(0, 1)
    else:
        a = layout.superpanels(a)

    def superpanel(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        l, logs = carry

        def subtract(j: Array, c: Array) -> Array:
            rows = block(l, s, j, layout)

            def product(i: Array, some: Array) -> Array:
                return some - matmul(slice_rows(l, i, layout, j), adjoint(rows))

            return map_rows(layout, s, product, c)

        c = lax.fori_loop(0, s, subtract, columns(l, s))
        local = lax.dynamic_slice_in_dim(c, s * height, height)
        diagonal = _cholesky(lax.all_gather(local, layout.axes, tiled=True), layout)
        diagonal = jnp.where(wrong, jnp.nan, diagonal)
        c = map_rows(layout, s + 1, lambda _, some: _divide(diagonal, some), c)
        # My rows of the diagonal block are taken as they are. A solve for them would multiply errors by its condition.
        local = lax.dynamic_slice_in_dim(diagonal, start, height)
        c = lax.dynamic_update_slice_in_dim(c, local, s * height, 0)
        log = 2 * jnp.log(jnp.real(jnp.diagonal(diagonal))).sum()
        return put_columns(l, s, c), logs.at[s].set(log)

    l, logs = lax.fori_loop(0, count, superpanel, (a, jnp.zeros(count, jnp.finfo(a.dtype).dtype)))
    bad = ~jnp.isfinite(logs)
    return Panels(l, logs.sum(), jnp.where(bad.any(), jnp.argmax(bad) + 1, 0).astype(jnp.int32))


def solve_cholesky(panels: Panels, b: Array, layout: Layout) -> Array:
    """Return ``inv(A) @ b``, for ``b`` of shape (N, r), whole on every device."""
    height, l = layout.height, panels.l
    start = lax.axis_index(layout.axes) * height

    def forward(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, done = carry  # done: the known part of L @ y, on my rows
        solved = lax.all_gather(lax.dynamic_slice_in_dim(done, s * height, height), layout.axes, tiled=True)
        y = _forward(block(l, s, s, layout), x[s] - solved)
        return x.at[s].set(y), map_rows(layout, s, lambda i, some: some + matmul(slice_rows(l, i, layout, s), y), done)

    def back(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, local = carry  # local: my rows of x, zero where they are not known yet
        s = layout.count - 1 - k

        def add(i: Array, solved: Array) -> Array:
            some = lax.dynamic_slice_in_dim(local, i, layout.rows_at_a_time)
            return solved + matmul(adjoint(slice_rows(l, i, layout, s)), some)

        solved = lax.psum(fold_rows(layout, s, add, jnp.zeros_like(x[0])), layout.axes)
        y = _back(block(l, s, s, layout), x[s] - solved)
        rows = lax.dynamic_slice_in_dim(y, start, height)
        return x.at[s].set(y), lax.dynamic_update_slice_in_dim(local, rows, s * height, 0)

    none = jnp.zeros((layout.padded, b.shape[-1]), b.dtype)
    x, _ = lax.fori_loop(0, layout.count, forward, (layout.to_panels(b), none))
    x, _ = lax.fori_loop(0, layout.count, back, (x, none))
    return layout.from_panels(x)


def forward_own(l: Array, x: Array, layout: Layout) -> Array:
    """Return ``inv(L) @ x``, for my own columns of ``x``, (count, width, k) in order of elimination."""

    def superpanel(s: Array, x: Array) -> Array:
        c = lax.fori_loop(0, s, lambda j, c: c - matmul(block(l, s, j, layout), x[j]), x[s])
        return x.at[s].set(_forward(block(l, s, s, layout), c))

    return lax.fori_loop(0, layout.count, superpanel, x)


def back_own(l: Array, x: Array, layout: Layout) -> Array:
    """Return ``inv(L)^H @ x``, for my own columns of ``x``, (count, width, k) in order of elimination."""

    def superpanel(k: Array, x: Array) -> Array:
        s = layout.count - 1 - k
        c = lax.fori_loop(s + 1, layout.count, lambda j, c: c - matmul(adjoint(block(l, j, s, layout)), x[j]), x[s])
        return x.at[s].set(_back(block(l, s, s, layout), c))

    return lax.fori_loop(0, layout.count, superpanel, x)


def solve_own(panels: Panels, x: Array, layout: Layout) -> Array:
    """Return ``inv(A) @ x``, for my own columns of ``x``, (count, width, k) in order of elimination."""
    return back_own(panels.l, forward_own(panels.l, x, layout), layout)


def solve_columns(panels: Panels, b: Array, layout: Layout) -> Array:
    """Return ``inv(A) @ b``, for my own columns of ``b``, (N, r / devices)."""
    return layout.from_panels(solve_own(panels, layout.to_panels(b), layout))


def invert_cholesky(panels: Panels, layout: Layout) -> Array:
    """My shard of ``inv(A)``."""
    is_local = (jnp.arange(layout.devices) == lax.axis_index(layout.axes))[:, None, None]
    eye = jnp.where(is_local, jnp.eye(layout.padded, layout.rows_held, dtype=panels.l.dtype), 0)
    eye = eye.reshape(layout.devices, layout.count, layout.height, -1).swapaxes(0, 1)
    x = layout.from_panels(solve_own(panels, eye.reshape(layout.count, layout.width, -1), layout))
    return x if not layout.rows else layout.from_rows(adjoint(x))


def lower_factor(panels: Panels, layout: Layout) -> Array:
    """My shard of L, from panels that were made ``in_order``; what is above its diagonal means nothing."""
    rows = layout.from_cyclic(panels.l.swapaxes(0, 1).reshape(layout.padded, -1))[: layout.rows_held]
    columns_first = rows.T.reshape(layout.devices, layout.padded, -1)
    return layout.from_rows(layout.unpad(columns_first).T)
