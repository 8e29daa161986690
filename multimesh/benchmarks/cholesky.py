"""Cholesky solves of `multimesh.linalg` against one device: CPU time, contenders in turns in one process.

    OPENBLAS_NUM_THREADS=1 python multimesh/benchmarks/cholesky.py [N]

Without ``OPENBLAS_NUM_THREADS`` the same with BLAS's own threads. ``--scalapack`` compares `solve` on one device and on
two with ScaLAPACK's ``psposv`` on as many ranks, in turns (Debian: gcc openmpi-bin libopenmpi-dev
libscalapack-openmpi-dev libopenblas0-pthread). Ranks that wait for each other spin, and that is CPU time, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
import turns
from jax.scipy.linalg import cho_factor, cho_solve
from jax.scipy.linalg import solve as solve_on_one
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

SOURCE = Path(__file__).parent.parent / "tests" / "foreign" / "psposv.c"
BLOCKS = 64, 128, 256  # of ScaLAPACK


def scalapack(a: np.ndarray, b: np.ndarray, ranks: int, runs: int) -> None:
    """Print CPU and time of devices and of as many ranks, in turns: medians, and medians of the rounds' ratios."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("x",))
    shards, copies = jax.device_put(a, NamedSharding(mesh, P("x"))), jax.device_put(b, NamedSharding(mesh, P()))
    times = np.empty((runs, 1 + len(BLOCKS), 2))
    with tempfile.TemporaryDirectory() as folder:
        program, given = f"{folder}/psposv", Path(folder, "in")
        given.write_bytes(a.tobytes() + b.tobytes())
        subprocess.run(["mpicc", "-O2", "-o", program, SOURCE, "-lscalapack-openmpi"], check=True)
        run = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), program, str(len(a))]
        for each in times:
            for _ in range(2):  # the second is counted, here as there
                start = np.array([time.process_time(), time.perf_counter()])
                x = jax.block_until_ready(mm.linalg.solve(shards, copies))
                each[0] = 1000 * (np.array([time.process_time(), time.perf_counter()]) - start)
            for place, block in enumerate(BLOCKS):
                argv = [*run, str(block), "2", given, f"{folder}/out"]
                out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
                each[1 + place] = [float(number) for number in out.splitlines()[1].split()]
        np.testing.assert_allclose(x[:, 0], np.fromfile(f"{folder}/out", np.float32), rtol=1e-3, atol=1e-4)
    print(f"{ranks} devices, {ranks} ranks: CPU ms and ms, and ours to theirs (load {os.getloadavg()[0]:.1f})")
    for place, name in enumerate(("solve", *(f"psposv, blocks of {block}" for block in BLOCKS))):
        cpu, real = np.median(times[:, place], axis=0)
        ratio = np.median(times[:, 0] / times[:, place], axis=0)
        print(f"{name:34} {cpu:6.0f} {real:6.0f} {ratio[0]:5.2f} {ratio[1]:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("order", type=int, nargs="?", default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scalapack", action="store_true")
    args = parser.parse_args()
    n = args.order

    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    rng = np.random.default_rng(0)
    a = rng.standard_normal((n, n), dtype=np.float32)
    whole = jax.device_put((a @ a.T / n + np.eye(n, dtype=np.float32)), jax.devices()[0])
    b = jax.device_put(rng.standard_normal((n, 1), dtype=np.float32), jax.devices()[0])
    shards = jax.device_put(whole, NamedSharding(mesh, P("x")))
    copies = jax.device_put(b, NamedSharding(mesh, P()))
    tile = n // 8 // 16

    def ours(a, b, tile=tile):
        return mm.linalg.potrs(a, b, tile, mesh, P("x"))

    start = time.process_time()
    compiled = jax.jit(ours).lower(shards, copies).compile()
    compilation = time.process_time() - start
    memory = compiled.memory_analysis().temp_size_in_bytes / (n * n * 4 / 8)
    one = jax.jit(lambda a, b: cho_solve(cho_factor(a), b))
    gradient = jax.jit(jax.grad(lambda a, b: jnp.sum(ours(a, b) ** 2), (0, 1)))
    gradient_on_one = jax.jit(jax.grad(lambda a, b: jnp.sum(solve_on_one(a, b, assume_a="pos") ** 2), (0, 1)))
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "as it likes")
    print(f"N = {n}, float32, 8 devices, T_A = {tile} (16 superpanels); BLAS threads: {threads}")
    print(f"compilation {compilation:.1f} s of CPU; temporaries {memory:.2f} x a shard on each device")
    x = np.asarray(compiled(shards, copies))  # waits: concurrent LAPACK calls of a threaded OpenBLAS collide
    np.testing.assert_allclose(x, one(whole, b), rtol=1e-3, atol=1e-4)
    table = turns.measure(
        {
            "one device": lambda: one(whole, b),
            "potrs, 16 superpanels": lambda: compiled(shards, copies),
            "potrs, T_A = 256": lambda: ours(shards, copies, 256),
            "cholesky": lambda: mm.linalg.cholesky(shards),
        },
        args.runs,
    )
    turns.show(table, "one device")
    table = turns.measure(
        {"one device": lambda: gradient_on_one(whole, b), "gradient": lambda: gradient(shards, copies)}, args.runs
    )
    turns.show(table, "one device")
    if args.scalapack:
        for ranks in (1, 2):
            scalapack(np.asarray(whole), np.asarray(b), ranks, args.runs)


if __name__ == "__main__":
    main()
