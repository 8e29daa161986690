"""Bubble rates that Qi et al. publish for profiled costs, beside those of our simulator.

    python multimesh/benchmarks/zero_bubble.py

The source is "Zero Bubble Pipeline Parallelism", arXiv 2401.10241: profiled times of F, B, W and of a transfer, bubble
rates and measured throughput of Tables 3 to 5. Its bubble rate is ``1 - m (F + B + W) / cost``, where ``cost`` is the
longest time from a stage's first pass to its last: that of steps in a row, whose optimizer waits for nobody.
``Timeline.period`` is that cost. Of schedules whose first submesh begins first and ends last, such as 1F1B and ZB-H1,
it is the whole time. ZB-H2 is a parallelogram, and ends on the first submesh long before the last.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from multimesh.hardware.devices import device
from multimesh.hardware.kernels import move
from multimesh.planner.step import OPTIMIZER
from multimesh.schedules import Auto, StageCosts
from multimesh.schedules.simulate import simulate
from multimesh.timelines.timeline import Timeline

from multimesh import schedules

A100 = device("a100")


class Profile(NamedTuple):
    """Samples of a microbatch, and times of a stage in ms."""

    samples: int
    forward: float
    backward: float
    weights: float
    transfer: float


class Row(NamedTuple):
    """A row of the paper: ``rate`` is the bubble rate, ``throughput`` measured, in samples a second and GPU."""

    schedule: str
    model: str
    stages: int
    microbatches: int
    rate: float
    throughput: float | None


PROFILES: Mapping[tuple[str, int, int], Profile] = {
    ("1.5B", 8, 24): Profile(6, 18.522, 18.086, 9.337, 0.601),
    ("6.2B", 8, 24): Profile(3, 29.718, 29.444, 19.927, 0.527),
    ("6.2B", 8, 32): Profile(3, 29.802, 29.428, 19.53, 0.577),
    ("6.2B", 8, 64): Profile(3, 29.935, 29.621, 19.388, 0.535),
    ("14.6B", 16, 48): Profile(1, 11.347, 11.248, 8.132, 0.377),
    ("14.6B", 16, 128): Profile(1, 11.325, 11.308, 8.109, 0.378),
    ("28.3B", 32, 96): Profile(1, 10.419, 10.207, 7.715, 0.408),
    ("1.5B", 8, 32): Profile(6, 18.513, 18.086, 9.331, 0.626),
    ("1.5B", 8, 64): Profile(6, 18.546, 18.097, 9.321, 0.762),
    ("14.6B", 16, 64): Profile(1, 11.307, 11.254, 8.101, 0.379),
    ("28.3B", 32, 128): Profile(1, 10.408, 10.204, 7.703, 0.408),
    ("28.3B", 32, 256): Profile(1, 10.402, 10.248, 7.698, 0.46),
}
"""Of (model, stages, microbatches)."""

ROWS = (
    Row("ZB-2p", "1.5B", 8, 24, 0.0433, 14.5),
    Row("ZB-2p", "6.2B", 8, 24, 0.0029, 4.32),
    Row("ZB-2p", "6.2B", 8, 32, 0.0022, 4.35),
    Row("ZB-2p", "6.2B", 8, 64, 0.001, 4.39),
    Row("ZB-2p", "14.6B", 16, 48, 0.0066, 1.81),
    Row("ZB-2p", "14.6B", 16, 128, 0.0028, 1.85),
    Row("ZB-2p", "28.3B", 32, 96, 0.0038, 0.99),
    Row("ZB-1p", "1.5B", 8, 24, 0.1585, 12.9),
    Row("ZB-1p", "1.5B", 8, 32, 0.1242, 13.4),
    Row("ZB-1p", "1.5B", 8, 64, 0.0674, 14.2),
    Row("ZB-1p", "6.2B", 8, 24, 0.1323, 3.88),
    Row("ZB-1p", "6.2B", 8, 64, 0.0554, 4.2),
    Row("ZB-1p", "14.6B", 16, 48, 0.1397, 1.61),
    Row("ZB-1p", "14.6B", 16, 64, 0.1088, 1.67),
    Row("ZB-1p", "28.3B", 32, 128, 0.1106, 0.9),
    Row("ZB-1p", "28.3B", 32, 256, 0.0594, 0.96),
    Row("1F1B", "1.5B", 8, 24, 0.2431, 11.8),
    Row("1F1B", "1.5B", 8, 64, 0.124, 13.6),
    Row("1F1B", "6.2B", 8, 24, 0.2347, 3.5),
    Row("1F1B", "6.2B", 8, 32, 0.1898, 3.7),
    Row("1F1B", "6.2B", 8, 64, 0.1091, 4.03),
    Row("1F1B", "14.6B", 16, 48, 0.2552, 1.4),
    Row("1F1B", "14.6B", 16, 64, 0.2082, 1.49),
    Row("1F1B", "14.6B", 16, 128, 0.1251, 1.64),
    Row("1F1B", "28.3B", 32, 96, 0.2646, 0.76),
    Row("1F1B", "28.3B", 32, 128, 0.2168, 0.8),
    Row("1F1B-I", "1.5B", 8, 32, 0.0818, 13.4),
    Row("1F1B-I", "6.2B", 8, 24, 0.0808, 4.01),
    Row("1F1B-I", "14.6B", 16, 128, 0.0445, 1.66),
    Row("1F1B-I", "28.3B", 32, 128, 0.1164, 0.85),
    Row("ZB-H2", "6.2B", 8, 24, 0.0698, None),
)

CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Stages on each submesh where the paper interleaves: one layer each, the embedding and the head counted as layers."""

LEFT_OUT = {
    "1F1B-I": "ours waits for p transfers more than the paper's rate has: 2 (v p - 1) and not 2 (v p - 1) - p",
    "ZB-2p": "found by a search for steps in a row; ours is for one step, after which all submeshes wait for the norm",
    "ZB-V (Table 6)": "no times of its passes are published",
    "few microbatches (Table 12)": "neither bubble rates nor times of its passes are published",
    "vocabulary parallelism (arXiv 2411.05288)": "throughput and memory only; no times of passes are published",
}
"""What is not compared, and why."""


@dataclass(frozen=True)
class Found:
    """A row beside what we simulate."""

    row: Row
    timeline: Timeline
    profile: Profile

    @property
    def rate(self) -> float:
        """Bubble rate as the paper defines it."""
        return 1 - max(self.timeline.busy) / self.timeline.period

    @property
    def throughput(self) -> float:
        """Samples a second and GPU.

        What the profiled times leave out takes time too: the software that was measured keeps both ends of a transfer
        from computing, so a stage waits for two transfers in each F and two in each B, and then updates its parameters.
        """
        row, profile = self.row, self.profile
        stages = CHUNKS[row.model] if row.schedule == "1F1B-I" else 1
        blocked = 4 * profile.transfer * stages * row.microbatches
        updated = 1000 * move(A100, OPTIMIZER * 1e9 * float(row.model.removesuffix("B")) / row.stages)
        step = self.timeline.period + blocked + updated
        return 1000 * row.microbatches * profile.samples / step / row.stages


@functools.cache
def find(row: Row) -> Found:
    """Simulate a row; ZB-1p is the shortest table that ``auto`` finds in the memory of 1F1B."""
    profile = PROFILES[row.model, row.stages, row.microbatches]
    chunks = CHUNKS[row.model] if row.schedule == "1F1B-I" else 1
    number = row.stages * chunks
    times = tuple(time / chunks for time in (profile.forward, profile.backward, profile.weights))
    costs = StageCosts((times,) * number, (profile.transfer,) * (number - 1), unit="ms")
    named = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
    if row.schedule in named:
        schedule = schedules.get(named[row.schedule])
    else:
        schedule = Auto(costs, memory=float(row.stages) * int(row.schedule[3]), evaluations=4)
    table = schedule.table(row.stages, chunks, row.microbatches, backward=True)
    return Found(row, simulate(table, costs), profile)


def main() -> None:
    """Print all rows, and what is left out."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import report

    args = report.parser(__doc__).parse_args()
    shown = []
    for found in map(find, ROWS):
        row = found.row
        measured = row.throughput or float("nan")
        held = abs(found.rate - row.rate) <= 1e-3
        shown.append(
            {
                "schedule": row.schedule,
                "model": row.model,
                "p": row.stages,
                "m": row.microbatches,
                "published": f"{row.rate:.4f}",
                "simulated": f"{found.rate:.4f}",
                "one step": f"{found.timeline.bubble:.4f}",
                "measured samples/s": measured,
                "ours %": 100 * (found.throughput / measured - 1),
                "": "" if held else "not held",
            }
        )
    left = [{"left out": name, "because": reason} for name, reason in LEFT_OUT.items()]
    report.show({"Bubble rates of arXiv 2401.10241": shown, "Not held": left}, args.json)


if __name__ == "__main__":
    main()
