"""Errors of forecasts on sources that no constant was fitted to, and how many lie inside their bands as printed.

    python planner/benchmarks/held_out.py [--write] [--json]

For each source the constants are fitted to all others, and its runs are forecast; those that the fit uses in no case
(before fused attention, on TPUs, on AMD's devices) have the constants of the package. A run counts as inside if its
measured seconds are within ``forecast x (1 +- band)``. For the tables each source has bands that the others give alone.
``--write`` writes the bands and the fastest published runs into the package, and ``runs/held_out.json``: the errors,
and the figures that README quotes.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import fit
import report
import rows
from multimesh_planner import bands
from multimesh_planner.bands import Key
from multimesh_planner.step import Step, step_time

HELD_OUT = rows.RUNS / "held_out.json"
_INSIDE = 0.92  # share of the errors of a set of runs that its band has inside
_FEW = 2.0  # over the sources of a set: how much wider a band is, as Student's is for few samples
_SOURCES = {0: 3, 1: 2, 2: 1}  # that a set needs, by the stars of its key; else it has the band of a wider one
_LONG = 16384  # tokens of a sequence from which on it is long
_NEAR = 400  # pairs of runs of a source at most, for the band after a run of the user's own
Bands = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class HeldOut:
    """A run, its step, and the logarithms of forecast over measured seconds and bytes."""

    run: rows.Run
    step: Step
    error: float
    memory: float | None

    @property
    def source(self) -> str:
        """The beginning of the id."""
        return rows.prefix(self.run)


def leave_out(runs: Sequence[rows.Run]) -> list[HeldOut]:
    """Return all runs, each with the error of a forecast whose constants were fitted without its source."""
    start, result = fit.now(), []
    of = fit.fit_without([run for run in runs if fit.is_used(run)], start)
    for source in dict.fromkeys(map(rows.prefix, runs)):
        values = of.get(source, start)
        for run in (run for run in runs if rows.prefix(run) == source):
            on, software = fit.replace(run, values) if fit.is_used(run) else (run.device, run.software)
            step = step_time(run.model, run.how, on, software)
            memory = math.log(run.fullest(step.memory) / run.memory) if run.memory else None
            result.append(HeldOut(run, step, math.log(step.seconds / run.seconds), memory))
    return result


def off(error: float) -> float:
    """Return ``|measured / forecast - 1|``, which a band must exceed, of the logarithm of forecast over measured."""
    return abs(math.expm1(-error))


def percentile(errors: Mapping[str, list[float]], share: float) -> float:
    """Return the error that a share of runs is below. ``errors`` are those of each source, which weigh as roots."""
    weighed = sorted((error, 1 / math.sqrt(len(of))) for of in errors.values() for error in of)
    totals = list(itertools.accumulate(weight for _, weight in weighed))
    return next(error for (error, _), total in zip(weighed, totals, strict=True) if total >= share * totals[-1])


def make_bands(runs: Iterable[HeldOut]) -> tuple[Bands, list[Sequence[object]]]:
    """Return the bands that the errors of some runs give, and their rows."""
    table: Bands = {}
    lines: list[Sequence[object]] = []
    runs = list(runs)
    for of, errors in (
        ("seconds", [(r.source, bands.classify(r.step), off(r.error)) for r in runs]),
        ("memory", [(r.source, bands.classify(r.step, "memory"), off(r.memory)) for r in runs if r.memory is not None]),
        ("run", list(_pairs(runs))),
    ):
        sets: dict[Key, dict[str, list[float]]] = {}
        for source, key, error in errors:
            for wider in (key,) if of == "memory" else bands.generalize(key):
                sets.setdefault(wider, {}).setdefault(source, []).append(error)
        for key, errors_of in sorted(sets.items(), key=lambda item: -item[0].count("*")):
            if len(errors_of) >= _SOURCES[key.count("*")] or of == "memory":
                few = 1.0 if of == "memory" else 1 + _FEW / len(errors_of)
                value = percentile(errors_of, _INSIDE) * few
                table[of, *key] = math.ceil(100 * value) / 100
                lines.append((of, *key, len(errors_of), sum(map(len, errors_of.values())), table[of, *key]))
    return table, lines


def _pairs(runs: Sequence[HeldOut]) -> Iterable[tuple[str, Key, float]]:
    """Yield the difference of the errors of a run and of a run like it, of one source."""
    for source in dict.fromkeys(run.source for run in runs):
        some = [run for run in runs if run.source == source]
        pairs = [(a, b) for a in some for b in some if a is not b and bands.is_like(a.step, b.step)]
        for one, other in pairs[:: 1 + len(pairs) // _NEAR]:
            yield source, bands.classify(one.step), off(one.error - other.error)


def list_fastest(runs: Iterable[HeldOut]) -> list[Sequence[object]]:
    """Return the fastest run of each model, device, precision and number of devices, by model FLOPs utilization."""
    best: dict[tuple[object, ...], tuple[float, Sequence[object]]] = {}
    for row in runs:
        run, how = row.run, row.run.how
        key = (run.model.layers, run.model.hidden, run.model.experts, run.device.name, how.precision, how.devices)
        utilization = row.step.utilization * row.step.seconds / run.seconds
        if utilization > best.get(key, (0.0, ()))[0]:
            numbers = (how.batch, how.sequence, f"{run.seconds:.4g}", f"{utilization:.3f}")
            best[key] = utilization, (run.id, *key, *numbers)
    return [line for _, line in sorted(best.values(), key=lambda pair: str(pair[1][1:7]))]


def line(name: str, runs: Sequence[HeldOut], widths: Mapping[str, float]) -> report.Row:
    """Return the errors of some runs, and how many are inside their bands as printed."""
    sizes = sorted(100 * abs(math.expm1(run.error)) for run in runs)
    inside = [off(run.error) <= widths[run.run.id] for run in runs]
    return {
        "runs": name,
        "number": len(runs),
        "median %": round(statistics.median(sizes), 1),
        "p90 %": round(sizes[math.ceil(0.9 * len(sizes)) - 1], 1),
        "mean %": round(100 * math.expm1(statistics.mean(run.error for run in runs)), 1),
        "band %": round(100 * statistics.median(widths[run.run.id] for run in runs)),
        "inside %": round(100 * statistics.mean(inside)),
    }


def group(runs: Sequence[HeldOut], widths: Mapping[str, float], by: Callable[[HeldOut], str]) -> list[report.Row]:
    """Return a line for each group of runs."""
    names = sorted({by(run) for run in runs})
    return [line(name, [run for run in runs if by(run) == name], widths) for name in names]


def main() -> None:
    """Fit without each source, print, and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write the bands, the fastest runs and held_out.json")
    args = parser.parse_args()
    runs = leave_out(rows.read(*rows.FILES)[0])
    widths, memory = {}, {}
    for source in dict.fromkeys(run.source for run in runs):
        table, lines = make_bands(run for run in runs if run.source != source)
        for run in (run for run in runs if run.source == source):
            widths[run.run.id] = bands.look_up("seconds", bands.classify(run.step), table)
            memory[run.run.id] = bands.look_up("memory", bands.classify(run.step, "memory"), table)

    def name_class(run: HeldOut) -> str:
        software, generation, kind = bands.classify(run.step)
        return f"{software}, {kind}, {generation}"

    def name_regime(run: HeldOut) -> str:
        how = run.step.how
        axes = "long" if how.sequence >= _LONG else "sharded" if how.tp == how.cp == how.pp == 1 else "model parallel"
        return f"{bands.classify(run.step)[0]}, {axes}"

    with_memory = [run for run in runs if run.memory is not None]
    tables: dict[str, Sequence[report.Row]] = {
        "By class": group(runs, widths, lambda run: ", ".join(bands.classify(run.step)[::2])),
        "By class and generation": group(runs, widths, name_class),
        "By source": group(runs, widths, lambda run: run.source),
        "By regime": group(runs, widths, name_regime),
        "Memory, by source": [
            {
                "runs": source,
                "number": len(some),
                "median %": round(100 * statistics.median(abs(math.expm1(run.memory or 0)) for run in some), 1),
                "mean %": round(100 * math.expm1(statistics.mean(run.memory or 0 for run in some)), 1),
                "inside %": round(100 * statistics.mean(off(run.memory or 0) <= memory[run.run.id] for run in some)),
            }
            for source in dict.fromkeys(run.source for run in with_memory)
            if (some := [run for run in with_memory if run.source == source])
        ],
        "All": [line("all", runs, widths)],
    }
    if args.write:
        _, lines = make_bands(runs)
        folder = Path(str(resources.files("multimesh_planner")))
        _write(folder / "bands.csv", ("of", "class", "generation", "kind", "sources", "runs", "band"), lines)
        sizes = ("layers", "hidden", "experts", "device", "precision", "devices", "batch", "sequence")
        _write(folder / "published.csv", ("id", *sizes, "seconds", "utilization"), list_fastest(runs))
        errors = {run.run.id: round(run.error, 3) for run in runs}
        HELD_OUT.write_text(json.dumps({"tables": tables, "errors": errors}, indent=1) + "\n", encoding="utf-8")
    report.show(tables, as_json=args.json)


def _write(path: Path, heads: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *lines])
    path.write_text(text.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    main()
