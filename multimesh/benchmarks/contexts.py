"""What task fusion and recomputation save: kernels, transfers and live bytes of a step, and its CPU time.

8 transformer layers, each a task of its own, gated between the stages by unmarked arithmetic that the backward pass
reads on the other side; 4 stages of 2 devices, 8 microbatches, 1f1b.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import report
from measure import peak_bytes
from step import seconds
from workload import SMALL_4, batch, block, cross_entropy, init

import multimesh as mm

SIZE = SMALL_4
OPTIONS = (
    {},
    {"enable_task_fusion": False},
    {"enable_recomputation": False},
    {"enable_task_fusion": False, "enable_recomputation": False},
)


def gradient() -> Any:
    """``(params, batch) -> (loss, gradients)``, summed over microbatches."""
    meshes = SIZE.submeshes()

    def gate(x: Any) -> Any:
        return x * jax.nn.sigmoid(x)

    def loss(params: Any, b: Any) -> Any:
        def task(name: str, s: int, fn: Any) -> Any:
            return mm.task(fn, name, mesh=meshes[s])

        x = task("embed", 0, lambda e, t: e[t])(params["embed"], b["x"])
        for i, p in enumerate(params["layers"]):
            x = task(f"layer{i}", SIZE.piece_of(i), block)(p, x)
            if i + 1 < SIZE.layers and SIZE.piece_of(i) != SIZE.piece_of(i + 1):
                x = gate(x)
        last = SIZE.stages - 1
        return task("head", last, lambda h, x, y: cross_entropy(x @ h, y))(params["head"], x, b["y"])

    return mm.jit(mm.microbatch(jax.value_and_grad(loss), size=SIZE.rows, argnum=1))


def measure(options: dict[str, bool], count: int) -> dict[str, Any]:
    step = gradient()
    params, b = jax.tree.map(jnp.asarray, (init(SIZE), batch(SIZE)))
    with mm.context(**options):
        plan = step.plan(params, b)

        def run() -> Any:
            return jax.block_until_ready(step(params, b))

        run()
        peak = peak_bytes(run)
        times = [seconds(run) for _ in range(count)]
    arrays, size = plan.traffic()
    row = {
        "without": ", ".join(name.removeprefix("enable_") for name in options) or "-",
        "kernels": len(plan.kernels),
        "runs": sum(s.kind == "RUN" for s in plan.instructions),
        "arrays sent": arrays,
        "MB sent": size / 1e6,
    }
    for s, stage in ((0, "first"), (-1, "last")):
        row[f"live MB, {stage}"] = sum(peak[d] for d in SIZE.grid()[s].flat) / 1e6
    return row | {"step CPU ms": 1e3 * statistics.median(times)}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps to take the median of (default 20)")
    args = parser.parse_args()
    rows = [measure(options, args.steps) for options in OPTIONS]
    report.show({"Task fusion and recomputation": rows}, args.json)


if __name__ == "__main__":
    main()
