"""`cho_factor`, `cho_solve`, `solve`, `slogdet` and `cholesky` of a sharded matrix, with their derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes, axes_of, entry, lay_out
from multimesh.errors import UsageError

from multimesh_numerics.linalg import cholesky as shards
from multimesh_numerics.linalg.cholesky import Panels
from multimesh_numerics.linalg.layout import Layout, layout_of
from multimesh_numerics.linalg.rings import adjoint, matmul, norm


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a", "panels"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class CholeskyFactor:
    """The result of `cho_factor`: the matrix, which carries derivatives, and its factor in superpanels."""

    a: Array
    panels: Panels
    layout: Layout


class SlogdetResult(NamedTuple):
    """Sign and logarithm of a determinant."""

    sign: Array
    logabsdet: Array


# Functions of global arrays, inside jit.


def factorize(a: Array, layout: Layout) -> Panels:
    """Return the panels of a matrix, without derivatives."""

    def run(a: Array) -> Panels:
        wrong = not_hermitian(a, layout)
        panels = shards.cholesky_of_shards(a, layout, wrong)
        return panels._replace(status=jnp.where(wrong, -1, panels.status))

    def one(a: Array) -> Panels:
        return shards.cholesky_on_one_device(a, not_hermitian(a, layout))

    run = layout.on_shards(run, layout.spec, Panels(layout.panel_spec, P(), P()), one)
    return run(layout.place(lax.stop_gradient(a)))


def not_hermitian(a: Array, layout: Layout) -> Array:
    """Return whether the matrix is clearly not Hermitian, such as one triangle of such a matrix, or not finite.

    For two arbitrary vectors v and w it asks whether v^H A w is (w^H A v)*.
    """
    scale = norm(a, layout.axes)

    def random_part(length: int, axes: Axes, seed: float) -> Array:
        numbers = jnp.arange(length) + (lax.axis_index(axes) * length if axes else 0)
        return jnp.cos(seed * (numbers + 1.0) ** 2).astype(a.dtype)

    def form(left: float, right: float) -> Array:
        product = matmul(
            random_part(a.shape[0], layout.rows, left), matmul(a, random_part(a.shape[1], layout.cols, right) / scale)
        )
        return lax.psum(product, layout.axes)

    return ~(jnp.abs(form(0.7, 1.3) - form(1.3, 0.7).conj()) <= jnp.sqrt(jnp.finfo(a.dtype).eps))


def multiply(a: Array, x: Array, layout: Layout) -> Array:
    """Return ``a @ x``, for ``a`` sharded by ``layout``. Every device gathers the whole of ``x``, and of the result."""

    def run(a: Array, x: Array) -> Array:
        return lax.psum(matmul(a, x), layout.cols) if layout.cols else matmul(a, x)

    rows, cols = P(entry(layout.rows)), P(entry(layout.cols))
    run = jax.shard_map(run, mesh=layout.mesh, in_specs=(layout.spec, cols), out_specs=rows)
    x = lay_out(lay_out(x, layout.mesh), layout.mesh, layout.cols)  # XLA has no direct way from columns to rows
    return lay_out(run(layout.place(a), x), layout.mesh)


def _multiply_columns(a: Array, x: Array, layout: Layout) -> Array:
    """``a @ x``, on each device for its own columns. It and its derivative hold a few rows of ``a`` at a time."""

    def product(some: Array, x: Array) -> Array:
        rows = lax.all_gather(some, layout.rows) if layout.rows else some[None]
        rows = lax.all_gather(rows, layout.cols, axis=2, tiled=True) if layout.cols else rows
        return matmul(rows, x)

    def run(a: Array, x: Array) -> Array:
        pieces = min(len(a), 4 * layout.devices)
        cut = jnp.pad(a, ((0, -len(a) % pieces), (0, 0))).reshape(pieces, -1, a.shape[1])
        y = lax.map(lambda some: product(some, x), cut)  # pieces, groups of rows, rows of a piece, columns
        y = y.swapaxes(0, 1).reshape(y.shape[1], -1, x.shape[1])
        return y[:, : len(a)].reshape(-1, x.shape[1])

    columns = P(None, entry(layout.axes))
    return jax.shard_map(run, mesh=layout.mesh, in_specs=(layout.spec, columns), out_specs=columns)(layout.place(a), x)


def linear_solve(
    product: Callable[[Array], Array], solve: Callable[[Array, bool], Array], b: Array, mesh: AnyMesh, *axes: Axes
) -> Array:
    """Return ``solve(b, False)``, sharded over ``axes``, with derivatives; ``solve(b, True)`` is with the transpose."""
    if b.ndim == 1:
        return linear_solve(product, solve, b[:, None], mesh, *axes)[:, 0]
    if not b.shape[1]:
        return b

    def place(x: Array) -> Array:
        return lay_out(x, mesh, *axes)

    return lax.custom_linear_solve(
        lambda x: place(product(place(x))),
        place(b),
        lambda _, b: solve(place(b), False),
        lambda _, b: solve(place(b), True),
    )


def backsolve(a: Array, panels: Panels, b: Array, layout: Layout, columns: bool) -> Array:
    """Return ``inv(a) @ b``, for ``b`` of shape (N, r). Each device has all of it or, with ``columns``, its own."""
    axes, spec = (((), layout.axes), layout.panel_spec) if columns else ((), P())
    f = functools.partial(shards.solve_columns if columns else shards.solve_cholesky, layout=layout)
    run = layout.on_shards(f, (Panels(layout.panel_spec, P(), P()), spec), spec, _solve_on_one_device)

    def solve(b: Array, transposed: bool) -> Array:
        return run(panels, b.conj()).conj() if transposed else run(panels, b)

    product = _multiply_columns if columns else multiply
    return linear_solve(lambda x: product(a, x, layout), solve, b, layout.mesh, *axes)


def _solve_on_one_device(panels: Panels, b: Array) -> Array:
    return jax.scipy.linalg.cho_solve((panels.l[0], True), b)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _inverse(a: Array, panels: Panels, layout: Layout) -> Array:
    def one(panels: Panels) -> Array:
        return _solve_on_one_device(panels, jnp.eye(layout.n, dtype=panels.l.dtype))

    f = functools.partial(shards.invert_cholesky, layout=layout)
    return layout.on_shards(f, (Panels(layout.panel_spec, P(), P()),), layout.spec, one)(panels)


@_inverse.defjvp
def _inverse_jvp(layout: Layout, primals: Any, tangents: Any) -> tuple[Array, Array]:
    inverse = _inverse(*primals, layout)
    change = multiply(inverse, multiply(tangents[0], inverse, layout), layout)
    return inverse, -layout.place(change)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def log_determinant(a: Array, panels: Panels, layout: Layout) -> Array:
    """Return ``log(det(a))``."""
    return panels.logdet


@log_determinant.defjvp
def _log_determinant_jvp(layout: Layout, primals: Any, tangents: Any) -> tuple[Array, Array]:
    inverse = _inverse(*primals, layout)
    change = layout.place(tangents[0])
    return log_determinant(*primals, layout), jnp.real(jnp.sum(inverse.conj() * change))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _lower_factor(a: Array, layout: Layout) -> Array:
    ordered = layout.in_order()

    def run(a: Array) -> tuple[Array, Array]:
        panels = shards.cholesky_of_shards(a, ordered, not_hermitian(a, layout), in_order=True)
        return shards.lower_factor(panels, ordered), panels.status

    def one(a: Array) -> tuple[Array, Array]:
        panels = shards.cholesky_on_one_device(a, not_hermitian(a, layout))
        return panels.l[0], panels.status

    l, status = layout.on_shards(run, layout.spec, (layout.spec, P()), one)(layout.place(a))
    return layout.place(jnp.tril(jnp.where(status > 0, jnp.nan, l)))


@_lower_factor.defjvp
def _lower_factor_jvp(layout: Layout, primals: Any, tangents: Any) -> tuple[Array, Array]:
    # L' = L tril(inv(L) A' inv(L)^H), its diagonal halved; and inv(L)^H = inv(A) L.
    (a,), (change,) = primals, tangents
    l = _lower_factor(a, layout)
    columns = layout.n % layout.devices == 0
    root = lay_out(backsolve(a, factorize(a, layout), l, layout, columns), layout.mesh)
    change = (layout.place(change) + layout.place(adjoint(change))) / 2
    inner = multiply(adjoint(root), multiply(change, root, layout), layout)
    inner = jnp.tril(inner) * (1 - jnp.eye(layout.n, dtype=a.dtype) / 2)
    return l, layout.place(multiply(l, inner, layout))


@functools.partial(jax.jit, static_argnames=("layout", "columns"))
def _solve(a: Array, b: Array, *, layout: Layout, columns: bool) -> Array:
    return backsolve(a, factorize(a, layout), b, layout, columns)


_factorize = jax.jit(factorize, static_argnames="layout")
_backsolve = jax.jit(backsolve, static_argnames=("layout", "columns"))
_cholesky = jax.jit(_lower_factor, static_argnames="layout")


@functools.partial(jax.jit, static_argnames="layout")
def _slogdet(a: Array, panels: Panels | None, *, layout: Layout) -> SlogdetResult:
    logdet = log_determinant(a, factorize(a, layout) if panels is None else panels, layout)
    return SlogdetResult(jnp.where(jnp.isnan(logdet), jnp.nan, 1).astype(a.dtype), logdet)


@functools.partial(jax.jit, static_argnames="layout")
def _inv(a: Array, *, layout: Layout) -> Array:
    return _inverse(layout.place(a), factorize(a, layout), layout)


# Checks, made at the call.


def check_right_hand_side(func: str, a: Any, b: Any) -> None:
    """Refuse a shape, a dtype and devices of ``b`` that do not fit ``a``."""
    specs.check_dtype(func, b)
    if b.ndim not in (1, 2) or b.shape[0] != a.shape[0]:
        raise UsageError(
            f"{func}: a right-hand side of shape {b.shape} does not fit a matrix of shape {a.shape}; "
            f"it must be ({a.shape[0]},) or ({a.shape[0]}, r)"
        )
    if b.dtype != a.dtype:
        raise UsageError(f"{func}: the matrix is {a.dtype}, the right-hand side {b.dtype}; convert one with .astype")
    specs.check_devices(func, a, b)


def columns_of(func: str, a: Any, b: Any, layout: Layout, spec: P | None) -> bool:
    """Return whether each device solves for its own columns: ``b`` is sharded by columns, and they divide evenly."""
    check_right_hand_side(func, a, b)
    if spec is None and (sharding := specs.sharding_of(b)) is not None:
        spec = sharding.spec
    sharded = b.ndim == 2 and spec is not None and len(spec) == 2 and bool(axes_of(spec[1]))
    return layout.devices > 1 and sharded and b.shape[1] > 0 and b.shape[1] % layout.devices == 0


def lay_out_like(x: Array, b: Any, layout: Layout) -> Array:
    """Lay ``x`` out as ``b``, if that has a known sharding on the mesh of the layout."""
    sharding = specs.sharding_of(b)
    if sharding is None or sharding.mesh != layout.mesh or not specs.axis_names(sharding.spec):
        return x
    return lay_out(x, layout.mesh, *(axes_of(axes) for axes in sharding.spec))


def pair(spec: Any) -> tuple[Any, Any]:
    """Return the specs of ``a`` and ``b``, from one spec or a pair."""
    if isinstance(spec, (tuple, list)) and not isinstance(spec, P) and len(spec) == 2:
        return spec[0], spec[1]
    return spec, None


# The public functions.


def cho_factor(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> CholeskyFactor:
    """Factor a Hermitian positive definite matrix, for `cho_solve` and `slogdet`.

    Parameters
    ----------
    a
        Shape (N, N), sharded by rows, by columns or both. Both triangles are read.
    mesh, spec
        The sharding of ``a``, if the array does not carry it.

    Returns
    -------
    CholeskyFactor
        If ``a`` is not positive definite, solutions and determinants with it are NaN.

    Raises
    ------
    UsageError
        If ``a`` is not square or not sharded, or has another dtype than float32, float64, complex64 or complex128.

    Examples
    --------
    >>> factor = mm.linalg.cho_factor(jax.device_put(a, NamedSharding(mesh, P("x"))))  # doctest: +SKIP
    >>> x, (sign, logdet) = mm.linalg.cho_solve(factor, b), mm.linalg.slogdet(factor)  # doctest: +SKIP
    """
    a, layout = layout_of("cho_factor", a, mesh, spec)
    return CholeskyFactor(a, _factorize(a, layout=layout), layout)


def cho_solve(factor: CholeskyFactor, b: Array) -> Array:
    """Solve ``a @ x = b`` with the factor of ``a``.

    Parameters
    ----------
    factor
        The result of `cho_factor`.
    b
        Shape (N,) or (N, r), with the dtype of ``a``.

    Returns
    -------
    ``x``, in the shape and with the sharding of ``b``; NaN if ``a`` is not positive definite. If ``b`` is sharded by
    columns and the devices divide their number, each device solves for its own. Otherwise every device computes all
    of ``x`` on the way.

    Raises
    ------
    UsageError
        If ``factor`` is none, or shape or dtype of ``b`` do not fit.
    """
    if not isinstance(factor, CholeskyFactor):
        raise UsageError(f"cho_solve: the first argument is what cho_factor returns, got {type(factor).__name__}")
    b = specs.as_array(b)
    columns = columns_of("cho_solve", factor.a, b, factor.layout, None)
    x = _backsolve(factor.a, factor.panels, b, layout=factor.layout, columns=columns)
    return lay_out_like(x, b, factor.layout)


def solve(a: Array, b: Array, *, mesh: AnyMesh | None = None, spec: Any = None) -> Array:
    """Solve ``a @ x = b`` for a Hermitian positive definite ``a``: `cho_factor` and `cho_solve` in one.

    Shapes, results and errors are as there. ``spec`` may also be a pair, for ``a`` and ``b``.
    """
    of_a, of_b = pair(spec)
    b = specs.as_array(b)
    a, layout = layout_of("solve", a, mesh, of_a)
    return lay_out_like(_solve(a, b, layout=layout, columns=columns_of("solve", a, b, layout, of_b)), b, layout)


def slogdet(a: Array | CholeskyFactor, *, mesh: AnyMesh | None = None, spec: P | None = None) -> SlogdetResult:
    """Sign and logarithm of the determinant of a Hermitian positive definite matrix, or of its factor.

    The sign is 1. Both are NaN if the matrix is not positive definite. The derivative is the inverse, sharded as ``a``.
    Second derivatives gather a matrix on every device. Errors are those of `cho_factor`.
    """
    if isinstance(a, CholeskyFactor):
        return _slogdet(a.a, a.panels, layout=a.layout)
    a, layout = layout_of("slogdet", a, mesh, spec)
    return _slogdet(a, None, layout=layout)


def inv(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> Array:
    """Return the inverse of a Hermitian positive definite matrix, sharded as ``a`` (LAPACK's ``potri``).

    NaN if ``a`` is not positive definite. Derivatives gather a matrix on every device. Errors are those of
    `cho_factor`. To solve equations, `solve` is faster and more accurate.
    """
    a, layout = layout_of("inv", a, mesh, spec)
    return _inv(a, layout=layout)


def cholesky(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> Array:
    """Return the lower factor ``L`` of ``a = L @ L^H``, sharded as ``a``; NaN if ``a`` is not positive definite.

    `cho_factor` needs less: it factors a permutation of ``a``, for which no row moves. Derivatives gather a matrix on
    every device. The compiled code has at least as many superpanels as there are devices. Errors are those of
    `cho_factor`.
    """
    a, layout = layout_of("cholesky", a, mesh, spec)
    return _cholesky(a, layout=layout)
