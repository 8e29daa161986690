"""`lu_factor`, `lu_solve` and `solve_triangular` of a sharded matrix, with their derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh
from multimesh.errors import UsageError

from multimesh_numerics.linalg import elimination, triangular
from multimesh_numerics.linalg.elimination import Factors
from multimesh_numerics.linalg.factor import check_right_hand_side, lay_out_like, linear_solve, multiply
from multimesh_numerics.linalg.layout import Layout, layout_of

TRANS = {0: 0, 1: 1, 2: 2, "N": 0, "T": 1, "C": 2}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a", "factors"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class LUFactor:
    """The result of `lu_factor`: the matrix, which carries derivatives, and its factors in superpanels."""

    a: Array
    factors: Factors
    layout: Layout


def _trans(func: str, trans: Any) -> int:
    if trans not in TRANS:
        raise UsageError(f"{func}: trans is 0 or 'N' (a), 1 or 'T' (a.T), or 2 or 'C' (a.conj().T); got {trans!r}")
    return TRANS[trans]


def _linear_solve(a: Array, b: Array, layout: Layout, trans: int, solve: Callable[[Array, bool], Array]) -> Array:
    """Solve ``op(a) @ x = b`` with derivatives, by ``solve(b, transposed)``, which has none."""
    if trans == 2:
        return _linear_solve(a, b.conj(), layout, 1, solve).conj()
    matrix, by = layout.place(a), layout
    if trans == 1:
        matrix, by = a.T, dataclasses.replace(layout, rows=layout.cols, cols=layout.rows)
    return linear_solve(
        lambda x: multiply(matrix, x, by), lambda b, transposed: solve(b, transposed != (trans == 1)), b, layout.mesh
    )


@functools.partial(jax.jit, static_argnames="layout")
def _lu_factor(a: Array, *, layout: Layout) -> Factors:
    def one(a: Array) -> Factors:
        lu, pivots = jax.scipy.linalg.lu_factor(a)
        return Factors(lu[None], pivots)

    f = functools.partial(elimination.lu_of_shards, layout=layout)
    a = jnp.where(jnp.isfinite(a).all(), a, jnp.nan)  # an infinite pivot would hide its row
    run = layout.on_shards(f, layout.spec, Factors(layout.panel_spec, P()), one)
    return run(layout.place(lax.stop_gradient(a)))


@functools.partial(jax.jit, static_argnames=("layout", "trans"))
def _lu_solve(a: Array, factors: Factors, b: Array, *, layout: Layout, trans: int) -> Array:
    def solve(b: Array, transposed: bool) -> Array:
        f = functools.partial(elimination.solve_lu, layout=layout, transposed=transposed)

        def one(factors: Factors, b: Array) -> Array:
            return jax.scipy.linalg.lu_solve((factors.lu[0], factors.rows), b, int(transposed))

        return layout.on_shards(f, (Factors(layout.panel_spec, P()), P()), P(), one)(factors, b)

    return _linear_solve(a, b, layout, trans, solve)


@functools.partial(jax.jit, static_argnames=("layout", "lower", "trans"))
def _solve_triangular(t: Array, b: Array, *, layout: Layout, lower: bool, trans: int) -> Array:
    def solve(b: Array, transposed: bool) -> Array:
        f = functools.partial(triangular.solve_triangle, layout=layout, lower=lower, transposed=transposed)

        def one(t: Array, b: Array) -> Array:
            return jax.scipy.linalg.solve_triangular(t, b, int(transposed), lower)

        return layout.on_shards(f, (layout.spec, P()), P(), one)(layout.place(lax.stop_gradient(t)), b)

    return _linear_solve(t, b, layout, trans, solve)


def lu_factor(a: Array, *, mesh: AnyMesh | None = None, spec: P | None = None) -> LUFactor:
    """Factor any square matrix, for `lu_solve`, with tournament pivoting.

    Arguments and errors are those of `cho_factor`. If ``a`` is singular, solutions with the result are NaN or
    infinite, as in SciPy. They are NaN if ``a`` is not finite.
    """
    a, layout = layout_of("lu_factor", a, mesh, spec)
    return LUFactor(a, _lu_factor(a, layout=layout), layout)


def lu_solve(factor: LUFactor, b: Array, trans: int | str = 0) -> Array:
    """Solve ``a @ x = b`` with the factors of ``a``.

    Parameters
    ----------
    factor
        The result of `lu_factor`.
    b
        Shape (N,) or (N, r), with the dtype of ``a``.
    trans
        1 or ``"T"`` solves ``a.T @ x = b``, 2 or ``"C"`` ``a.conj().T @ x = b``.

    Returns
    -------
    ``x``, in the shape and with the sharding of ``b``. On its way every device has all of it.

    Raises
    ------
    UsageError
        If ``factor`` is none, ``trans`` is unknown, or shape or dtype of ``b`` do not fit.
    """
    if not isinstance(factor, LUFactor):
        raise UsageError(f"lu_solve: the first argument is what lu_factor returns, got {type(factor).__name__}")
    b = specs.as_array(b)
    check_right_hand_side("lu_solve", factor.a, b)
    x = _lu_solve(factor.a, factor.factors, b, layout=factor.layout, trans=_trans("lu_solve", trans))
    return lay_out_like(x, b, factor.layout)


def solve_triangular(
    a: Array,
    b: Array,
    trans: int | str = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    mesh: AnyMesh | None = None,
    spec: P | None = None,
) -> Array:
    """Solve ``a @ x = b`` for a triangular ``a``, as `jax.scipy.linalg.solve_triangular` does.

    ``a`` has shape (N, N) and is sharded; its other triangle is not used. ``b`` has shape (N,) or (N, r). Result and
    errors are those of `lu_solve`. A singular ``a`` gives NaN or infinite values.
    """
    b = specs.as_array(b)
    a, layout = layout_of("solve_triangular", a, mesh, spec)
    check_right_hand_side("solve_triangular", a, b)
    t = _triangle(a, bool(lower), bool(unit_diagonal))
    x = _solve_triangular(t, b, layout=layout, lower=bool(lower), trans=_trans("solve_triangular", trans))
    return lay_out_like(x, b, layout)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _triangle(a: Array, lower: bool, unit_diagonal: bool) -> Array:
    row, column = lax.broadcasted_iota(int, a.shape, 0), lax.broadcasted_iota(int, a.shape, 1)
    t = jnp.where((row > column) if lower else (row < column), a, 0)
    return t + jnp.where(row == column, 1 if unit_diagonal else a, 0)
