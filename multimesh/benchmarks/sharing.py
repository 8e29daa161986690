"""What submeshes save that share compilations: CPU time to compile a step and to run it.

A training step of a small transformer (adam, 1f1b) on 2 and on 4 submeshes: where every submesh has each of its
kernels compiled, and where equal kernels are shared. `core._compat.executables.shares_executables` quotes the result.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.monitoring
import report
from step import seconds
from workload import SMALL_2, SMALL_4, Size, pipeline

UNITS = (("compile", "s"), ("step", "ms"))
compilations: list[float] = []


def listen(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(duration)


WAYS: dict[str, dict[str, Callable[..., Any]]] = {
    "no": {"multimesh.core._compat.executables.shares_executables": lambda _: False},
    "equal ones": {},
}


def measure(size: Size, way: str, steps: int) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        for name, instead in WAYS[way].items():
            stack.enter_context(mock.patch(name, instead))
        step, args = pipeline(size, "1f1b")
        lowered = step.lower(*args)
        before, start = len(compilations), time.process_time()
        compiled = lowered.compile()
        spent = time.process_time() - start
        made = len(compilations) - before

    def run() -> None:
        nonlocal args
        params, state, _ = jax.block_until_ready(compiled(*args))
        args = (params, state, args[2])

    run()
    times = [seconds(run) for _ in range(steps)]
    runs = sum(i.kind == "RUN" for i in lowered.plan.instructions)
    return {"compilations": made, "runs": runs, "compile CPU s": spent, "step CPU ms": 1e3 * statistics.median(times)}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times to compile each (default 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps to take the median of (default 20)")
    args = parser.parse_args()
    jax.monitoring.register_event_duration_secs_listener(listen)
    rows: list[report.Row] = []
    for size in (SMALL_2, SMALL_4):
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                found[way].append(measure(size, way, args.steps))
        middle = {way: {k: statistics.median(r[k] for r in rounds) for k in rounds[0]} for way, rounds in found.items()}
        for way, row in middle.items():
            ratios = {f"{k} ratio": row[f"{k} CPU {unit}"] / middle["no"][f"{k} CPU {unit}"] for k, unit in UNITS}
            rows.append({"submeshes": size.stages, "shared": way, **row, **ratios})
    report.show({"Shared compilations": rows}, args.json)


if __name__ == "__main__":
    main()
