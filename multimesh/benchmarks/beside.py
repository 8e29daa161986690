"""Suggestions beside the fastest published run of the same model, batch, precision and devices.

    python multimesh/benchmarks/beside.py [--only WORD] [--json]

The search may use 92 % of a device's memory, as the recipes of vendors do.
"""

from __future__ import annotations

import report
import rows
from multimesh.planner.lost import describe_how
from multimesh.planner.step import forecast
from multimesh.planner.suggesting import Training, suggest

_MEMORY = 0.92
GROUPS = (
    *("dgxc-176", "dgxc-008", "dgxc-038", "dgxc-105", "nemo-012"),
    *("mb-001", "mb-010", "mb-046", "mb-007", "dgxc-017-moe"),
)
"""Ids of runs; each stands for all of its model, batch, precision and devices."""


def beside(run: rows.Run, runs: tuple[rows.Run, ...]) -> report.Row:
    """Return the fastest published run of a group, and what is suggested for it."""
    same = [
        other
        for other in runs
        if other.model == run.model and other.device == run.device and other.how.precision == run.how.precision
        if (other.how.batch, other.how.sequence, other.how.devices)
        == (run.how.batch, run.how.sequence, run.how.devices)
    ]
    best = min(same, key=lambda other: other.seconds)
    how, on = best.how, best.device
    training = Training(
        best.model,
        how.batch,
        how.sequence,
        on,
        fixed={"precision": how.precision, "narrow": how.narrow},
        software=best.stack,
        limit=_MEMORY * on.memory,
    )
    found = suggest(training, how.devices, count=1)
    return {
        "run": best.id,
        "model": best.model.name,
        "on": f"{how.devices} {on.name}",
        "published s": best.seconds,
        "its forecast s": forecast(best.model, how, on, best.stack).seconds,
        "suggested s": found.best.seconds,
        "band %": 100 * (found.best.band or 0.0),
        "published": how.shown(),
        "suggested": describe_how(found.best.how),
    }


def main() -> None:
    """Search and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="", help="ids that begin so")
    args = parser.parse_args()
    runs, _ = rows.read(*rows.FILES)
    wanted = [run for run in runs if run.id in GROUPS and run.id.startswith(args.only)]
    report.show({"Beside the best published": [beside(run, runs) for run in wanted]}, as_json=args.json)


if __name__ == "__main__":
    main()
