"""`eigh`, `polar` and `svd` of a sharded matrix, with their derivatives."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from multimesh.core.specs import AnyMesh, entry, lay_out

from multimesh_numerics.linalg import jacobi, qdwh, rings
from multimesh_numerics.linalg.factor import not_hermitian
from multimesh_numerics.linalg.layout import Layout, ShardedMatrix, layout_of, matrix_of
from multimesh_numerics.linalg.rings import adjoint, matmul


class EighResult(NamedTuple):
    """Eigenvalues, ascending, and eigenvectors."""

    eigenvalues: Array
    eigenvectors: Array


class SVDResult(NamedTuple):
    """Left singular vectors, singular values, descending, and right singular vectors."""

    U: Array
    S: Array
    Vh: Array


class PolarResult(NamedTuple):
    """A matrix with orthonormal columns, and a positive semidefinite one."""

    unitary: Array
    posdef: Array


# Eigenvalues and eigenvectors.


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _eigh(a: Array, layout: Layout) -> EighResult:
    def check(a: Array) -> Array:
        return jnp.where(not_hermitian(a, layout), jnp.nan, a)

    def run(a: Array) -> tuple[Array, Array]:
        w, rows = jacobi.eigh_of_shards(check(a), layout)
        return w, layout.from_rows(rows)

    f = layout.on_shards(run, layout.spec, (P(), layout.spec), lambda a: tuple(jnp.linalg.eigh(check(a))))
    return EighResult(*f(layout.place(a)))


@_eigh.defjvp
def _eigh_jvp(layout: Layout, primals: Any, tangents: Any) -> tuple[EighResult, EighResult]:
    w, v = _eigh(*primals, layout)
    vectors, change = lay_out(v, layout.mesh), lay_out(tangents[0], layout.mesh)
    inner = matmul(adjoint(vectors), matmul((change + adjoint(change)) / 2, vectors))
    rotation = matmul(vectors, inner / _gaps(w))
    return EighResult(w, v), EighResult(jnp.real(jnp.diagonal(inner)), layout.place(rotation))


def _gaps(w: Array) -> Array:
    """``w[j] - w[i]``, and infinity on the diagonal."""
    return jnp.where(jnp.eye(len(w), dtype=bool), jnp.inf, w - w[:, None])


_jitted_eigh = jax.jit(_eigh, static_argnums=1)


def eigh(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> EighResult:
    """Return all eigenvalues and eigenvectors of a Hermitian matrix, by block Jacobi rotations.

    Parameters
    ----------
    a
        Shape (N, N), sharded by rows, by columns or both. Both triangles are read.
    mesh, spec
        The sharding of ``a``, if the array does not carry it.

    Returns
    -------
    EighResult
        ``eigenvalues``, (N,), ascending, whole on every device, and ``eigenvectors``, (N, N), in columns, sharded as
        ``a``. Eigenvectors are orthonormal to rounding, also those of equal eigenvalues. Both are NaN if ``a`` is not
        Hermitian.

    Raises
    ------
    UsageError
        If ``a`` is not square or not sharded, or has another dtype than float32, float64, complex64 or complex128.

    Notes
    -----
    Derivatives are those of `jax.numpy.linalg.eigh`: infinite or NaN for equal eigenvalues. They gather a matrix on
    every device.
    """
    a, layout = layout_of("eigh", a, mesh, spec)
    return _jitted_eigh(a, layout.cut_into(2))


# Polar decomposition and singular values.


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _polar(a: Array, layout: ShardedMatrix) -> PolarResult:
    def run(a: Array) -> tuple[Array, Array]:
        u, h = qdwh.polar_of_shards(a, layout)
        return layout.from_rows(u), h

    def one(a: Array) -> tuple[Array, Array]:
        # As `jax.scipy.linalg.polar` with method "svd": its default, QDWH, needs full rank.
        u, s, vh = _svd_on_one_device(a)
        h = matmul(adjoint(vh) * s, vh)
        return matmul(u, vh), (h + adjoint(h)) / 2

    u, h = layout.on_shards(run, layout.spec, (layout.spec, P(entry(layout.axes))), one)(layout.place(a))
    return PolarResult(u, layout.cut(h))


@_polar.defjvp
def _polar_jvp(layout: ShardedMatrix, primals: Any, tangents: Any) -> tuple[PolarResult, PolarResult]:
    u, h = _polar(*primals, layout)
    left, right, change = (lay_out(x, layout.mesh) for x in (u, h, tangents[0]))
    w, v = jnp.linalg.eigh(right)
    inner = matmul(adjoint(left), change)
    turn = matmul(adjoint(v), matmul(inner - adjoint(inner), v)) / (w + w[:, None])
    turn = matmul(v, matmul(turn, adjoint(v)))
    outside = matmul(matmul(change - matmul(left, inner), v) / w, adjoint(v))
    du, dh = matmul(left, turn) + outside, inner - matmul(turn, right)
    return PolarResult(u, h), PolarResult(layout.place(du), layout.cut((dh + adjoint(dh)) / 2))


_jitted_polar = jax.jit(_polar, static_argnums=1)


def polar(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> PolarResult:
    """Return the polar decomposition ``a = u @ h``, by the QDWH iteration.

    Parameters
    ----------
    a
        Shape (M, N) with M >= N, sharded by rows, by columns or both.
    mesh, spec
        The sharding of ``a``, if the array does not carry it.

    Returns
    -------
    PolarResult
        ``unitary``, (M, N), with orthonormal columns and sharded as ``a``, and ``posdef``, (N, N), Hermitian and
        positive semidefinite. Its rows are sharded over all axes of ``a`` if the devices divide them. If the rank of
        ``a`` is less than N, ``unitary`` is one of several.

    Raises
    ------
    UsageError
        If ``a`` has fewer rows than columns, is not sharded, or has another dtype than float32, float64, complex64 or
        complex128.
    """
    return _jitted_polar(*matrix_of("polar", a, mesh, spec, tall=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _svd(a: Array, layout: ShardedMatrix) -> SVDResult:
    order, p, axes = -(-layout.n // layout.devices) * layout.devices, layout.devices, layout.axes
    of_h = Layout(layout.mesh, axes, (), order, order).cut_into(2)
    added = order - layout.n

    def run(a: Array) -> tuple[Array, Array, Array]:
        u, h = qdwh.polar_of_shards(a, layout)
        # Rows that were added for the devices get the largest eigenvalue, and so come last.
        row = jnp.arange(order // p)[:, None] + lax.axis_index(axes) * (order // p)
        bound = 2 * jnp.sqrt(lax.psum(jnp.sum(jnp.abs(h) ** 2), axes)) + 1
        h = jnp.where((row == jnp.arange(order)) & (row >= layout.n), bound, h)
        w, v = jacobi.eigh_of_shards(h, of_h)
        v = jnp.flip(v[:, : layout.n], 1)
        u = rings.times(jnp.pad(u, ((0, 0), (0, added))), v, axes)
        vh = rings.adjoint_of(jnp.pad(v, ((0, 0), (0, added))), axes)
        return layout.from_rows(u), jnp.maximum(jnp.flip(w[: layout.n]), 0), vh

    f = layout.on_shards(run, layout.spec, (layout.spec, P(), P(entry(axes))), _svd_on_one_device)
    u, s, vh = f(layout.place(a))
    return SVDResult(u, s, layout.cut(vh))


def _svd_on_one_device(a: Array) -> tuple[Array, ...]:
    """LAPACK would never end with an infinite entry, but does with NaN."""
    return tuple(jnp.linalg.svd(jnp.where(jnp.isfinite(a).all(), a, jnp.nan), full_matrices=False))


@_svd.defjvp
def _svd_jvp(layout: ShardedMatrix, primals: Any, tangents: Any) -> tuple[SVDResult, SVDResult]:
    u, s, vh = _svd(*primals, layout)
    left, change = lay_out(u, layout.mesh), lay_out(tangents[0], layout.mesh)
    right = adjoint(lay_out(vh, layout.mesh))
    product = matmul(change, right)
    inner = matmul(adjoint(left), product)
    gaps, sums = _gaps(s), s + s[:, None]  # apart: the derivative of their product, with its infinite diagonal, is NaN
    phases = jnp.diag((jnp.diagonal(inner) - jnp.diagonal(inner).conj()) / (2 * s))
    du = matmul(left, (inner * s + adjoint(inner * s)) / gaps / sums + phases)
    dv = matmul(right, (s[:, None] * inner + adjoint(s[:, None] * inner)) / gaps / sums)
    if layout.m > layout.n:
        du = du + (product - matmul(left, inner)) / s
    ds = jnp.real(jnp.diagonal(inner))
    return SVDResult(u, s, vh), SVDResult(layout.place(du), ds, layout.cut(adjoint(dv)))


_jitted_svd = jax.jit(_svd, static_argnums=1)


def svd(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> SVDResult:
    """Return the reduced singular value decomposition ``a = (U * S) @ Vh``, by `polar` and `eigh` of its factor.

    Parameters
    ----------
    a
        Shape (M, N), sharded by rows, by columns or both.
    mesh, spec
        The sharding of ``a``, if the array does not carry it.

    Returns
    -------
    SVDResult
        With K = min(M, N): ``U``, (M, K), ``S``, (K,), descending and whole on every device, and ``Vh``, (K, N). The
        larger of ``U`` and ``Vh`` is sharded as ``a``. The rows (of ``Vh``) or columns (of ``U``) of the other one are
        sharded over all axes if the devices divide them. Small singular values have the absolute error of the largest.

    Raises
    ------
    UsageError
        If ``a`` is not a matrix or not sharded, or has another dtype than float32, float64, complex64 or complex128.

    Notes
    -----
    Derivatives are those of `jax.numpy.linalg.svd`: infinite or NaN for equal or zero singular values. They gather a
    matrix on every device.
    """
    a, layout = matrix_of("svd", a, mesh, spec)
    if layout.m >= layout.n:
        return _jitted_svd(a, layout)
    u, s, vh = _jitted_svd(adjoint(a), ShardedMatrix(layout.mesh, layout.cols, layout.rows, layout.n, layout.m))
    return SVDResult(adjoint(vh), s, adjoint(u))
