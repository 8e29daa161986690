"""Every function of `multimesh.linalg`, `multimesh.fft` and `multimesh.grids` over processes: each runs this file.

Eight devices in all. Whole results are compared with NumPy and SciPy, gradients with those of JAX on one device.
"""

from __future__ import annotations

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

linalg, grids = mm.linalg, mm.grids
N = 16
close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)


def gather_all(x):
    """A result, gathered in every process."""
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), x)


def assert_close(actual, expected):
    jax.tree.map(close, gather_all(actual), expected)


def random(*shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else 0)
    return x.astype(dtype)


def check_linalg(mesh, spec, dtype):
    def replicate(x):
        return jax.device_put(x, NamedSharding(mesh, spec))

    full, b = random(N, N, dtype=dtype), random(N, 3, dtype=dtype, seed=1)
    definite = full @ full.conj().T / N + np.eye(N)
    a, square = replicate(definite), replicate(full)
    factor = linalg.cho_factor(a)
    assert_close(linalg.solve(a, b), scipy.linalg.solve(definite, b))
    assert_close(linalg.potrs(a, b), scipy.linalg.solve(definite, b))
    assert_close(linalg.cho_solve(factor, b), scipy.linalg.solve(definite, b))
    assert_close(linalg.slogdet(factor).logabsdet, np.linalg.slogdet(definite)[1])
    assert_close(linalg.cholesky(a), np.linalg.cholesky(definite))
    assert_close(linalg.inv(a), np.linalg.inv(definite))
    assert_close(linalg.lu_solve(linalg.lu_factor(square), b, "C"), np.linalg.solve(full.conj().T, b))
    assert_close(linalg.solve_triangular(square, b, lower=True), scipy.linalg.solve_triangular(full, b, lower=True))
    w, v = gather_all(tuple(linalg.eigh(a)))
    close(w, np.linalg.eigvalsh(definite))
    close(definite @ v, v * w)
    u, s, vh = gather_all(tuple(linalg.svd(square)))
    close(s, np.linalg.svd(full, compute_uv=False))
    close((u * s) @ vh, full)
    assert_close(tuple(linalg.polar(square)), scipy.linalg.polar(full))

    def cost(f, x, b):
        return jnp.sum(jnp.abs(f(x, b)) ** 2)

    assert_close(
        jax.grad(lambda x: cost(linalg.solve, x, b))(a),
        jax.grad(lambda x: cost(jnp.linalg.solve, x, b))(jnp.asarray(definite)),
    )
    if np.dtype(dtype).kind == "f":
        assert_close(
            jax.grad(lambda x: linalg.eigh(x)[0][0] + linalg.slogdet(x).logabsdet)(a),
            jax.grad(lambda x: jnp.linalg.eigh(x)[0][0] + jnp.linalg.slogdet(x)[1])(jnp.asarray(definite)),
        )


def check_tall(mesh, axes, dtype):
    full, b = random(8 * N, 3, dtype=dtype), random(8 * N, 2, dtype=dtype, seed=1)
    a = jax.device_put(full, NamedSharding(mesh, P(axes)))
    q, r = gather_all(tuple(linalg.qr(a)))
    close(q @ r, full)
    assert_close(linalg.least_squares(a, b), scipy.linalg.lstsq(full, b)[0])


def check_fft(mesh, spec):
    full = random(N, N, N, dtype="complex128")
    x = jax.device_put(full, NamedSharding(mesh, spec))
    for transposed in (False, True):
        y = mm.fft.fftn(x, transposed=transposed)
        order = (0, 1, 2) if not transposed else (2, 1, 0) if len(spec) > 1 else (1, 2, 0)
        assert_close(y, np.fft.fftn(full).transpose(order))
        assert_close(mm.fft.ifftn(y, transposed=transposed), full)
    real = jax.device_put(full.real, NamedSharding(mesh, spec))
    half = mm.fft.rfftn(real)
    assert_close(mm.fft.unpad(half, (N, N, N // 2 + 1)), np.fft.rfftn(full.real))
    assert_close(mm.fft.irfftn(half, (N, N, N)), full.real)


def check_grids(mesh, spec):
    rng = np.random.default_rng(0)
    cells = np.stack(np.meshgrid(*3 * [np.arange(N)], indexing="ij"), -1)
    start = cells + rng.uniform(-0.4, 0.4, cells.shape)
    values = rng.standard_normal(cells.shape[:-1])

    def work(positions, values, mesh, spec):
        layout = {"mesh": mesh, "spec": spec}
        density, lost = grids.paint(positions, shape=(N, N, N), halo=1, **layout)
        forces = grids.read(grids.poisson(density - 1, **layout), positions, halo=1, **layout)
        return jnp.sum(forces**2) + jnp.sum(density * values), (density, lost, grids.gradient(values, **layout))

    results = []
    for grid, by in ((Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), ("x", "y")), P("x", None)), (mesh, spec)):
        args = (jax.device_put(x, NamedSharding(grid, by)) for x in (start, values))
        step = jax.jit(jax.value_and_grad(functools.partial(work, mesh=grid, spec=by), (0, 1), has_aux=True))
        results.append(step(*args))
    reference, result = results
    assert_close(result, jax.tree.map(np.asarray, reference))


def main():
    jax.config.update("jax_enable_x64", True)
    processes = int(os.environ["PROCESSES"])
    mm.distributed.initialize(os.environ["COORDINATOR"], processes, int(os.environ["PROCESS"]))
    assert jax.device_count() == 8
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    case, dtype = sys.argv[1:]
    if case == "rows":
        check_linalg(mesh, P(("x", "y")), dtype)
        check_tall(mesh, ("x", "y"), dtype)
    elif case == "both":
        check_linalg(mesh, P("x", "y"), dtype)
    else:
        for spec in (P(("x", "y")), P("x", "y")):
            check_fft(mesh, spec)
            check_grids(mesh, spec)
    print("ok")


if __name__ == "__main__":
    main()
