"""CPU time of a training step and of its first call: MultiMesh against one SPMD program over the same devices.

Ratios of CPU time travel between machines; wall times of virtual CPU devices do not. The two programs alternate,
so that what else the machine does falls on both.

``--than OLD.json`` compares with what ``--json`` printed on another JAX, on the same machine: rows go up and down by a
tenth, so their median decides. Exit code 1: it rose by more than 10 %.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import report
from workload import SMALL_2, SMALL_4, TINY, Size, pipeline, spmd

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "wavefront")
CASES = [
    (TINY, "1f1b"),
    *((size, schedule) for size in (SMALL_2, SMALL_4) for schedule in SCHEDULES),
    *((dataclasses.replace(size, chunks=2), "interleaved") for size in (SMALL_2, SMALL_4)),
]
LIMITS = {"tiny": 0.5, "small": 0.8}
FIRST_CALL_LIMIT = 1.3
STEPS = "CPU time of a step"
MOST = 1.1  # of the ratio on another JAX


def seconds(f: Callable[[], Any]) -> float:
    """CPU time of all threads of this process until the result is there."""
    start = time.process_time()
    jax.block_until_ready(f())
    return time.process_time() - start


class Training:
    """A step with the state that it carries."""

    def __init__(self, step: Any, args: tuple[Any, Any, Any]) -> None:
        self.step = step
        self.params, self.state, self.batch = args
        self.loss: Any = None

    def __call__(self) -> Any:
        self.params, self.state, self.loss = self.step(self.params, self.state, self.batch)
        return self.params, self.state, self.loss


def first_calls(size: Size, schedule: str, repeats: int) -> tuple[float, float]:
    """Trace, partition, compile and run, with every cache of JAX empty: median CPU seconds of (SPMD, MultiMesh)."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for make, out in zip((lambda: spmd(size), lambda: pipeline(size, schedule)), times, strict=True):
            training = Training(*make())
            jax.clear_caches()
            out.append(seconds(training))
    return statistics.median(times[0]), statistics.median(times[1])


def steps(size: Size, schedule: str, count: int) -> tuple[float, float, float, float]:
    """Median CPU seconds a step of (SPMD, MultiMesh), and their losses after the same number of steps."""
    one, many = Training(*spmd(size)), Training(*pipeline(size, schedule))
    for _ in range(3):
        one()
        many()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        times[0].append(seconds(one))
        times[1].append(seconds(many))
    return statistics.median(times[0]), statistics.median(times[1]), float(one.loss), float(many.loss)


def compare(old: dict[str, Any], rows: Sequence[report.Row], version: str) -> tuple[bool, str]:
    """Return whether our steps are slower than those of an older run, by the median of the rows, and a line of it."""
    pairs = zip(old["tables"][STEPS], rows, strict=True)
    change = statistics.median(new["ratio"] / before["ratio"] for before, new in pairs)
    text = f"on jax {version} the ratio is {change:.2f} of that on jax {old['jax']}, by the median of {len(rows)} rows"
    if change > MOST:
        return True, f"error: {text}, above {MOST}: see docs/performance.md, Each kernel's own choice"
    return False, text


def main() -> int:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=20, help="steps of each program (default 20)")
    options.add_argument("--repeats", type=int, default=3, help="first calls of each program (default 3; 0 for none)")
    options.add_argument("--than", type=Path, metavar="OLD.json", help="a run on another JAX to compare with")
    args = options.parse_args()
    step_rows, first_rows = [], []
    for size, schedule in CASES:
        case = {"size": size.name, "d": size.width, "pp": size.stages, "schedule": schedule}
        spmd_s, mm_s, spmd_loss, mm_loss = steps(size, schedule, args.steps)
        ratio = mm_s / spmd_s
        step_rows.append(
            case
            | {"SPMD ms": 1e3 * spmd_s, "MultiMesh ms": 1e3 * mm_s, "ratio": ratio, "limit": LIMITS[size.name]}
            | {"loss difference": abs(mm_loss - spmd_loss) / spmd_loss}
        )
        if args.repeats:
            spmd_s, mm_s = first_calls(size, schedule, args.repeats)
            first_rows.append(
                case | {"SPMD s": spmd_s, "MultiMesh s": mm_s, "ratio": mm_s / spmd_s, "limit": FIRST_CALL_LIMIT}
            )
    report.show({STEPS: step_rows, "CPU time of the first call": first_rows}, args.json)
    if not args.than:
        return 0
    slower, text = compare(json.loads(args.than.read_text(encoding="utf-8")), step_rows, jax.__version__)
    print(text, file=sys.stderr)
    return int(slower)


if __name__ == "__main__":
    raise SystemExit(main())
