"""Errors of forecasts on sources that the fit has not seen, and how many of them lie inside their bands.

    python multimesh/benchmarks/loso.py [--write] [--json]

For each source the constants are fitted to all others, and its runs are forecast. ``--write`` writes the errors to
``planner/measured.csv``, which the bands of forecasts are made of. The table's bands are those that the runs of other
sources give.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import fit
import report
import rows
from multimesh.planner import bands
from multimesh.planner.bands import MeasuredStep
from multimesh.planner.step import forecast


def left_out(runs: Sequence[rows.Run], constants: fit.Values) -> list[MeasuredStep]:
    """Return all runs, each with the error of a forecast whose constants were fitted without its source."""
    found = []
    for source in dict.fromkeys(map(rows.prefix, runs)):
        print(f"without {source}", flush=True)
        values = fit.fit([run for run in runs if rows.prefix(run) != source], 3, constants)
        own = [run for run in runs if rows.prefix(run) == source]
        model = fit.Model(own)
        model.settle(values)
        for run, error in zip(own, model.errors(values), strict=True):
            step = forecast(run.model, run.how, run.device, run.stack)
            memory = math.log(step.bytes / run.memory) if run.memory else math.nan
            found.append(bands.describe(step, run.id, error, memory, run.seconds))
    return found


def inside(runs: Sequence[MeasuredStep]) -> dict[str, float]:
    """Return the width of each run's band, by its id, from the runs of other sources."""
    return {run.id: bands.width(run, [other for other in runs if other.source != run.source]) for run in runs}


GROUPS: tuple[tuple[str, Callable[[MeasuredStep], bool]], ...] = (
    ("A100, bf16", lambda run: run.kinds[1] == "ampere"),
    ("H100 and H200, bf16", lambda run: run.kinds[1] == "hopper" and run.kinds[3] == "bf16" and run.kinds[0] == "0"),
    ("H100 and H200, fp8", lambda run: run.kinds[1] == "hopper" and run.kinds[3] == "fp8" and run.kinds[0] == "0"),
    ("Blackwell, dense", lambda run: run.kinds[1].startswith("blackwell") and run.kinds[0] == "0"),
    ("experts", lambda run: run.kinds[0] == "1"),
    ("a fifth of the step or more in attention", lambda run: run.shares[0] >= 0.2 and run.kinds[0] == "0"),
    ("sharded parameters", lambda run: run.shares[4] > 0),
    ("more than 512 GPUs", lambda run: run.sizes[3] > 9),
)
"""Regimes, for the tables of docs/forecasts.md."""


def line(name: str, runs: Sequence[MeasuredStep], widths: dict[str, float]) -> report.Row:
    """Return the errors of some runs, and how many are inside their bands."""
    sizes = [100 * abs(math.expm1(run.error)) for run in runs]
    held = [abs(math.expm1(run.error)) <= widths[run.id] for run in runs]
    return {
        "rows": name,
        "number": len(runs),
        "median %": statistics.median(sizes),
        "p90 %": sorted(sizes)[math.ceil(0.9 * len(sizes)) - 1],
        "mean %": 100 * math.expm1(statistics.mean(run.error for run in runs)),
        "band, median %": 100 * statistics.median(widths[run.id] for run in runs),
        "inside %": 100 * sum(held) / len(held),
    }


def main() -> None:
    """Fit without each source, print, and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write planner/measured.csv")
    args = parser.parse_args()
    path = Path(str(resources.files("multimesh.planner").joinpath("measured.csv")))
    if args.write:
        runs, _ = rows.read(*rows.FILES)
        found: Sequence[MeasuredStep] = left_out(runs, fit.now())
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(bands.write(run) for run in found)
        path.write_text(text.getvalue(), encoding="utf-8")
    else:
        found = bands.load_runs()
    widths = inside(found)
    sources = dict.fromkeys(run.source for run in found)
    tables = {
        "By source, without it": [line(s, [run for run in found if run.source == s], widths) for s in sources],
        "By regime": [line(name, some, widths) for name, keep in GROUPS if (some := [r for r in found if keep(r)])],
        "All": [line("all", found, widths)],
    }
    report.show(tables, as_json=args.json)


if __name__ == "__main__":
    main()
