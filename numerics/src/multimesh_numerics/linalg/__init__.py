"""Linear algebra of large matrices, sharded over a mesh.

The functions have the names and results of ``jax.scipy.linalg`` and ``jax.numpy.linalg``. They work under ``jit``,
``grad``, ``vmap``, ``jax.checkpoint`` and inside a task, with Auto and Explicit mesh axes, over any number of
processes.
A matrix is float32, float64, complex64 or complex128, and is sharded by rows, by columns or both, over one mesh axis or
several. No device ever holds the whole matrix, but in derivatives that say so. Where one device has all of it, they are
JAX's own functions.

Under ``jax.jit`` an array only carries its Explicit axes: pass ``mesh`` and ``spec`` there. On CPU devices set
``OPENBLAS_NUM_THREADS=1``.
"""

from multimesh_numerics.linalg.factor import (
    CholeskyFactor,
    SlogdetResult,
    cho_factor,
    cho_solve,
    cholesky,
    inv,
    slogdet,
    solve,
)
from multimesh_numerics.linalg.general import LUFactor, lu_factor, lu_solve, solve_triangular
from multimesh_numerics.linalg.orthogonal import QRResult, least_squares, qr
from multimesh_numerics.linalg.potrs import potrs
from multimesh_numerics.linalg.spectral import EighResult, PolarResult, SVDResult, eigh, polar, svd

__all__ = [
    "CholeskyFactor",
    "EighResult",
    "LUFactor",
    "PolarResult",
    "QRResult",
    "SVDResult",
    "SlogdetResult",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "eigh",
    "inv",
    "least_squares",
    "lu_factor",
    "lu_solve",
    "polar",
    "potrs",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
]
