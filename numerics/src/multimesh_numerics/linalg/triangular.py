"""Solves with a triangular matrix in natural order, inside `jax.shard_map`.

Each device holds contiguous rows. Blocks of ``height`` rows are solved one after the other: their device sends its
triangle, and all devices use what is solved in their own rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from multimesh_numerics.linalg.layout import Layout
from multimesh_numerics.linalg.rings import matmul


def solve_triangle(t: Array, b: Array, layout: Layout, *, lower: bool, transposed: bool) -> Array:
    """Return ``inv(T) @ b`` or ``inv(T^T) @ b``, from my shard of T and all of ``b``, (N, r).

    The other triangle of T is zero.
    """
    height, blocks = layout.height, layout.devices * layout.count
    rows = layout.pad_matrix(layout.to_rows(t)).reshape(layout.padded, -1)
    x = layout.pad(b).reshape(-1, b.shape[1])
    me = lax.axis_index(layout.axes)

    def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, local = carry
        k = k if lower != transposed else blocks - 1 - k
        owns, row = k // layout.count == me, k % layout.count * height
        columns = lax.dynamic_slice_in_dim(rows, k * height, height, 1)
        triangle = jnp.where(owns, lax.dynamic_slice_in_dim(columns, row, height), 0)
        if transposed:  # local: my rows of x, zero where they are not known yet
            product = matmul(columns.T, local)
        else:  # local: of my rows of T, what is known of the product with x
            product = jnp.where(owns, lax.dynamic_slice_in_dim(local, row, height), 0)
        triangle, product = lax.psum((triangle, product), layout.axes)
        c = lax.dynamic_slice_in_dim(x, k * height, height) - product
        y = lax.linalg.triangular_solve(triangle, c, left_side=True, lower=lower, transpose_a=transposed)
        x = lax.dynamic_update_slice_in_dim(x, y, k * height, 0)
        if not transposed:
            return x, local + matmul(columns, y)
        put = lax.dynamic_update_slice_in_dim(local, y, row, 0)
        return x, jnp.where(owns, put, local)

    x, _ = lax.fori_loop(0, blocks, step, (x, jnp.zeros((layout.padded, b.shape[1]), b.dtype)))
    return layout.unpad(x.reshape(layout.devices, layout.padded, -1))
