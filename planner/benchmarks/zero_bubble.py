"""Bubble rates that Qi et al. publish for profiled costs, beside those of our simulator.

    python planner/benchmarks/zero_bubble.py

The source is "Zero Bubble Pipeline Parallelism", arXiv 2401.10241: profiled times of F, B, W and of a transfer, bubble
rates and measured throughput of Tables 3 to 5, as in ``runs/schedules.csv``. Its bubble rate is
``1 - m (F + B + W) / cost``, where ``cost`` is the longest time from a stage's first pass to its last, which is
``Timeline.period``: that of steps in a row, whose optimizer waits for nobody. Of schedules whose first submesh begins
first and ends last, such as 1F1B and ZB-H1, it is the whole time. ZB-H2 is a parallelogram, and ends on the first
submesh long before the last.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass

import report
import rows
from multimesh.observe.timelines.timeline import Timeline
from multimesh.schedules import Auto, StageCosts
from multimesh.schedules.simulate import simulate
from multimesh_planner.hardware.devices import device
from multimesh_planner.hardware.kernels import move

from multimesh import schedules

OPTIMIZER = 30.0
"""Bytes of a parameter in Adam: it reads four numbers of float32, and writes three and one of bfloat16."""

CHUNKS = {"gpt-1.5b": 3, "gpt-6.2b": 4, "gpt-14.6b": 3, "gpt-28.3b": 2}
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
class Row:
    """A row of the paper; times are of a stage, in ms, and the throughput in samples a second and GPU."""

    schedule: str
    model: str
    stages: int
    microbatches: int
    samples: int  # of a microbatch
    times: tuple[float, float, float]
    transfer: float
    rate: float
    throughput: float | None

    @property
    def chunks(self) -> int:
        """Stages on each submesh."""
        return CHUNKS[self.model] if self.schedule == "1F1B-I" else 1


def read() -> list[Row]:
    """Return the rows that have times of passes and a rate."""
    with (rows.RUNS / "schedules.csv").open(encoding="utf-8", newline="") as text:
        return [
            Row(
                *(row["schedule"], row["model"], int(row["pp"]), int(row["microbatches"]), int(row["mbs"])),
                *((float(row["t_f_ms"]), float(row["t_b_ms"]), float(row["t_w_ms"])), float(row["t_comm_ms"])),
                *(float(row["bubble_rate_theory"]), float(row["samples_per_s_per_gpu"] or 0) or None),
            )
            for row in csv.DictReader(text)
            if row["t_f_ms"] and row["bubble_rate_theory"]
        ]


ROWS = read()


@functools.cache
def run(row: Row) -> Timeline:
    """Simulate a row; ZB-1p is the shortest table that ``auto`` finds in the memory of 1F1B."""
    f, b, w = (time / row.chunks for time in row.times)
    number = row.stages * row.chunks
    costs = StageCosts(((f, b, w),) * number, (row.transfer,) * (number - 1), unit="ms")
    names = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
    if row.schedule in names:
        schedule = schedules.get(names[row.schedule])
    else:
        schedule = Auto(costs, memory=float(row.stages) * int(row.schedule[3]))
    return simulate(schedule.table(row.stages, row.chunks, row.microbatches, backward=True), costs)


def bubble_rate(row: Row, saved: float = 0.0) -> float:
    """Return the bubble rate as the paper defines it, of a period that is shorter by so many ms."""
    timeline = run(row)
    return 1 - max(timeline.busy) / (timeline.period - saved)


def throughput(row: Row) -> float:
    """Return samples a second and GPU.

    What the profiled times leave out takes time too: the software that was measured keeps both ends of a transfer from
    computing, so a stage waits for two transfers in each F and two in each B, and then updates its parameters.
    """
    blocked = 4 * row.transfer * row.chunks * row.microbatches
    parameters = 1e9 * float(row.model.strip("gptb-"))
    updated = 1000 * move(device("a100"), OPTIMIZER * parameters / row.stages)
    return 1000 * row.microbatches * row.samples / (run(row).period + blocked + updated) / row.stages


def main() -> None:
    """Print all rows, and what is left out."""
    args = report.parser(__doc__).parse_args()
    bubbles = [
        {
            "schedule": row.schedule,
            "model": row.model,
            "p": row.stages,
            "m": row.microbatches,
            "published": f"{row.rate:.4f}",
            "simulated": f"{bubble_rate(row):.4f}",
            "one step": f"{run(row).bubble:.4f}",
            "measured samples/s": row.throughput or "-",
            "ours %": 100 * (throughput(row) / row.throughput - 1) if row.throughput else "-",
            "": "" if abs(bubble_rate(row) - row.rate) <= 1e-3 else "not held",
        }
        for row in ROWS
    ]
    excluded = [{"left out": name, "because": reason} for name, reason in LEFT_OUT.items()]
    report.show({"Bubble rates of arXiv 2401.10241": bubbles, "Not held": excluded}, args.json)


if __name__ == "__main__":
    main()
