"""Forward passes alone, as of evaluation and batch inference: a wavefront of ``mm.pipeline`` beside one SPMD program.

    python multimesh/benchmarks/forward.py [--runs 10]

First table: the transformer of workload.py, without marks, over ``pp`` submeshes of 8 devices in all, and as one
``jax.jit`` whose devices share the rows; CPU time of a call, in turns, and the largest difference of a logit relative
to the largest one. ``forecast`` is the length of a call on ideal submeshes, by the costs of each kernel as measured,
relative to one without idle time; ``ideal`` is (m + p - 1) / m for m microbatches.

Second table: a process for each stage, and a model whose layers wait for 25 ms each and compute next to nothing, so
that all stages run at once on any machine. ``clock`` is the time until each process has the results, relative to m
times that of a stage: of the fastest call, and the median.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
import turns
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import started
from workload import SMALL_2, SMALL_4, Size, batch, init, logits

import multimesh as mm

WIDE_4 = dataclasses.replace(SMALL_4, name="wide", width=256)
SIZES = tuple(
    dataclasses.replace(size, microbatches=m, tensor=1) for size in (SMALL_2, SMALL_4, WIDE_4) for m in (8, 16)
)
WAIT, LAYERS, WIDTH, ROWS = 0.025, 8, 64, 2


def predict(forward: Any, meshes: Any, rows: int) -> Any:
    """The one call."""
    cut = mm.pipeline(forward, meshes)
    return mm.jit(mm.microbatch(cut, size=rows, argnum=1, reduce="rows", schedule="wavefront"))


def placed(step: Any, *args: Any) -> tuple[Any, ...]:
    """Arguments where the plan reads them."""
    shardings, _ = step.lower(*args).compile().input_shardings
    return tuple(jax.device_put(arg, where) for arg, where in zip(args, shardings, strict=True))


def compared(size: Size, runs: int) -> report.Row:
    """A forward pass of every microbatch, both ways."""
    meshes, params, tokens = size.submeshes(), init(size), batch(size)["x"]
    whole = Mesh(size.grid().ravel(), ("data",))
    one, many = jax.jit(logits), predict(logits, meshes, size.rows)
    given = jax.device_put((params, tokens), (NamedSharding(whole, P()), NamedSharding(whole, P("data"))))
    args = placed(many, params, jax.device_put(tokens, NamedSharding(meshes[0], P("data"))))
    table = turns.measure({"SPMD": lambda: one(*given), "MultiMesh": lambda: many(*args)}, runs)
    want, got = np.asarray(one(*given)), np.asarray(many(*args))
    forecast = many.plan(*args).forecast(many.lower(*args).compile().profile(*args).costs)
    spmd, ours = map(statistics.median, table.values())
    return {
        "d": size.width,
        "pp": size.stages,
        "m": size.microbatches,
        "slowest": many.plan(*args).cuts[0].slowest,
        "forecast": forecast.makespan / max(forecast.busy),
        "ideal": 1 + (size.stages - 1) / size.microbatches,
        "SPMD CPU ms": spmd,
        "MultiMesh CPU ms": ours,
        "x SPMD": ours / spmd,
        "difference": float(np.abs(got - want).max() / np.abs(want).max()),
    }


def waiting(weights: Any, x: Any) -> Any:
    """Layers that wait."""
    for w in weights:
        x = x + jnp.tanh(jax.pure_callback(_wait, x, x) @ w)
    return x


def _wait(x: Any) -> Any:
    time.sleep(WAIT)
    return x


def overlapped(m: int, runs: int) -> report.Row:
    """A call of stages that wait, each in its process, by the clock."""
    pp = jax.process_count()
    meshes = [Mesh(np.array([device]), ("data",)) for device in jax.devices()]
    draw = np.random.default_rng(0).normal
    weights = [draw(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH for _ in range(LAYERS)]
    x = draw(size=(m * ROWS, WIDTH)).astype(np.float32)
    step = predict(waiting, meshes, ROWS)

    calls = {"": lambda: mm.distributed.gather(step(weights, x))}
    (times,) = turns.measure(calls, runs, time.perf_counter).values()
    waits = 1000 * m * WAIT * LAYERS / pp
    fastest, median = min(times) / waits, statistics.median(times) / waits
    return {"pp": pp, "m": m, "ideal": 1 + (pp - 1) / m, "clock": fastest, "median": median}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="calls of each (default 10)")
    args = parser.parse_args()
    if "PROCESS" in os.environ:
        mm.distributed.initialize(num_processes=int(os.environ["PROCESSES"]), process_id=int(os.environ["PROCESS"]))
        print(json.dumps([overlapped(m, args.runs) for m in (8, 16)]), flush=True)
        return
    waits = [row for pp in (2, 4) for row in started(range(pp), devices=1)[0]]
    tables = {
        "One call, as a wavefront and as one SPMD program": [compared(size, args.runs) for size in SIZES],
        "Stages that wait, a process each": waits,
    }
    print(f"load {os.getloadavg()[0]:.1f}")
    report.show(tables, args.json)


if __name__ == "__main__":
    main()
