"""`potrs`, with the arguments of jaxmg."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.errors import UsageError

from multimesh_numerics.linalg import factor
from multimesh_numerics.linalg.layout import Layout, layout_of


def potrs(
    a: Array,
    b: Array,
    T_A: int = 256,
    mesh: specs.AnyMesh | None = None,
    matrix_specs: Any = None,
    *,
    in_specs: Any = None,
    return_logdet: bool = False,
    return_status: bool = False,
    pad: bool = True,
    donate: bool = False,
) -> Any:
    """Solve ``a @ x = b`` for a Hermitian positive definite ``a``, with the arguments of jaxmg's ``potrs``.

    Parameters
    ----------
    a
        Shape (N, N), sharded by rows, by columns or both. Both triangles are read.
    b
        Shape (N,) or (N, r), of the same dtype, whole on every device or sharded by columns.
    T_A
        Rows of each device that are eliminated at a time, in 8 to 32 superpanels if a device has so many rows. Larger
        tiles make smaller executables, smaller tiles less work.
    mesh
        Mesh of ``a``; by default that of the array.
    matrix_specs, in_specs
        The spec of ``a``, or a pair for ``a`` and ``b``; by default those of the arrays. If it names an axis that the
        mesh lacks, a warning says so, and the sharding of ``a`` itself is used. ``in_specs`` is its older name.
    return_logdet, return_status
        Return also ``log(det(a))``, and a status: 0, or the number (from 1) of the first superpanel that is not
        positive definite, or -1 if ``a`` is not Hermitian or not finite. ``x`` and the determinant are NaN then.
    pad
        If false, it is an error that ``T_A`` does not divide the rows of a device. Rows of the identity fill the last
        superpanel otherwise.
    donate
        With jaxmg ``a`` and ``b`` are lost after the call. Here they never are; the argument changes nothing.

    Returns
    -------
    ``x``, in the shape and with the sharding of ``b``. With ``return_logdet`` or ``return_status`` a tuple: ``x``, then
    these, in this order.

    Raises
    ------
    UsageError
        If shapes, dtypes, ``T_A`` or specs are wrong.
    """
    if isinstance(T_A, bool) or not isinstance(T_A, int) or T_A < 1:
        raise UsageError(f"potrs: T_A is a number of rows, at least 1; got {T_A!r}")
    if matrix_specs is not None and in_specs is not None:
        raise UsageError("potrs: in_specs is the older name of matrix_specs; give one of them")
    b = specs.as_array(b)
    of_a, of_b = factor.pair(in_specs if matrix_specs is None else matrix_specs)
    a, layout = layout_of("potrs", a, mesh, _check_axes(a, mesh, of_a), T_A)
    if not pad and layout.local_rows % T_A:
        raise UsageError(
            f"potrs: T_A={T_A} does not divide the {layout.local_rows} rows of a device; give another, or pad=True"
        )
    x, logdet, status = _potrs(a, b, layout=layout, columns=factor.columns_of("potrs", a, b, layout, of_b))
    x = factor.lay_out_like(x, b, layout)
    more = (logdet,) * return_logdet + (status,) * return_status
    return (x, *more) if more else x


def _check_axes(a: Any, mesh: Any, spec: Any) -> Any:
    sharding = specs.sharding_of(a)
    if sharding is None or not isinstance(spec, P):
        return spec
    axes = (mesh or sharding.mesh).axis_names
    unknown = [name for name in specs.axis_names(spec) if name not in axes]
    if not unknown:
        return spec
    warnings.warn(
        f"potrs: matrix_specs names the axis {unknown[0]!r}, and the mesh has {', '.join(map(repr, axes))}; "
        f"using the matrix's own {sharding.spec}",
        stacklevel=3,
    )
    return sharding.spec


@functools.partial(jax.jit, static_argnames=("layout", "columns"))
def _potrs(a: Array, b: Array, *, layout: Layout, columns: bool) -> tuple[Array, Array, Array]:
    panels = factor.factorize(a, layout)
    logdet = factor.log_determinant(a, panels, layout)
    return factor.backsolve(a, panels, b, layout, columns), logdet, panels.status
