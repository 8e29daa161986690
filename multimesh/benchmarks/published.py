"""Forecasts of published runs beside what was measured.

    python multimesh/benchmarks/published.py [--runs FILE] [--json] [--picture FILE.svg] [--rows]

``--runs`` takes CSV files of the columns of ``runs/dense.csv``; by default all of ``runs`` are read. Rows that do not
state what a forecast needs are listed with the reason. Tables give errors by source and device, and how forecasts rank
runs of one model on one cluster.
"""

from __future__ import annotations

import collections
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import report
import rows
from multimesh.errors import UsageError
from multimesh.planner.bands import band, memory_band, nearest
from multimesh.planner.step import Step, forecast
from scatter import scatter


@dataclass(frozen=True)
class Compared:
    """A run and its forecast."""

    run: rows.Run
    step: Step

    @property
    def error(self) -> float:
        """Logarithm of forecast over measured seconds."""
        return math.log(self.step.seconds / self.run.seconds)

    @property
    def memory_error(self) -> float | None:
        """The same of bytes, where they are published."""
        return math.log(self.run.held(self.step.memory) / self.run.memory) if self.run.memory else None

    @property
    def aimed_at(self) -> bool:
        """Whether the goals count the run: it has a pipeline or tensor parallelism, and no eager software ran it."""
        return (self.run.how.pp > 1 or self.run.how.tp > 1) and self.run.stack.name not in ("eager", "nanotron")

    @property
    def dense(self) -> bool:
        """Whether the model has no experts."""
        return not self.run.model.experts

    def to_json(self) -> dict[str, object]:
        """Forecast and measured, as data."""
        return {
            "id": self.run.id,
            "source": rows.prefix(self.run),
            "device": self.run.device.name,
            "stack": self.run.stack.name,
            "forecast_s": self.step.seconds,
            "measured_s": self.run.seconds,
            "band": band(self.step),
            "memory_band": memory_band(self.step),
            "nearest": str(nearest(self.step)),
            "forecast_gb": self.run.held(self.step.memory) / 1e9,
            "measured_gb": self.run.memory / 1e9 or None,
            "utilization": self.step.utilization,
            "bubble": self.step.bubble,
            "bound": self.step.bound,
        }


def compare(runs: Iterable[rows.Run], others: dict[str, str] | None = None) -> tuple[Compared, ...]:
    """Forecast every run. Those without a forecast go into ``others``, with the reason."""
    found = []
    for run in runs:
        try:
            found.append(Compared(run, forecast(run.model, run.how, run.device, run.stack)))
        except UsageError as error:
            if others is None:
                raise
            others[run.id] = str(error)
    return tuple(found)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below this share of the others."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def errors(name: str, found: Sequence[Compared]) -> report.Row:
    """Errors of some runs in percent, of forecast over measured."""
    sizes = [100 * abs(math.expm1(each.error)) for each in found]
    memory = [100 * abs(math.expm1(e)) for each in found if (e := each.memory_error) is not None]
    return {
        "rows": name,
        "number": len(found),
        "median %": statistics.median(sizes),
        "p90 %": percentile(sizes, 0.9),
        "mean %": 100 * math.expm1(statistics.mean(each.error for each in found)),
        "inside its band %": 100 * statistics.mean(abs(math.expm1(each.error)) <= band(each.step) for each in found),
        "memory, median %": f"{statistics.median(memory):.1f} of {len(memory)}" if memory else "-",
    }


GOALS: tuple[tuple[str, Callable[[Compared], bool], float, float], ...] = (
    ("h100, tp or pp", lambda c: c.run.device.name == "h100" and c.aimed_at and c.dense, 5.0, 12.0),
    ("a100, tp or pp", lambda c: c.run.device.name == "a100" and c.aimed_at, 5.0, 16.0),
    ("h100 and a100, tp or pp", lambda c: c.run.device.name in ("h100", "a100") and c.aimed_at, 5.0, 12.0),
    ("b200, gb200, gb300", lambda c: c.run.device.name in ("b200", "gb200", "gb300") and c.dense, 6.0, 10.0),
    ("long context on a100", lambda c: c.run.how.sequence >= 16384 and c.run.device.name == "a100", 10.0, 16.0),
    ("h200", lambda c: c.run.device.name == "h200", 5.0, 12.0),
    ("experts", lambda c: bool(c.run.model.experts), 8.0, 20.0),
    ("tpus", lambda c: c.run.device.name.startswith("tpu") and c.dense, 7.0, 16.0),
)
"""Groups of runs with the largest median and 90th percentile of errors in percent that CI allows."""


@dataclass(frozen=True)
class Ranking:
    """How forecasts rank runs of one model on as many devices."""

    name: str
    number: int
    spearman: float
    behind: float  # of the run that the forecast calls best, to the best measured


def ranking(name: str, found: Sequence[Compared]) -> Ranking:
    """Rank runs by tokens a second, measured and by forecast."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        place = [0.0] * len(values)
        for number, index in enumerate(order):
            place[index] = float(number)
        return place

    tokens = [each.run.how.batch * each.run.how.sequence for each in found]
    measured = [each.run.seconds / t for each, t in zip(found, tokens, strict=True)]
    expected = [each.step.seconds / t for each, t in zip(found, tokens, strict=True)]
    one, other = ranks(measured), ranks(expected)
    spearman = statistics.correlation(one, other) if len(found) > 2 else 1.0
    chosen = min(range(len(found)), key=expected.__getitem__)
    return Ranking(name, len(found), spearman, measured[chosen] / min(measured) - 1)


def main() -> None:
    """Compare, and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=Path, nargs="+", default=rows.FILES, help="CSV files")
    parser.add_argument("--picture", type=Path, help="write forecasts against measurements as an SVG file")
    parser.add_argument("--rows", action="store_true", help="print every run")
    args = parser.parse_args()
    runs, others = rows.read(*args.runs)
    found = compare(runs, others)
    if args.picture:
        args.picture.write_text(scatter([(rows.prefix(c.run), c.run.seconds, c.step.seconds) for c in found]))
    if args.json:
        print(json.dumps({"runs": [each.to_json() for each in found], "left_out": others}, indent=2))
        return
    by: dict[str, list[Compared]] = collections.defaultdict(list)
    for each in found:
        by[f"{rows.prefix(each.run)}, {each.run.device.name}"].append(each)
    tables: dict[str, Sequence[report.Row]] = {
        "By source and device": [errors(name, group) for name, group in by.items()],
        "Goals": [errors(name, group) for name, keep, _, _ in GOALS if (group := [c for c in found if keep(c)])],
        "Ranking": [vars(each) for each in rankings(found)],
        "Left out": [
            {"because": reason, "rows": number} for reason, number in collections.Counter(others.values()).most_common()
        ],
    }
    if args.rows:
        tables["Runs"] = [
            {
                "id": each.run.id,
                "model": each.run.model.name,
                "how": each.run.how.shown(),
                "measured s": each.run.seconds,
                "forecast s": each.step.seconds,
                "error %": 100 * math.expm1(each.error),
                "bound": each.step.bound,
            }
            for each in found
        ]
    report.show({title: table for title, table in tables.items() if table}, as_json=False)


def rankings(found: Sequence[Compared]) -> list[Ranking]:
    """Of each model that ran in at least five ways on as many devices."""
    groups: dict[str, list[Compared]] = collections.defaultdict(list)
    for each in found:
        prefix, devices = rows.prefix(each.run), each.run.how.devices
        name = f"{prefix}, {each.run.model.name}, {devices} {each.run.device.name}, {each.run.how.precision}"
        groups[name].append(each)
    return [ranking(name, group) for name, group in groups.items() if len({c.run.how for c in group}) >= 5]


if __name__ == "__main__":
    main()
