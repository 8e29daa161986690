"""Why two stages on each submesh take more CPU time than one: the same step by schedule, with its kernels counted.

    python multimesh/benchmarks/interleaved.py [--runs 15]

The small model of workload.py on two submeshes, in turns in one process, by marks and by ``mm.pipeline``. ``kernels``
and ``transfers`` are what a step starts. ``kept`` is what forward kernels hand to backward kernels of the same submesh,
in all microbatches: a kernel that does both, as 1F1B's on the last stage, keeps that to itself. ``empty`` is the CPU
time of as many kernels that do nothing, on the devices of a submesh.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
import turns
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.plan.instructions import Recv, Run
from step import Training
from workload import SMALL_2, Size, pipeline, train_step, unmarked

import multimesh as mm

CASES = (("gpipe", 1), ("1f1b", 1), ("looped-bfs", 2), ("interleaved", 2))


def cut(size: Size, schedule: str) -> tuple[Any, tuple[Any, Any, Any]]:
    """The step by `multimesh.pipeline`, with the arguments of the marked one."""
    loss = mm.pipeline(unmarked, size.submeshes(), interleave=size.chunks)
    grads_of = mm.microbatch(jax.value_and_grad(loss), size=size.rows, argnum=1, schedule=schedule)
    _, args = pipeline(size, schedule)
    return mm.jit(train_step(grads_of, size.microbatches), donate_argnums=(0, 1)), args


def counted(step: Any, args: Any) -> report.Row:
    """What a step starts, and what it keeps."""
    plan, kept = step.plan(*args), 0
    forward: set[int] = set()  # slots that a forward kernel has filled
    for instruction in plan.instructions:
        if isinstance(instruction, Run):
            phases = plan.shown(instruction.cell)
            if phases == "B":
                kept += sum(plan.slots[slot].nbytes for slot in forward.intersection(instruction.ins))
            forward.difference_update(instruction.outs)
            if phases == "F":
                forward.update(instruction.outs)
        elif isinstance(instruction, Recv):
            forward.difference_update(instruction.outs)
    return {"kernels": len(plan.runs), "transfers": len(plan.transfers), "kept MB": kept / 1e6}


def empty(size: Size, runs: int) -> float:
    """CPU milliseconds of a kernel that does nothing, on all devices of a submesh."""
    x = jax.device_put(np.zeros(8, np.float32), NamedSharding(size.submeshes()[0], P()))
    nothing = jax.jit(lambda x: jnp.negative(x))
    (times,) = turns.measure({"": lambda: [nothing(x) for _ in range(100)]}, runs).values()
    return statistics.median(times) / 100


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=15, help="steps of each (default 15)")
    args = parser.parse_args()
    trainings, rows = dict[str, Training](), dict[str, report.Row]()
    for schedule, chunks in CASES:
        size = dataclasses.replace(SMALL_2, chunks=chunks)
        for name, make in (("by hand", pipeline), ("mm.pipeline", cut)):
            made = make(size, schedule)
            rows[f"{schedule}, {name}"] = counted(*made)
            trainings[f"{schedule}, {name}"] = Training(*made)
    one = empty(SMALL_2, args.runs)
    table = turns.measure(trainings, args.runs)
    base = table["1f1b, by hand"]
    for name, times in table.items():
        rows[name] |= {
            "empty ms": one * rows[name]["kernels"],
            "CPU ms": statistics.median(times),
            "x 1f1b": statistics.median(t / b for t, b in zip(times, base, strict=True)),
        }
    report.show({"Two submeshes": [{"case": name} | row for name, row in rows.items()]}, args.json)


if __name__ == "__main__":
    main()
