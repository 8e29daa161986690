"""Functions for a device that has all of a matrix: JAX's own, in place of those for many devices.

They run inside `jax.shard_map` and give what those give, but communicate nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
import jax.scipy.linalg
from jax import Array, lax

from multimesh_numerics.linalg.cholesky import Panels
from multimesh_numerics.linalg.elimination import Factors
from multimesh_numerics.linalg.rings import adjoint, matmul


def whole_cholesky(a: Array, wrong: Array) -> Panels:
    """Return one panel, the factor of ``a`` itself; all is NaN if ``a`` is ``wrong``."""
    l = lax.linalg.cholesky(jnp.where(wrong, jnp.nan, a), symmetrize_input=False)
    logdet = 2 * jnp.log(jnp.real(jnp.diagonal(l))).sum()
    return Panels(l[None], logdet, jnp.where(wrong, -1, jnp.isnan(logdet)).astype(jnp.int32))


def whole_cho_solve(panels: Panels, b: Array) -> Array:
    """Return ``inv(a) @ b``."""
    return jax.scipy.linalg.cho_solve((panels.l[0], True), b)


def whole_inverse(panels: Panels) -> Array:
    """Return ``inv(a)``."""
    return whole_cho_solve(panels, jnp.eye(panels.l.shape[1], dtype=panels.l.dtype))


def whole_lu(a: Array) -> Factors:
    """Return L and U in one array, and the pivots of `jax.scipy.linalg.lu_factor`."""
    factors, pivots = jax.scipy.linalg.lu_factor(a)
    return Factors(factors[None], pivots)


def whole_lu_solve(factors: Factors, b: Array, transposed: bool) -> Array:
    """Return ``inv(a) @ b``, or ``inv(a^T) @ b``."""
    return jax.scipy.linalg.lu_solve((factors.lu[0], factors.rows), b, int(transposed))


def whole_solve_triangular(t: Array, b: Array, lower: bool, transposed: bool) -> Array:
    """Return ``inv(t) @ b``, or ``inv(t^T) @ b``."""
    return jax.scipy.linalg.solve_triangular(t, b, int(transposed), lower)


def whole_qr(a: Array) -> tuple[Array, Array]:
    """Return Q and R."""
    q, r = jnp.linalg.qr(a)
    return q, r


def whole_eigh(a: Array) -> tuple[Array, Array]:
    """Return eigenvalues and eigenvectors."""
    w, v = jnp.linalg.eigh(a)
    return w, v


def whole_svd(a: Array) -> tuple[Array, Array, Array]:
    """Return U, S and Vh. LAPACK would never end with an infinite entry, but does with NaN."""
    u, s, vh = jnp.linalg.svd(jnp.where(jnp.isfinite(a).all(), a, jnp.nan), full_matrices=False)
    return u, s, vh


def whole_polar(a: Array) -> tuple[Array, Array]:
    """Return the polar factors, as `jax.scipy.linalg.polar` with method "svd": its default, QDWH, needs full rank."""
    u, s, vh = whole_svd(a)
    h = matmul(adjoint(vh) * s, vh)
    return matmul(u, vh), (h + adjoint(h)) / 2
