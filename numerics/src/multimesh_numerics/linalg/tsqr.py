"""QR of a tall matrix that is sharded by rows (TSQR), inside `jax.shard_map`.

Each device factors its rows by Householder reflections, and the triangles are factored again, in groups. So Q is
orthonormal to rounding for any matrix, singular ones too.

J. Demmel, L. Grigori, M. Hoemmen and J. Langou, "Communication-optimal parallel and sequential QR and LU
factorizations", SIAM Journal on Scientific Computing 34 (2012).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from multimesh.core.specs import Axes

from multimesh_numerics.linalg import trees
from multimesh_numerics.linalg.rings import matmul


def qr_of_shards(a: Array, axes: Axes) -> tuple[Array, Array]:
    """My rows of Q, (m, n), and all of R, (n, n), from my rows of A; ``m`` is at least ``n``."""

    def combine(blocks: tuple[Array, Array], place: Array) -> tuple[Array, Array]:
        r, q = blocks
        group, n, _ = r.shape
        turn, r = jnp.linalg.qr(r.reshape(group * n, n))
        turn = lax.dynamic_slice_in_dim(turn, place * n, n)
        return r, matmul(lax.dynamic_index_in_dim(q, place, keepdims=False), turn)

    q, r = jnp.linalg.qr(a)
    eye = jnp.eye(len(r), dtype=r.dtype)
    r, turn = trees.reduce((r, eye), combine, axes)
    return matmul(q, turn), r
