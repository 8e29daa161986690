"""Matrix products with and without YNNPACK: the constants of ``multimesh/runtime/ynnpack.py`` come from here.

Microseconds of CPU time of a call, float32: the least of several rounds. A batch is the heads of some sequences in
attention; devices of one process share the threads, as the stages of a pipeline do.
"""

from __future__ import annotations

import os

os.environ |= {"NPROC": "64", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

import time
from typing import Any

import jax
import jax.numpy as jnp
import report
from multimesh.runtime import ynnpack

PRODUCTS = {"x w": "mk,kn->mn", "x w^T": "mk,nk->mn", "q k^T": "bqhd,bkhd->bhqk", "p v": "bhqk,bkhd->bqhd"}
WEIGHTS = [(64, 64), (64, 256), (128, 128), (192, 192), (192, 768), (768, 192), (256, 256), (256, 1024), (1024, 256)]
ROWS = (32, 128, 512)
HEADS = [(32, 16, 8), (32, 16, 128), (64, 32, 8), (64, 32, 128), (128, 64, 2), (128, 64, 32), (256, 64, 8)]
ROUNDS = 5


def cases() -> list[tuple[str, str, tuple[int, ...], tuple[int, ...], float]]:
    """Name, kind, shapes of both operands, and million operations of each matrix."""
    found: list[tuple[str, str, tuple[int, ...], tuple[int, ...], float]] = []
    for k, n in WEIGHTS:
        for m in ROWS:
            found += [(f"{m} x {k} x {n}", "x w", (m, k), (k, n), 2e-6 * m * k * n)]
            found += [(f"{m} x {k} x {n}", "x w^T", (m, k), (n, k), 2e-6 * m * k * n)]
    for s, d, count in HEADS:
        each, x, p = 2e-6 * s * s * d, (count // 2, s, 2, d), (count // 2, 2, s, s)
        found += [(f"{count} of {s} x {d}", "q k^T", x, x, each), (f"{count} of {s} x {d}", "p v", p, x, each)]
    return found


def least(call: Any, args: tuple[Any, ...], calls: int) -> float:
    """Return the CPU seconds of a call, the least of all rounds."""
    took = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            result = call(*args)
        jax.block_until_ready(result)
        took.append((time.process_time() - start) / calls)
    return min(took)


def main() -> None:
    args = report.parser(__doc__).parse_args()
    rows: list[report.Row] = []
    for name, kind, left, right, each in cases():
        arrays = jnp.ones(left), jnp.ones(right)
        lowered = jax.jit(lambda x, y, kind=kind: jnp.einsum(PRODUCTS[kind], x, y)).lower(*arrays)
        both = [lowered.compile(), lowered.compile({ynnpack.OPTION: ""})]
        calls = max(5, min(100, int(300 / each)))
        ours, eigen = (1e6 * min(least(call, arrays, calls) for _ in range(2)) for call in both)
        rows.append({"product": kind, "size": name, "million operations": each, "YNNPACK us": ours, "Eigen us": eigen})
    report.show({"CPU time of a product": rows}, args.json)


if __name__ == "__main__":
    main()
