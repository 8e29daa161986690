"""Live bytes of a step on every stage, beyond parameters and batch: gpipe against 1f1b, 4 stages, 16 microbatches.

Measured from the live arrays, at the calls that the running step makes.
"""

from __future__ import annotations

import dataclasses

import jax
import report
from measure import peak_bytes
from step import SCHEDULES, Training
from workload import SMALL_4, pipeline

LIMIT = 0.45
SIZE = dataclasses.replace(SMALL_4, microbatches=16, rows=16)


def measure(schedule: str) -> list[float]:
    """Peak MB of each stage (sum over its devices)."""
    step, args = pipeline(SIZE, schedule)
    training = Training(step, args)
    jax.block_until_ready(training())
    peak = peak_bytes(lambda: jax.block_until_ready(training()))
    return [sum(peak[d] for d in stage.flat) / 1e6 for stage in SIZE.grid()]


def main() -> None:
    args = report.parser(__doc__).parse_args()
    peaks = {schedule: measure(schedule) for schedule in SCHEDULES}
    rows = [
        {"schedule": name} | {f"stage {s} MB": mb for s, mb in enumerate(peak)} | {"ratio": peak[0] / peaks["gpipe"][0]}
        for name, peak in peaks.items()
    ]
    report.show({f"Peak live bytes (limit {LIMIT} x gpipe)": rows}, args.json)


if __name__ == "__main__":
    main()
