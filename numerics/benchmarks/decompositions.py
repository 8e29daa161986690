"""Solves and decompositions of `multimesh.linalg` by order and number of devices, beside one device and SciPy.

    OPENBLAS_NUM_THREADS=1 python numerics/benchmarks/decompositions.py [ORDER...] [--devices P...] [--only NAME...]

float32. For each: seconds of CPU to compile; what a device holds beside its arguments and results, in shards of the
matrix; milliseconds of CPU of a call (median of 3, in turns) as a multiple of JAX's on one device and of SciPy's; and
errors in units of rounding, in parentheses those of SciPy (LAPACK): of the residual, relative to the norms, and of
orthogonality.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import jax.scipy.linalg as one
import numpy as np
import scipy.linalg
import turns
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

EPS = float(np.finfo(np.float32).eps)
Errors = tuple[float, ...]


class Work(NamedTuple):
    """A function, those that it is compared with, and how far a result is from right."""

    ours: Callable[..., Any]
    jax: Callable[..., Any]
    scipy: Callable[..., Any]
    errors: Callable[..., Errors]
    definite: bool = False
    tall: bool = False  # eight times as many rows as columns


def norm(x: np.ndarray) -> float:
    """The Frobenius norm."""
    return float(np.linalg.norm(x))


def of_solution(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> Errors:
    """The residual of a system."""
    return (norm(a @ x - b) / (norm(a) * norm(x)) / EPS,)


def of_factors(a: np.ndarray, product: np.ndarray, q: np.ndarray) -> Errors:
    """The residual of a product, and how far Q is from orthonormal."""
    return norm(a - product) / norm(a) / EPS, norm(q.T @ q - np.eye(q.shape[1])) / np.sqrt(q.shape[1]) / EPS


def of_lapack_qr(a: np.ndarray, b: np.ndarray) -> Any:
    """SciPy's, in the shape of ours."""
    return scipy.linalg.qr(a, mode="economic")


WORKS = {
    "solve": Work(
        mm.linalg.solve,
        lambda a, b: one.solve(a, b, assume_a="pos"),
        lambda a, b: scipy.linalg.solve(a, b, assume_a="pos"),
        of_solution,
        definite=True,
    ),
    "inv": Work(
        lambda a, b: mm.linalg.inv(a),
        lambda a, b: one.cho_solve(one.cho_factor(a), jnp.eye(len(a), dtype=a.dtype)),
        lambda a, b: scipy.linalg.inv(a),
        lambda a, b, x: (norm(a @ x - np.eye(len(a))) / (norm(a) * norm(x)) / EPS,),
        definite=True,
    ),
    "lu_solve": Work(
        lambda a, b: mm.linalg.lu_solve(mm.linalg.lu_factor(a), b), jnp.linalg.solve, scipy.linalg.solve, of_solution
    ),
    "qr": Work(
        lambda a, b: tuple(mm.linalg.qr(a)),
        lambda a, b: jnp.linalg.qr(a),
        of_lapack_qr,
        lambda a, b, q, r: of_factors(a, q @ r, q),
        tall=True,
    ),
    "polar": Work(
        lambda a, b: tuple(mm.linalg.polar(a)),
        lambda a, b: one.polar(a, method="svd"),
        lambda a, b: scipy.linalg.polar(a),
        lambda a, b, u, h: of_factors(a, u @ h, u),
        tall=True,
    ),
    "eigh": Work(
        lambda a, b: tuple(mm.linalg.eigh(a)),
        lambda a, b: jnp.linalg.eigh(a),
        lambda a, b: scipy.linalg.eigh(a),
        lambda a, b, w, v: of_factors(a, (v * w) @ v.T, v),
        definite=True,
    ),
    "svd": Work(
        lambda a, b: tuple(mm.linalg.svd(a)),
        lambda a, b: jnp.linalg.svd(a, full_matrices=False),
        lambda a, b: scipy.linalg.svd(a, full_matrices=False),
        lambda a, b, u, s, vh: of_factors(a, (u * s) @ vh, u),
    ),
}


def draw_operands(work: Work, order: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix and a right-hand side."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((order, order // 8 if work.tall else order), dtype=np.float32)
    a = a @ a.T / order + np.eye(order, dtype=np.float32) if work.definite else a
    return a, rng.standard_normal((order, 1), dtype=np.float32)


def errors(work: Work, a: np.ndarray, b: np.ndarray, results: Any) -> Errors:
    """Those of one result, computed in double precision."""
    parts = results if isinstance(results, tuple) else (results,)
    return work.errors(*(np.asarray(x, np.float64) for x in (a, b, *parts)))


def row(name: str, work: Work, a: np.ndarray, b: np.ndarray, devices: int, reference: Errors, runs: int) -> str:
    """One line of the table."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Explicit,))
    shards, copies = jax.device_put(a, NamedSharding(mesh, P("x"))), jax.device_put(b, NamedSharding(mesh, P()))
    matrix, rhs = jax.device_put((a, b), jax.devices()[0])
    start = time.process_time()
    compiled = jax.jit(work.ours).lower(shards, copies).compile()
    compilation = time.process_time() - start
    memory = compiled.memory_analysis().temp_size_in_bytes / (a.nbytes / devices)
    single = jax.jit(work.jax)
    contenders = {
        "ours": lambda: compiled(shards, copies),
        "one": lambda: single(matrix, rhs),
        "SciPy": lambda: work.scipy(a, b),
    }
    ours, its, scipys = (float(np.median(times)) for times in turns.measure(contenders, runs).values())
    accuracy = ", ".join(
        f"{error:.2g} ({other:.2g})"
        for error, other in zip(errors(work, a, b, compiled(shards, copies)), reference, strict=True)
    )
    ratios = f"{ours / its:.2f}", f"{ours / scipys:.2f}"
    cells = f"`{name}`", len(a), devices, f"{compilation:.1f}", f"{memory:.2f}", f"{ours:.0f}", *ratios, accuracy
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("orders", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print("| | N | devices | compile, s | shards held | CPU ms | x one device | x SciPy | errors, eps (SciPy) |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.only:
        for order in args.orders:
            work = WORKS[name]
            a, b = draw_operands(work, order)
            reference = errors(work, a, b, work.scipy(a, b))
            for devices in args.devices:
                print(row(name, work, a, b, devices, reference, args.runs), flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
