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


def fold_rows(layout: Layout, s: Array | int, f: Callable[[Array, T], T], c: T) -> T:
    """Fold ``c = f(i, c)`` over my rows of superpanels from ``s`` on, and maybe a few before, some rows at a time.

    ``i`` is the first of ``layout.rows_at_a_time`` rows.
    """
    step = layout.rows_at_a_time
    return lax.fori_loop(s * layout.height // step, layout.padded // step, lambda k, c: f(k * step, c), c)


def map_rows(layout: Layout, s: Array | int, f: Callable[[Array, Array], Array], c: Array) -> Array:
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
    a = layout.pad_matrix(layout.rows_of_hermitian(a))
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


def cholesky_on_one_device(a: Array, wrong: Array) -> Panels:
    """Return one panel, JAX's factor of ``a`` itself; all is NaN if ``a`` is ``wrong``."""
    l = lax.linalg.cholesky(jnp.where(wrong, jnp.nan, a), symmetrize_input=False)
    logdet = 2 * jnp.log(jnp.real(jnp.diagonal(l))).sum()
    return Panels(l[None], logdet, jnp.where(wrong, -1, jnp.isnan(logdet)).astype(jnp.int32))


def substitute(
    l: Array, x: Array, layout: Layout, *, lower: bool, transposed: bool, unit_diagonal: bool = False
) -> Array:
    """Return ``inv(T) @ x`` or ``inv(T^H) @ x``, for the lower or upper triangle T of ``l``.

    ``x``, (count, width, r), is in order of elimination, and whole on every device.
    """
    height = layout.height
    start = lax.axis_index(layout.axes) * height
    options = {"lower": lower, "transpose_a": transposed, "conjugate_a": transposed, "unit_diagonal": unit_diagonal}

    def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, local = carry
        s = k if lower != transposed else layout.count - 1 - k
        first = s if lower else 0

        def add(i: Array, product: Array) -> Array:
            some = lax.dynamic_slice_in_dim(local, i, layout.rows_at_a_time)
            return product + matmul(adjoint(slice_rows(l, i, layout, s)), some)

        if transposed:  # local: my rows of the result, zero where they are not known yet
            product = lax.psum(fold_rows(layout, first, add, jnp.zeros_like(x[0])), layout.axes)
        else:  # local: of my rows of T, the product with what is known of the result
            product = lax.all_gather(lax.dynamic_slice_in_dim(local, s * height, height), layout.axes, tiled=True)
        y = lax.linalg.triangular_solve(block(l, s, s, layout), x[s] - product, left_side=True, **options)
        x = x.at[s].set(y)
        if transposed:
            return x, lax.dynamic_update_slice_in_dim(local, lax.dynamic_slice_in_dim(y, start, height), s * height, 0)
        return x, map_rows(layout, first, lambda i, some: some + matmul(slice_rows(l, i, layout, s), y), local)

    return lax.fori_loop(0, layout.count, step, (x, jnp.zeros((layout.padded, x.shape[-1]), x.dtype)))[0]


def solve_cholesky(panels: Panels, b: Array, layout: Layout) -> Array:
    """Return ``inv(A) @ b``, for ``b`` of shape (N, r), whole on every device."""
    x = substitute(panels.l, layout.to_panels(b), layout, lower=True, transposed=False)
    return layout.from_panels(substitute(panels.l, x, layout, lower=True, transposed=True))


def forward_columns(l: Array, x: Array, layout: Layout) -> Array:
    """Return ``inv(L) @ x``, for my columns of ``x``, (count, width, k) in order of elimination."""

    def superpanel(s: Array, x: Array) -> Array:
        c = lax.fori_loop(0, s, lambda j, c: c - matmul(block(l, s, j, layout), x[j]), x[s])
        return x.at[s].set(_forward(block(l, s, s, layout), c))

    return lax.fori_loop(0, layout.count, superpanel, x)


def back_columns(l: Array, x: Array, layout: Layout) -> Array:
    """Return ``inv(L)^H @ x``, for my columns of ``x``, (count, width, k) in order of elimination."""

    def superpanel(k: Array, x: Array) -> Array:
        s = layout.count - 1 - k
        c = lax.fori_loop(s + 1, layout.count, lambda j, c: c - matmul(adjoint(block(l, j, s, layout)), x[j]), x[s])
        return x.at[s].set(_back(block(l, s, s, layout), c))

    return lax.fori_loop(0, layout.count, superpanel, x)


def solve_columns(panels: Panels, b: Array, layout: Layout) -> Array:
    """Return ``inv(A) @ b``, for my columns of ``b``, (N, r / devices)."""
    x = forward_columns(panels.l, layout.to_panels(b), layout)
    return layout.from_panels(back_columns(panels.l, x, layout))


def invert_cholesky(panels: Panels, layout: Layout) -> Array:
    """My shard of ``inv(A)``."""
    me, split = lax.axis_index(layout.axes), layout.devices // layout.groups
    first = me // split * (layout.n // layout.groups) + me % split * layout.local_rows
    eye = jnp.arange(layout.n)[:, None] == first + jnp.arange(layout.local_rows)
    x = solve_columns(panels, eye.astype(panels.l.dtype), layout)
    return x if not layout.rows else layout.from_rows(adjoint(x))


def lower_factor(panels: Panels, layout: Layout) -> Array:
    """My shard of L, from panels that were made ``in_order``; what is above its diagonal means nothing."""
    rows = layout.from_cyclic(panels.l.swapaxes(0, 1).reshape(layout.padded, -1))[: layout.local_rows]
    columns_first = rows.T.reshape(layout.devices, layout.padded, -1)
    return layout.from_rows(layout.unpad(columns_first).T)
