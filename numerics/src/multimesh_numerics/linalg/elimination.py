"""LU factorization with tournament pivoting, and solves with it, inside `jax.shard_map`.

As in `cholesky`, a superpanel is ``height`` rows of every device, its slots, and as many columns. For each superpanel
the devices choose as many rows as pivots: each factors its own part of the columns, and the rows that it would choose
meet those of others in a tournament. Chosen rows move to the slots of the superpanel, and what was there takes their
places. Then the block of all slots is factored without pivots, and subtract from the rows behind it.

L. Grigori, J. Demmel and H. Xiang, "CALU: a communication optimal LU factorization algorithm", SIAM Journal on Matrix
Analysis and Applications 32 (2011).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from multimesh_numerics.linalg import trees
from multimesh_numerics.linalg.cholesky import columns, map_rows, part, put_columns, substitute
from multimesh_numerics.linalg.layout import Layout
from multimesh_numerics.linalg.rings import matmul

MOST_SWAPPED = 4  # superpanels whose rows are exchanged together: fewer messages, in more memory


class Factors(NamedTuple):
    """My rows of L and U in one array, with columns in order of elimination, and which rows of the matrix they are."""

    lu: Array  # (count, padded, width), as that of `cholesky`
    rows: Array  # (count * width,): the padded rows of the matrix in order of elimination; the same on all devices


def _winners(panel: Array, layout: Layout) -> tuple[Array, Array]:
    """The global numbers (device * padded + row) of the pivots among the active rows, which are not zero: (W,).

    And L and U of these rows, (W, W). In a block of only these rows equal pivots may come in another order, so theirs
    is the order of the numbers.
    """
    width, padded = layout.width, layout.padded
    pivots = lax.linalg.lu(panel)[2][: min(width, padded)]  # what partial pivoting takes first
    rows, numbers = panel[pivots], pivots + lax.axis_index(layout.axes) * padded
    missing = width - len(pivots)
    rows, numbers = jnp.pad(rows, ((0, missing), (0, 0))), jnp.pad(numbers, (0, missing), constant_values=-1)

    def combine(blocks: tuple[Array, Array], _: Array) -> tuple[Array, Array]:
        rows, numbers = blocks[0].reshape(-1, width), blocks[1].reshape(-1)
        best = lax.linalg.lu(rows)[2][:width]
        return rows[best], numbers[best]

    rows, numbers = trees.reduce((rows, numbers), combine, layout.axes)
    lu, _, order = lax.linalg.lu(rows)
    return numbers[order], lu


def _here(numbers: Array, layout: Layout) -> Array:
    """Return the number of each global row among mine; for a row of another device, a number beyond the last."""
    device, row = numbers // layout.padded, numbers % layout.padded
    return jnp.where(device == lax.axis_index(layout.axes), row, layout.padded)


def lu_of_shards(a: Array, layout: Layout) -> Factors:
    """Factor my shard of ``A``. If ``A`` is singular, the factors have zeros on the diagonal of U, or NaN."""
    padded, height, width, count = layout.padded, layout.height, layout.width, layout.count
    p, me = layout.devices, lax.axis_index(layout.axes)
    lu = layout.superpanels(layout.pad_matrix(layout.to_rows(a)))
    of_devices = jnp.arange(p)[:, None] * padded
    many = max(n for n in range(1, MOST_SWAPPED + 1) if count % n == 0)

    def superpanel(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        lu, rows = carry  # rows: of each place, device * padded + row, the row of A that is there
        active = jnp.arange(padded) >= s * height
        panel = jnp.where(active[:, None], columns(lu, s), 0)
        pivots, diagonal = _winners(panel, layout)
        slots = (of_devices + s * height + jnp.arange(height)).reshape(-1)
        # A slot gets its pivot. Its row goes to where a pivot came from, unless it is a pivot itself.
        leaves = ~(slots[:, None] == pivots).any(1)
        free = ~(pivots[:, None] == slots).any(1)
        places = (
            jnp.full(width, p * padded)
            .at[jnp.argsort(~leaves, stable=True)]
            .set(jnp.where(jnp.sort(~free, stable=True), p * padded, pivots[jnp.argsort(~free, stable=True)]))
        )
        to, chosen = _here(places, layout), _here(pivots, layout)
        rows = rows.at[places].set(rows[slots], mode="drop").at[slots].set(rows[pivots])

        def swap(k: Array, lu: Array) -> Array:  # in some superpanels of columns
            x = lax.dynamic_slice_in_dim(lu, k * many, many)
            to_me = x.at[:, chosen].get(mode="fill", fill_value=0)
            to_me = lax.psum_scatter(to_me, layout.axes, scatter_dimension=1, tiled=True)
            leaving = lax.dynamic_slice_in_dim(x, s * height, height, 1)
            x = x.at[:, to].set(lax.all_gather(leaving, layout.axes, axis=1, tiled=True), mode="drop")
            x = lax.dynamic_update_slice_in_dim(x, to_me, s * height, 1)
            return lax.dynamic_update_slice_in_dim(lu, x, k * many, 0)

        def put(lu: Array, j: Array, x: Array, of_slots: Array) -> Array:
            local = lax.dynamic_slice_in_dim(of_slots, me * height, height)
            return put_columns(lu, j, lax.dynamic_update_slice_in_dim(x, local, s * height, 0))

        lu = lax.fori_loop(0, count // many, swap, lu)
        x = columns(lu, s)
        below = map_rows(layout, s + 1, lambda _, some: lax.linalg.triangular_solve(diagonal, some), x)  # x @ inv(U)
        behind = (jnp.arange(padded) >= (s + 1) * height)[:, None]
        lu = put(lu, s, jnp.where(behind, below, x), diagonal)
        trailing = jnp.where(behind, below, 0)

        def later(j: Array, lu: Array) -> Array:
            # Each device solves for a share of the columns.
            u = lax.all_to_all(part(lu, s * height, height, j), layout.axes, 1, 0, tiled=True)
            u = lax.linalg.triangular_solve(diagonal, u, left_side=True, lower=True, unit_diagonal=True)
            u = lax.all_gather(u, layout.axes, axis=1, tiled=True)

            def subtract(i: Array, some: Array) -> Array:
                return some - matmul(lax.dynamic_slice_in_dim(trailing, i, layout.rows_at_a_time), u)

            return put(lu, j, map_rows(layout, s, subtract, columns(lu, j)), u)

        return lax.fori_loop(s + 1, count, later, lu), rows

    lu, rows = lax.fori_loop(0, count, superpanel, (lu, jnp.arange(p * padded)))
    return Factors(lu, rows.reshape(p, count, height).swapaxes(0, 1).reshape(-1))


def solve_lu(factors: Factors, b: Array, layout: Layout, transposed: bool) -> Array:
    """Return ``inv(A) @ b`` or ``inv(A^T) @ b``, for ``b`` of shape (N, r), whole on every device."""
    lu = factors.lu
    if transposed:
        x = substitute(lu, layout.to_panels(b.conj()), layout, lower=False, transposed=True)
        x = substitute(lu, x, layout, lower=True, transposed=True, unit_diagonal=True).conj().reshape(-1, b.shape[1])
        x = jnp.zeros_like(x).at[factors.rows].set(x)
        return layout.unpad(x.reshape(layout.devices, layout.padded, -1))
    x = layout.pad(b).reshape(-1, b.shape[1])[factors.rows].reshape(layout.count, layout.width, -1)
    x = substitute(lu, x, layout, lower=True, transposed=False, unit_diagonal=True)
    return layout.from_panels(substitute(lu, x, layout, lower=False, transposed=False))
