"""How cutting and partitioning grow with the layers, and dispatch with the microbatches: all should be linear."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import report
from jax.extend.core import jaxprs_in_params
from step import Training
from workload import TINY, batch, init, pipeline, unmarked

import multimesh as mm

LAYERS = (4, 16, 64)
CUT = (8, 20, 80)
MICROBATCHES = (8, 32, 128)


def equations(jaxpr: Any) -> int:
    """Equations of a jaxpr and of all that it holds."""
    return sum(1 + sum(map(equations, jaxprs_in_params(e.params))) for e in jaxpr.eqns)


def partition(layers: int, repeats: int) -> report.Row:
    """CPU seconds of lowering, less those that jax spends on tracing inside it."""
    step, args = pipeline(dataclasses.replace(TINY, layers=layers), "1f1b")
    traces, own = [], []
    original = jax.make_jaxpr

    def make_jaxpr(*args: Any, **options: Any) -> Any:
        traced = original(*args, **options)

        def call(*args: Any) -> Any:
            start = time.process_time()
            result = traced(*args)
            traces.append(time.process_time() - start)
            return result

        return call

    jax.make_jaxpr = make_jaxpr
    try:
        for _ in range(repeats + 1):
            jax.clear_caches()
            start = time.process_time()
            lowered = step.lower(*args)
            own.append(time.process_time() - start - traces[-1])
    finally:
        jax.make_jaxpr = original
    count = equations(lowered.traced.closed.jaxpr)
    seconds = statistics.median(own[1:])
    return {
        "layers": layers,
        "equations": count,
        "trace s": statistics.median(traces[1:]),
        "partition s": seconds,
        "us per equation": 1e6 * seconds / count,
    }


def cut(layers: int, repeats: int) -> report.Row:
    """CPU seconds of `multimesh.pipeline` for the model without marks, and of a trace alone."""
    size = dataclasses.replace(TINY, layers=layers)
    params, rows = init(size), batch(dataclasses.replace(size, microbatches=1))
    whole, trace = [], []
    for _ in range(repeats + 1):
        for times, run in (
            (whole, mm.pipeline(unmarked, size.submeshes()).cuts),
            (trace, jax.make_jaxpr(lambda *args: unmarked(*args))),
        ):
            jax.clear_caches()
            start = time.process_time()
            run(params, rows)
            times.append(time.process_time() - start)
    both, alone = (statistics.median(times[1:]) for times in (whole, trace))
    return {"layers": layers, "trace s": alone, "trace and cut s": both, "ms per layer": 1e3 * (both - alone) / layers}


def dispatch(microbatches: int, steps: int) -> report.Row:
    """Thread time of a warm step."""
    step, args = pipeline(dataclasses.replace(TINY, microbatches=microbatches), "1f1b")
    training = Training(step, args)
    plan = step.plan(*args)
    runs = sum(i.kind == "RUN" for i in plan.instructions)
    for _ in range(2):
        jax.block_until_ready(training())
    times = []
    for _ in range(steps):
        start = time.thread_time()
        training()
        times.append(time.thread_time() - start)
        jax.block_until_ready(training.params)
    total = statistics.median(times)
    return {"microbatches": microbatches, "RUN": runs, "step ms": 1e3 * total, "us per RUN": 1e6 * total / runs}


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--repeats", type=int, default=3, help="partitions of each size (default 3)")
    options.add_argument("--steps", type=int, default=10, help="warm steps of each number of microbatches (default 10)")
    args = options.parse_args()
    tables = {
        "mm.pipeline (tiny, 4 stages)": [cut(n, args.repeats) for n in CUT],
        "Partition time (tiny, 4 stages)": [partition(n, args.repeats) for n in LAYERS],
        "Dispatch time (tiny, 4 stages, 1f1b)": [dispatch(n, args.steps) for n in MICROBATCHES],
    }
    report.show(tables, args.json)


if __name__ == "__main__":
    main()
