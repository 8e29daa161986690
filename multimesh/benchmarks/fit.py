"""Fit the constants of devices and stacks to published runs, and print them as TOML.

    python multimesh/benchmarks/fit.py [--runs FILE] [--rounds 3000] [--seed 0] [--leave-out SOURCE]

A random search: each round changes one or two constants by about a tenth, and keeps the change if the forecasts are
nearer. Constants belong to a generation of devices or to a stack, never to a row or a model. Each source weighs as
the root of its rows, and an error above 35 % counts as 35 %. While constants move, a closed form stands for the loop,
scaled to the simulated one; loops are simulated before each of three turns. ``--leave-out`` starts in the middle of
all bounds, fits without the rows whose id begins so, or without half of all rows, and shows the errors of the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import random
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import rows
from multimesh.hardware.devices import Device, Rates
from multimesh.hardware.stacks import Stack, made
from multimesh.planner import layer, stage_layers, step

Values = dict[str, float]

_GROUPS: Mapping[str, tuple[tuple[str, ...], float, float]] = {
    **{
        f"{generation} {name}": ((f"fitted.{generation}.{name}",), least, most)
        for generation in ("ampere", "hopper", "blackwell")
        for name, least, most in (
            ("matmul_bf16", 0.3, 0.95),
            ("matmul_fp8", 0.2, 0.95),
            ("attention", 0.2, 0.9),
        )
        if (generation, name) not in {("ampere", "matmul_fp8"), ("ampere", "attention")}
    },
    "passes": (("modern.passes",), 5.0, 80.0),
    "passes, 2021": (("megatron-2021.passes",), 5.0, 80.0),
    "passes, deepspeed": (("deepspeed-2021.passes",), 5.0, 160.0),
    "kernel, deepspeed": (("deepspeed-2021.kernel",), 1e-6, 2e-4),
    "eager passes": (("eager.passes",), 5.0, 800.0),
    "kernel": (tuple(f"{s}.kernel" for s in ("modern", "megatron-2021", "eager")), 1e-6, 5e-5),
    "head passes": (tuple(f"{s}.head_passes" for s in ("modern", "megatron-2021", "eager")), 1.0, 24.0),
    "score passes": (("megatron-2021.score_passes",), 2.0, 30.0),
    "misaligned": (("megatron-2021.misaligned",), 1.0, 32.0),
    "exposed tensor": (("modern.exposed_tensor",), 0.0, 1.0),
    "exposed gradients": (tuple(f"{s}.exposed_gradients" for s in ("modern", "eager")), 0.0, 1.0),
    "exposed gradients, 2021": (("megatron-2021.exposed_gradients",), 0.0, 1.0),
    "exposed parameters": (tuple(f"{s}.exposed_parameters" for s in ("modern", "eager")), 0.0, 1.0),
    "exposed parameters, 2021": (("megatron-2021.exposed_parameters",), 0.0, 1.0),
    "exposed context": (("modern.exposed_context",), 0.0, 1.0),
    "blocking": (("modern.blocking", "eager.blocking"), 0.0, 1.0),
    "blocking, 2021": (("megatron-2021.blocking",), 0.0, 1.0),
    "blocking interleaved": (tuple(f"{s}.blocking_interleaved" for s in ("modern", "megatron-2021")), 0.0, 1.0),
    "layer": (("eager.layer",), 1e-4, 1e-2),
    "step": (("modern.step", "eager.step"), 0.0, 0.2),
    "step, 2021": (("megatron-2021.step",), 0.0, 0.2),
}
"""Constants that move together, with their bounds."""


@functools.cache
def tables() -> Mapping[str, Values]:
    """The numbers of both files, by table."""
    folder = resources.files("multimesh.hardware")
    devices, stacks = (tomllib.loads((folder / name).read_text()) for name in ("devices.toml", "stacks.toml"))
    found = {f"fitted.{name}": dict(values) for name, values in devices["fitted"].items()}
    return {**found, **{name: dict(values) for name, values in stacks.items()}}


def start() -> Values:
    """The value of each group now."""
    known = tables()
    return {group: _get(known, paths[0]) for group, (paths, _, _) in _GROUPS.items()}


def _get(known: Mapping[str, Values], path: str) -> float:
    table, _, field = path.rpartition(".")
    return float(known[table].get(field, 0.0))


def applied(values: Values) -> dict[str, Values]:
    """The tables with the values of the groups."""
    known = {table: dict(fields) for table, fields in tables().items()}
    for group, value in values.items():
        for path in _GROUPS[group][0]:
            table, _, field = path.rpartition(".")
            known[table][field] = value
    return known


class Model:
    """Forecasts of runs for any constants."""

    def __init__(self, runs: Sequence[rows.Run]) -> None:
        self.runs = runs
        self.generation = {run.id: _generation(run.device) for run in runs}
        self.ratio = [1.0] * len(runs)

    def _of(self, run: rows.Run, known: Mapping[str, Values]) -> tuple[Device, Stack]:
        rates = Rates(**known[f"fitted.{self.generation[run.id]}"])
        return dataclasses.replace(run.device, rates=rates), made(run.stack, known)

    def settle(self, values: Values) -> None:
        """Simulate every loop, for the scale of the closed form."""
        known = applied(values)
        for number, run in enumerate(self.runs):
            on, stack = self._of(run, known)
            self.ratio[number] = step.forecast(run.model, run.how, on, stack).loop / self._closed(run, on, stack)[0]

    @staticmethod
    def _closed(run: rows.Run, on: Device, stack: Stack) -> tuple[float, float]:
        how = run.how
        parts = layer.parts(run.model, how, on, stack)
        of = stage_layers.times(run.model, how, parts)
        per = [sum(s.total for s in of[row :: how.pp]) + 2 * how.interleave * parts.blocked for row in range(how.pp)]
        fill = (how.pp - 1) / how.interleave * (sum(per) / how.pp + 2 * how.interleave * parts.hop)
        loop = how.microbatches * max(per) + (fill if how.pp > 1 else 0.0)
        return loop, step.after(run.model, how, on, stack)

    def errors(self, values: Values) -> list[float]:
        """Logarithm of forecast over measured, for each run."""
        known, found = applied(values), []
        for run, ratio in zip(self.runs, self.ratio, strict=True):
            loop, rest = self._closed(run, *self._of(run, known))
            found.append(math.log((loop * ratio + rest) / run.seconds))
        return found


def _generation(on: Device) -> str:
    known = tables()
    return next(n for n in ("ampere", "hopper", "blackwell") if Rates(**known[f"fitted.{n}"]) == on.rates)


def middle() -> Values:
    """A start that knows no run: the middle of each group's bounds, by their ratio."""
    return {group: math.sqrt(max(low, high / 100) * high) for group, (_, low, high) in _GROUPS.items()}


def fit(runs: Sequence[rows.Run], rounds: int, seed: int, best: Values) -> Values:
    """Constants whose forecasts are nearest to these runs, from ``best`` on."""
    draw, model = random.Random(seed), Model(runs)
    count: dict[str, int] = {}
    for run in runs:
        count[rows.prefix(run)] = count.get(rows.prefix(run), 0) + 1
    weights = [1 / math.sqrt(count[rows.prefix(run)]) for run in runs]

    def loss(values: Values) -> float:
        return sum(w * min(abs(e), 0.35) for w, e in zip(weights, model.errors(values), strict=True)) / sum(weights)

    for _ in range(3):
        model.settle(best)
        least = loss(best)
        for _ in range(rounds // 3):
            values = dict(best)
            for group in draw.sample(list(_GROUPS), draw.choice((1, 1, 2))):
                _, low, high = _GROUPS[group]
                moved = (values[group] or high / 100) * math.exp(draw.gauss(0, 0.12))
                values[group] = min(high, max(low, moved))
            found = loss(values)
            if found < least:
                best, least = values, found
    return best


def left_out(run: rows.Run, what: str) -> bool:
    """Whether a run is left out: one of a source, or of a half that the hash of its id tells."""
    if what == "half":
        return hashlib.sha256(run.id.encode()).digest()[1] % 2 == 0
    return bool(what) and run.id.startswith(what)


def shown(name: str, errors: Sequence[float]) -> str:
    """Median, 90th percentile and mean of some errors."""
    sizes = sorted(map(abs, errors))
    last = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return (
        f"{name:12s} {len(sizes):4d} rows  median {100 * statistics.median(sizes):5.1f} %  "
        f"p90 {100 * last:5.1f} %  mean {100 * statistics.mean(errors):+5.1f} %"
    )


def write(known: Mapping[str, Values]) -> None:
    """Replace the numbers of both files, and leave everything else in them."""
    for name in ("devices.toml", "stacks.toml"):
        path = Path(str(resources.files("multimesh.hardware").joinpath(name)))
        lines, table = [], ""
        for line in path.read_text(encoding="utf-8").splitlines():
            field, equals, _ = line.partition(" = ")
            if line.startswith("["):
                table = line.strip("[]")
            value = known.get(table, {}).get(field) if equals else None
            lines.append(f"{field} = {value:.3g}" if isinstance(value, float) else line)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=rows.RUNS / "dense.csv")
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leave-out", default="", help="prefix of the ids of rows to leave out, or half")
    parser.add_argument("--write", action="store_true", help="write the constants into the package's TOML files")
    args = parser.parse_args()
    runs, _ = rows.read(args.runs)
    used = [run for run in runs if not left_out(run, args.leave_out)]
    values = fit(used, args.rounds, args.seed, middle() if args.leave_out else start())
    model = Model(runs)
    model.settle(values)
    errors = dict(zip(runs, model.errors(values), strict=True))
    for name in dict.fromkeys(map(rows.prefix, runs)):
        for mark, group in (("", used), (" (left out)", [run for run in runs if run not in used])):
            if found := [errors[run] for run in group if rows.prefix(run) == name]:
                print("#", shown(name, found) + mark)
    print("#", shown("all", [e for run, e in errors.items() if run in used]))
    if args.write:
        write(applied(values))
        return
    for table, fields in applied(values).items():
        print(f"\n[{table}]")
        for field, value in fields.items():
            print(f"{field} = {value:.3g}" if isinstance(value, float) else f"{field} = {json.dumps(value)}")


if __name__ == "__main__":
    main()
