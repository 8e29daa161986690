"""Cholesky solves of one large Hermitian positive definite matrix, sharded over a mesh.

The functions have the names and results of ``jax.scipy.linalg`` and work under ``jit``, ``grad``, ``vmap``,
``jax.checkpoint`` and inside a task, with Auto and Explicit mesh axes, over any number of processes. ``a`` has shape
(N, N), float32, float64, complex64 or complex128, and is sharded by rows, by columns or both, over one mesh axis or
several. Both its triangles are read. No device ever holds the whole matrix.

Under ``jax.jit`` an array only carries its Explicit axes: pass ``mesh`` and ``spec`` there. On CPU devices set
``OPENBLAS_NUM_THREADS=1``.
"""

from multimesh.linalg.factor import CholeskyFactor, SlogdetResult, cho_factor, cho_solve, cholesky, slogdet, solve
from multimesh.linalg.potrs import potrs

__all__ = ["CholeskyFactor", "SlogdetResult", "cho_factor", "cho_solve", "cholesky", "potrs", "slogdet", "solve"]
