"""`qr` and `least_squares` of a tall sharded matrix, with their derivatives."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, entry, lay_out, size
from multimesh.errors import UsageError

from multimesh_numerics.linalg import tsqr
from multimesh_numerics.linalg.factor import check_right_hand_side
from multimesh_numerics.linalg.layout import ShardedMatrix, matrix_of
from multimesh_numerics.linalg.rings import adjoint, matmul


class QRResult(NamedTuple):
    """A matrix with orthonormal columns, and a triangular one."""

    Q: Array
    R: Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _qr(a: Array, layout: ShardedMatrix) -> QRResult:
    def run(a: Array) -> tuple[Array, Array]:
        q, r = tsqr.qr_of_shards(layout.to_rows(a), layout.axes)
        return layout.from_rows(q), r

    f = layout.on_shards(run, layout.spec, (layout.spec, P()), lambda a: tuple(jnp.linalg.qr(a)))
    return QRResult(*f(layout.place(a)))


@_qr.defjvp
def _qr_jvp(layout: ShardedMatrix, primals: Any, tangents: Any) -> tuple[QRResult, QRResult]:
    q, r = _qr(*primals, layout)
    basis, change = lay_out(q, layout.mesh), lay_out(tangents[0], layout.mesh)
    scaled = lax.linalg.triangular_solve(r, change)  # dA @ inv(R)
    inner = matmul(adjoint(basis), scaled)
    low = jnp.tril(inner, -1)
    turn = low - adjoint(low) + 1j * jnp.diag(jnp.imag(jnp.diagonal(inner))) if jnp.iscomplexobj(q) else low - low.T
    dq = matmul(basis, turn - inner) + scaled
    return QRResult(q, r), QRResult(layout.place(dq), matmul(inner - turn, r))


_jitted_qr = jax.jit(_qr, static_argnums=1)


def _tall_matrix(func: str, a: Array, mesh: AnyMesh | None, spec: P | None) -> tuple[Array, ShardedMatrix]:
    a, layout = matrix_of(func, a, mesh, spec, tall=True)
    least = layout.shard_rows - (size(layout.mesh, layout.cols) - 1) * layout.local_rows
    if least < layout.n:
        raise UsageError(
            f"{func}: each of {layout.devices} devices must have as many rows as the matrix has columns, and one of "
            f"shape ({layout.m}, {layout.n}) gives a device {max(least, 0)}; use at most {layout.m // layout.n} devices"
        )
    return a, layout


def qr(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> QRResult:
    """Return the reduced QR decomposition of a tall matrix, by Householder reflections in a tree (TSQR).

    Parameters
    ----------
    a
        Shape (M, N), sharded by rows, by columns or both, with at least N rows for each device.
    mesh, spec
        The sharding of ``a``, if the array does not carry it.

    Returns
    -------
    QRResult
        ``Q``, (M, N), with orthonormal columns, sharded as ``a``, and ``R``, (N, N), triangular, whole on every device.

    Raises
    ------
    UsageError
        If a device has fewer than N rows, or ``a`` is not sharded, or has another dtype than float32, float64,
        complex64 or complex128.

    Notes
    -----
    Derivatives need full rank. They gather ``Q`` on every device.
    """
    return _jitted_qr(*_tall_matrix("qr", a, mesh, spec))


@functools.partial(jax.jit, static_argnums=2)
def _least_squares(a: Array, b: Array, layout: ShardedMatrix) -> Array:
    q, r = _qr(a, layout)
    if b.ndim == 1:
        return _least_squares(a, b[:, None], layout)[:, 0]

    def project(q: Array, b: Array) -> Array:
        product = lax.psum(matmul(adjoint(q), b), layout.rows) if layout.rows else matmul(adjoint(q), b)
        return lax.all_gather(product, layout.cols, tiled=True) if layout.cols else product

    f = layout.on_shards(project, (layout.spec, P(entry(layout.rows))), P(), lambda q, b: matmul(adjoint(q), b))
    return lax.linalg.triangular_solve(r, f(q, lay_out(b, layout.mesh, layout.rows)), left_side=True)


def least_squares(a: Array, b: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> Array:
    """Return the ``x`` that minimizes the norm of ``a @ x - b``, for a tall ``a`` of full rank, by `qr`.

    ``a``, ``mesh``, ``spec`` and errors are those of `qr`. ``b`` has shape (M,) or (M, r) and the dtype of ``a``. The
    result, (N,) or (N, r), is whole on every device. If the rank of ``a`` is less than N, it is large, infinite or NaN.
    """
    b = specs.as_array(b)
    a, layout = _tall_matrix("least_squares", a, mesh, spec)
    check_right_hand_side("least_squares", a, b)
    return _least_squares(a, b, layout)
