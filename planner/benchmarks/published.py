"""Forecasts of published runs beside what was measured, and how they rank the ways to run a model.

    python planner/benchmarks/published.py [--runs FILE] [--json]

``--runs`` takes CSV files of the columns of ``runs/dense.csv``; by default all of ``runs`` are read. Rows that do not
state what a forecast needs are counted by the reason. The errors of sources that no constant was fitted to are those of
``held_out.py``.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import report
import rows
from multimesh_planner.bands import band, memory_band
from multimesh_planner.step import step_time


def describe(run: rows.Run) -> report.Row:
    """Return a run and its forecast."""
    step = step_time(run.model, run.how, run.device, run.software)
    return {
        "id": run.id,
        "model": run.model.name,
        "device": run.device.name,
        "software": run.software.name,
        "how": run.how.shown(),
        "measured_s": run.seconds,
        "forecast_s": step.seconds,
        "error_pct": 100 * (step.seconds / run.seconds - 1),
        "band": band(step),
        "measured_gb": run.memory / 1e9 or None,
        "forecast_gb": run.fullest(step.memory) / 1e9,
        "memory_band": memory_band(step),
        "bound": step.bound,
    }


def forecast_seconds(run: rows.Run) -> float:
    """Return the seconds of a forecast."""
    return step_time(run.model, run.how, run.device, run.software).seconds


@dataclass(frozen=True)
class Ranking:
    """The order in which forecasts rank runs of one model on as many devices."""

    name: str
    number: int
    spearman: float
    behind: float  # of the run that the forecast calls best, to the best measured


def rank(name: str, runs: Sequence[rows.Run], seconds: Callable[[rows.Run], float]) -> Ranking:
    """Rank runs by seconds a token, measured and by forecast."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(number)) for number in range(len(values))]

    tokens = [run.how.batch * run.how.sequence for run in runs]
    measured = [run.seconds / t for run, t in zip(runs, tokens, strict=True)]
    expected = [seconds(run) / t for run, t in zip(runs, tokens, strict=True)]
    spearman = statistics.correlation(ranks(measured), ranks(expected)) if len(runs) > 2 else 1.0
    chosen = min(range(len(runs)), key=expected.__getitem__)
    return Ranking(name, len(runs), spearman, measured[chosen] / min(measured) - 1)


def rankings(runs: Iterable[rows.Run], seconds: Callable[[rows.Run], float]) -> list[Ranking]:
    """Rank the runs of each model of a source that ran in at least five ways on as many devices."""
    groups: dict[tuple[object, ...], list[rows.Run]] = collections.defaultdict(list)
    for run in runs:
        groups[rows.prefix(run), run.model, run.how.devices, run.device, run.how.precision].append(run)
    several = [group for group in groups.values() if len({run.how for run in group}) >= 5]
    return [
        rank(f"{rows.prefix(run)}, {run.model.name}, {run.how.devices} {run.device.name}", group, seconds)
        for group in several
        for run in group[:1]
    ]


def main() -> None:
    """Forecast, and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=Path, nargs="+", default=rows.FILES, help="CSV files")
    args = parser.parse_args()
    runs, others = rows.read(*args.runs)
    table = [describe(run) for run in runs]
    if args.json:
        print(json.dumps({"runs": table, "left_out": others}, indent=2))
        return
    reasons = collections.Counter(others.values()).most_common()
    tables = {
        "Runs": table,
        "Ranking": [vars(ranking) for ranking in rankings(runs, forecast_seconds)],
        "Left out": [{"because": reason, "rows": number} for reason, number in reasons],
    }
    report.show({title: rows_ for title, rows_ in tables.items() if rows_}, as_json=False)


if __name__ == "__main__":
    main()
