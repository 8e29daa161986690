"""Cells of the neighbours around a device's block of a grid, inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from multimesh.core.specs import axes_of, permute
from multimesh.errors import UsageError


def _sides(
    func: str, x: Array, widths: Any, axes: Sequence[Any], inside: int
) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return the number, width and mesh axes of each dimension with a halo."""
    if len(axes) > x.ndim:
        raise UsageError(f"{func}: axes has {len(axes)} entries, and the block {x.ndim} dimensions")
    widths = (widths,) * len(axes) if isinstance(widths, int) else tuple(widths)
    if len(widths) != len(axes) or any(isinstance(w, bool) or not isinstance(w, int) or w < 0 for w in widths):
        raise UsageError(f"{func}: widths is a number of cells, or one for each of the {len(axes)} axes; got {widths}")
    for d, w in enumerate(widths):
        if w > x.shape[d] - 2 * inside * w:
            raise UsageError(
                f"{func}: a halo of {w} cells needs blocks of as many, and dimension {d} has "
                f"{x.shape[d] - 2 * inside * w} on a device; use fewer devices, a larger grid or a narrower halo"
            )
    return [(d, w, axes_of(a)) for d, (w, a) in enumerate(zip(widths, axes, strict=True)) if w]


def _shift(x: Array, axes: tuple[str, ...], by: int, periodic: bool) -> Array:
    """Fetch the block of the device ``by`` places before me; zeros at the border of a grid that is not periodic."""
    p = lax.axis_size(axes) if axes else 1
    pairs = [(k, (k + by) % p) for k in range(p) if periodic or 0 <= k + by < p]
    if p == 1:
        return x if periodic else jnp.zeros_like(x)
    return permute(x, axes, pairs)


def halo_exchange(x: Array, widths: int | Sequence[int], axes: Sequence[Any], periodic: bool = True) -> Array:
    """Return a device's block of a grid, with cells of its neighbours around it. Call it inside `jax.shard_map`.

    Parameters
    ----------
    x
        The block, (n1, n2, ...). Dimensions behind those of ``axes`` are left alone.
    widths
        Cells on each side, w1, w2, ..., or one number for all dimensions; at most as many as the block has.
    axes
        Of each dimension the mesh axis, or axes, that share it; None if it is whole on every device.
    periodic
        Whether the grid goes on at its other end. Otherwise cells outside are zeros.

    Returns
    -------
    The block of shape (n1 + 2 w1, n2 + 2 w2, ...), edges and corners filled too. The derivative is `halo_add`.

    Raises
    ------
    UsageError
        If a width is no number of cells, or larger than the block.

    Examples
    --------
    >>> def laplacian(x):  # of a grid with P("x", "y")
    ...     x = mm.grids.halo_exchange(x, 1, ("x", "y"))
    ...     return x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2] - 4 * x[1:-1, 1:-1]
    """
    for d, w, over in _sides("halo_exchange", x, widths, axes, 0):
        n = x.shape[d]
        before = _shift(lax.slice_in_dim(x, n - w, n, axis=d), over, 1, periodic)
        after = _shift(lax.slice_in_dim(x, 0, w, axis=d), over, -1, periodic)
        x = jnp.concatenate([before, x, after], d)
    return x


def halo_add(x: Array, widths: int | Sequence[int], axes: Sequence[Any], periodic: bool = True) -> Array:
    """Add what a device has put into its halo to the cells of its neighbours: the transpose of `halo_exchange`.

    Arguments and errors are as there. ``x`` has shape (n1 + 2 w1, n2 + 2 w2, ...), the result (n1, n2, ...). What is
    outside a grid that is not periodic is dropped.
    """
    for d, w, over in reversed(_sides("halo_add", x, widths, axes, 1)):
        n = x.shape[d]
        from_before = _shift(lax.slice_in_dim(x, n - w, n, axis=d), over, 1, periodic)
        from_after = _shift(lax.slice_in_dim(x, 0, w, axis=d), over, -1, periodic)
        x = lax.slice_in_dim(x, w, n - w, axis=d)
        at = (slice(None),) * d
        x = x.at[(*at, slice(w))].add(from_before).at[(*at, slice(n - 3 * w, None))].add(from_after)
    return x
