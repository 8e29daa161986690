"""Suggestions beside the fastest published run of the same model, batch, precision and devices.

    python planner/benchmarks/beside.py [--only WORD] [--json]

The search may use 92 % of a device's memory, as the recipes of vendors do.
"""

from __future__ import annotations

import report
import rows
from multimesh_planner import bands
from multimesh_planner.search import suggest
from multimesh_planner.space import Training
from multimesh_planner.step import step_time
from multimesh_planner.suggestions import describe_how

_MEMORY = 0.92
GROUPS = (
    *("dgxc-176", "dgxc-008", "dgxc-038", "dgxc-105", "nemo-012"),
    *("mb-001", "mb-010", "mb-046", "mb-007", "dgxc-017-moe"),
)
"""Ids of runs; each stands for all of its model, batch, precision and devices."""


def compare_best(run: rows.Run, runs: tuple[rows.Run, ...]) -> report.Row:
    """Return the fastest published run of a group, and what is suggested for it."""
    rivals = [
        other
        for other in runs
        if other.model == run.model and other.device == run.device and other.how.precision == run.how.precision
        if (other.how.batch, other.how.sequence, other.how.devices)
        == (run.how.batch, run.how.sequence, run.how.devices)
    ]
    best = min(rivals, key=lambda other: other.seconds)
    how, on = best.how, best.device
    training = Training(
        best.model,
        how.batch,
        how.sequence,
        on,
        fixed={"precision": how.precision},
        software=best.software,
        limit=_MEMORY * on.memory,
    )
    suggestion = suggest(training, how.devices, count=1).best
    forecast = step_time(best.model, how, on, best.software)
    after = dict(suggestion.shares)
    savings = {name: seconds - after.get(name, 0.0) for name, seconds in forecast.shares}
    reason = max(savings, key=savings.__getitem__)
    return {
        "run": best.id,
        "model": best.model.name,
        "on": f"{how.devices} {on.name}",
        "published s": best.seconds,
        "its forecast s": forecast.seconds,
        "suggested s": suggestion.seconds,
        "band %": 100 * suggestion.band,
        "published": how.shown(),
        "suggested": describe_how(suggestion.how),
        "because": f"{reason} {savings[reason]:.2g} s less" if savings[reason] > 0 else "-",
        "warns": "; ".join(bands.warnings(suggestion)) or "-",
    }


def main() -> None:
    """Search and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="", help="ids that begin so")
    args = parser.parse_args()
    runs, _ = rows.read(*rows.FILES)
    selected = [run for run in runs if run.id in GROUPS and run.id.startswith(args.only)]
    report.show({"Beside the best published": [compare_best(run, runs) for run in selected]}, as_json=args.json)


if __name__ == "__main__":
    main()
