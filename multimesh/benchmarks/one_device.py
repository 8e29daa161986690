"""Time of a pipeline's step against plain `jax.jit` on one device.

The pipeline has four submeshes of one device each. Plain `jax.jit` runs the same step on one device: over the whole
batch at once, and over the same microbatches. Programs alternate.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import report
from step import Training, seconds
from workload import Size, pipeline, spmd

FOUR = Size("small", width=64, sequence=32, stages=4, tensor=1, devices=4)
SIZES = (
    dataclasses.replace(FOUR, name="tiny", width=8, sequence=4),
    dataclasses.replace(FOUR, name="narrow", width=16, sequence=16),
    FOUR,
    dataclasses.replace(FOUR, name="wide", width=256),
)


def rows(size: Size, count: int) -> Iterator[dict[str, Any]]:
    """Yield medians of CPU time and of elapsed time, in ms and relative to the whole batch at once on one device."""
    single = dataclasses.replace(size, stages=1, devices=1)
    whole = dataclasses.replace(single, microbatches=1, rows=size.rows * size.microbatches)
    programs = {
        "jax.jit, the whole batch": Training(*spmd(whole)),
        "jax.jit, microbatches": Training(*spmd(single)),
        "pipeline, 1f1b": Training(*pipeline(size, "1f1b")),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for turn in range(count + 3):
        for name, program in programs.items():
            start = time.perf_counter()
            spent = seconds(program)
            if turn >= 3:
                times[name].append((1e3 * spent, 1e3 * (time.perf_counter() - start)))
    base: tuple[float, ...] = ()
    for name, pairs in times.items():
        middle = tuple(map(statistics.median, zip(*pairs, strict=True)))
        base = base or middle
        case = {"size": size.name, "d": size.width, "program": name}
        yield case | {"CPU ms": middle[0], "x": middle[0] / base[0], "ms": middle[1], "x elapsed": middle[1] / base[1]}


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=20, help="steps of each program (default 20)")
    args = options.parse_args()
    report.show({"A step, x one device": [row for size in SIZES for row in rows(size, args.steps)]}, args.json)


if __name__ == "__main__":
    main()
