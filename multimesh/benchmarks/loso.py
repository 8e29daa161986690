"""Errors of forecasts on sources that the fit has not seen, and how many of them lie inside their bands.

    python multimesh/benchmarks/loso.py [--write] [--json]

For each source the constants are fitted to all others, and its runs are forecast. ``--write`` writes the errors to
``planner/measured.csv``, which the bands of forecasts are made of. The bands of the tables are those that the runs of
other sources give, by a rule that was chosen on these other sources alone. The last table has the bands after one run
of the same source, by pairs of runs of others.
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
from multimesh.planner import bands, traffic
from multimesh.planner.bands import MeasuredStep
from multimesh.planner.step import forecast

_AIM = 0.85  # share of the runs of each source that a rule is to have inside
# Rules to choose from.
_INSIDE = (0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96)
_GROWTH = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
_PAIRS = 60  # of a source, at most


def left_out(runs: Sequence[rows.Run], constants: fit.Values) -> list[MeasuredStep]:
    """Return all runs, each with the error of a forecast whose constants were fitted without its source."""
    found = []
    for source in dict.fromkeys(map(rows.prefix, runs)):
        print(f"without {source}", flush=True)
        values = fit.fit([run for run in runs if rows.prefix(run) != source], 3, constants)
        own = [run for run in runs if rows.prefix(run) == source]
        model = fit.Model(own)
        model.settle(values)
        unseen = [model.errors(fit.forgotten(values, run.stack.name), [number])[0] for number, run in enumerate(own)]
        for run, error, other in zip(own, model.errors(values), unseen, strict=True):
            step = forecast(run.model, run.how, run.device, run.stack)
            memory = math.log(run.held(step.memory) / run.memory) if run.memory else math.nan
            found.append(bands.describe(step, run.id, error, memory, run.seconds, other))
    return found


class Distances:
    """Bands of runs from other runs, which are compared once."""

    def __init__(self, runs: Sequence[MeasuredStep]) -> None:
        self.of = {run.id: {other.id: bands.distance(run, other) for other in runs} for run in runs}

    def compare(self, own: MeasuredStep, runs: Sequence[MeasuredStep]) -> bands.Similar:
        """Return the errors of the runs that are of other sources than ``own``."""
        others = [run for run in runs if run.source != own.source]
        far = self.of[own.id]
        return bands.compare(own, others, far=[far[run.id] for run in others])


def choose(runs: Sequence[MeasuredStep], distances: Distances) -> bands.Rule:
    """Return the rule with the narrowest usual band of which no source has less than ``_AIM`` of its runs inside.

    Each source has the bands that the others give. If no rule reaches the aim, it is the one that is nearest to it.
    """
    similar = [distances.compare(run, runs) for run in runs]
    sizes = [abs(math.expm1(run.error)) for run in runs]
    ranked = []
    for share in _INSIDE:
        errors = [each.error(share) for each in similar]
        for growth in _GROWTH:
            widths = [each.widen(error, growth) for each, error in zip(similar, errors, strict=True)]
            held: dict[str, list[bool]] = {}
            for run, size, width in zip(runs, sizes, widths, strict=True):
                held.setdefault(run.source, []).append(size <= width)
            worst = min(map(statistics.mean, held.values()))
            ranked.append((-min(_AIM, worst), statistics.median(widths), statistics.mean(widths), share, growth))
    return bands.Rule(*min(ranked)[3:])


def inside(runs: Sequence[MeasuredStep], distances: Distances) -> tuple[dict[str, bands.Rule], dict[str, float]]:
    """Return the rule that all other sources choose, by source, and the width of each run's band, by its id."""
    rules, widths = {}, {}
    for source in dict.fromkeys(run.source for run in runs):
        rule = rules[source] = choose([run for run in runs if run.source != source], distances)
        for run in runs:
            if run.source == source:
                similar = distances.compare(run, runs)
                widths[run.id] = similar.widen(similar.error(rule.inside), rule.growth)
    return rules, widths


def after_a_run(source: str, runs: tuple[MeasuredStep, ...], *, near: bool) -> report.Row | None:
    """Return how far runs of a source are off once the error of another is taken off, and how many bands hold."""
    pairs = bands.pair_runs(runs)
    own = [p for p in pairs if p.one.source == source and (p.distance <= bands.LIKE) == near]
    if not own:
        return None
    others, runs_of_others = [p for p in pairs if p.one.source != source], [r for r in runs if r.source != source]
    found = []
    for pair in own[:: 1 + len(own) // _PAIRS]:
        plain = bands.width(pair.one, runs_of_others)
        found.append((pair.error, plain, bands.change_width(plain, pair.one, pair.distance, others)))
    return {
        "rows": source,
        "the other run": "near" if near else "far",
        "pairs": len(found),
        "median %": 100 * statistics.median(error for error, _, _ in found),
        "band before, median %": 100 * statistics.median(plain for _, plain, _ in found),
        "band after": 100 * statistics.median(width for _, _, width in found),
        "inside %": 100 * statistics.mean(error <= width for error, _, width in found),
    }


GROUPS: tuple[tuple[str, Callable[[MeasuredStep], bool]], ...] = (
    ("A100, bf16", lambda run: run.kinds[1] == "ampere"),
    ("H100 and H200, bf16", lambda run: run.kinds[1] == "hopper" and run.kinds[3] == "bf16" and run.kinds[0] == "0"),
    ("H100 and H200, fp8", lambda run: run.kinds[1] == "hopper" and run.kinds[3] == "fp8" and run.kinds[0] == "0"),
    ("Blackwell, dense", lambda run: run.kinds[1].startswith("blackwell") and run.kinds[0] == "0"),
    ("TPUs", lambda run: run.kinds[1] == "tpu" and run.kinds[0] == "0"),
    ("experts", lambda run: run.kinds[0] == "1"),
    ("a fifth of the step or more in attention", lambda run: run.shares[0] >= 0.2 and run.kinds[0] == "0"),
    ("sharded parameters", lambda run: run.shares[4] > 0),
    ("more than 512 GPUs", lambda run: run.sizes[3] > 9),
)
"""Regimes, for the tables of docs/forecasts.md."""

WAYS: tuple[tuple[str, Callable[[rows.Run], bool]], ...] = (
    ("context parallelism", lambda run: run.how.cp > 1),
    ("FSDP, microbatches of at most 4,096 tokens", lambda run: traffic.shards(run.how) > 1 and run.how.tokens <= 4096),
    ("sequences of 16,384 tokens or more", lambda run: run.how.sequence >= 16384),
    ("512 replicas or more", lambda run: run.how.replicas >= 512),
    ("tensor parallelism of 8 or more", lambda run: run.how.tp >= 8),
    ("width of 12,288 or more", lambda run: run.model.hidden >= 12288),
    ("full recomputation", lambda run: run.how.recompute == "full"),
    ("pipelines with several stages on a submesh", lambda run: run.how.interleave > 1),
)
"""Ways to spread a model whose forecasts were once far off, for the same page."""


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
    runs, _ = rows.read(*rows.FILES)
    if args.write:
        found: Sequence[MeasuredStep] = left_out(runs, fit.now())
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(bands.write(run) for run in found)
        path.write_text(text.getvalue(), encoding="utf-8")
    else:
        found = bands.load_runs()
    distances = Distances(found)
    rules, widths = inside(found, distances)
    chosen = choose(found, distances)
    if chosen != bands.RULE:
        print(f"all sources choose {chosen}, and planner/bands.py has {bands.RULE}")
    tables = {
        "By source, without it": [
            {**line(s, [run for run in found if run.source == s], widths), "rule": f"{rule.inside:g}, {rule.growth:g}"}
            for s, rule in rules.items()
        ],
        "By regime": [line(name, some, widths) for name, keep in GROUPS if (some := [r for r in found if keep(r)])],
        "By the way that models are spread": [
            line(name, [error for error in found if error.id in some], widths)
            for name, keep in WAYS
            if (some := {run.id for run in runs if keep(run) and not run.model.experts})
        ],
        "All": [line("all", found, widths)],
        "After a run of the same source": [
            row for near in (True, False) for s in rules if (row := after_a_run(s, tuple(found), near=near))
        ],
    }
    report.show(tables, as_json=args.json)


if __name__ == "__main__":
    main()
