"""The runtime's own cost: CPU time of the calling thread in a warm step, less what the programs and transfers take.

Every program call and every batched ``device_put`` of the step is timed on its own; what is left is the runtime:
signature, argument and slot handling, frees. The timers' own cost is counted against the runtime.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import report
from step import SCHEDULES, Training
from workload import SMALL_2, SMALL_4, TINY, Size, pipeline

CASES = [(TINY, "1f1b"), *((size, s) for size in (SMALL_2, SMALL_4) for s in SCHEDULES)]
LIMIT_US = 25.0


class Stopwatch:
    """Adds up the time that wrapped functions take, and counts their calls."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.thread_time()
            result = f(*args)
            self.seconds += time.thread_time() - start
            self.calls += 1
            return result

        return run

    def take(self) -> tuple[float, int]:
        taken = self.seconds, self.calls
        self.seconds, self.calls = 0.0, 0
        return taken


def measure(size: Size, schedule: str, steps: int) -> report.Row:
    """Medians over ``steps`` warm steps."""
    step, args = pipeline(size, schedule)
    training = Training(step, args)
    for _ in range(2):
        jax.block_until_ready(training())
    (compiled,) = step._compiled.values()
    runs, puts = Stopwatch(), Stopwatch()
    compiled.runner.steps = tuple((p and runs.timed(p), *rest) for p, *rest in compiled.runner.steps)
    totals, own, programs, transfers, counts = [], [], [], [], set()
    original = jax.device_put
    jax.device_put = puts.timed(original)
    try:
        for _ in range(steps):
            start = time.thread_time()
            training()
            total = time.thread_time() - start
            jax.block_until_ready(training.params)
            (run_s, count), (put_s, _) = runs.take(), puts.take()
            counts.add(count)
            totals.append(total)
            programs.append(run_s)
            transfers.append(put_s)
            own.append((total - run_s - put_s) / count)
    finally:
        jax.device_put = original
    (count,) = counts
    return {
        "size": size.name,
        "pp": size.stages,
        "microbatches": size.microbatches,
        "schedule": schedule,
        "RUN": count,
        "own us per RUN": 1e6 * statistics.median(own),
        "limit": LIMIT_US,
        "total ms": 1e3 * statistics.median(totals),
        "programs ms": 1e3 * statistics.median(programs),
        "transfers ms": 1e3 * statistics.median(transfers),
    }


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=30, help="warm steps of each case (default 30)")
    args = options.parse_args()
    rows = [measure(size, schedule, args.steps) for size, schedule in CASES]
    report.show({"The runtime's own cost (thread time)": rows}, args.json)


if __name__ == "__main__":
    main()
