"""Fit the constants of devices and software to published runs, and print or write them.

    python planner/benchmarks/fit.py [--leave-out SOURCE] [--write]

Each constant begins at a round number with a width, which say what tables of kernels and collectives that others
published say, and how sure that is. The fit is the most probable one: least squares of the logarithms of forecast over
measured, and of constants over round numbers. A constant belongs to a generation of devices, to a class of software, or
to all, never to a row, a model or a source; three sources or more tell each, by name in ``runs/fitted.json``. Rows of a
source share their surroundings, so n of them weigh as the root of n; large errors weigh less (Huber). Nothing is fitted
to runs before fused attention, without compilation, and of dense models on TPUs and on AMD's devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import rows
from multimesh_planner import layer_seconds, step
from multimesh_planner.hardware.devices import Device
from multimesh_planner.hardware.software import Software

Values = dict[str, float]
FITTED = rows.RUNS / "fitted.json"
GENERATIONS = ("ampere", "hopper", "blackwell")

_NOISE, _LARGE = 0.05, 1.5  # of a row, relative; times that, from which on an error weighs less
_TELLS = 0.01  # change of a forecast by a doubling of a constant, from which on a row tells of it

ROUND: Mapping[str, tuple[float, float]] = {
    "matmul_bf16 ampere": (0.80, 0.05),  # cuBLAS: 250 to 280 TFLOP/s
    "matmul_bf16 hopper": (0.70, 0.05),  # cuBLAS under the power limit: 650 to 750
    "matmul_bf16 blackwell": (0.70, 0.06),  # 1,500 to 1,700
    "matmul_fp8 hopper blackwell": (0.64, 0.07),  # on H100: 1,200 to 1,400
    "attention ampere": (0.50, 0.15),  # FlashAttention 2, forward, causal: 150 to 190
    "attention hopper blackwell": (0.60, 0.12),  # FlashAttention 3 and cuDNN on H100: 550 to 650
    "network ampere hopper blackwell": (0.80, 0.15),
    "passes": (40, 0.3),
    "head_passes": (15, 0.4),
    "exposed_tensor": (0.25, 0.5),
    "exposed_tensor pytorch": (0.8, 0.2),
    "exposed_gradients": (0.25, 0.5),
    "exposed_parameters": (0.5, 0.5),
    "blocking": (0.9, 0.3),
    "blocking_interleaved": (0.2, 0.7),
    "expert_passes": (8, 0.5),
    "grouped": (1.3, 0.2),
    "kernel": (1e-5, 0.5),
    "kernel pytorch": (2e-5, 0.5),
    "step": (0.03, 0.7),
    "jitter": (0.004, 0.7),
}
"""Constants with the round number and the standard deviation of its logarithm. After a rate: its generations."""

_AT_MOST_ONE = ("matmul", "attention", "network", "exposed", "blocking")


def is_used(run: rows.Run) -> bool:
    """Return whether the fit uses a run."""
    fused = run.software.fused_attention and run.software.name != "pytorch-eager"
    return fused and (run.device.generation in GENERATIONS or bool(run.model.experts))


def now() -> Values:
    """Return the values that the files have."""
    values: Values = json.loads(FITTED.read_text(encoding="utf-8"))["values"]
    return values


def replace(run: rows.Run, values: Values) -> tuple[Device, Software]:
    """Return the device and software of a run with other values of the constants."""
    rates, fields = {}, {}
    for name, value in values.items():
        field, *of = name.split(" ")
        if field.startswith(("matmul", "attention", "network")):
            if run.device.generation in of:
                rates[field] = value
        elif not of:
            fields[field] = value
    if run.software.name.startswith("pytorch"):
        fields |= {name.split(" ")[0]: value for name, value in values.items() if name.endswith(" pytorch")}
    if run.software.name == "pytorch-eager":
        del fields["passes"]  # it was counted
    if run.software.name == "maxtext":
        del fields["step"]
    device = dataclasses.replace(run.device, rates=dataclasses.replace(run.device.rates, **rates))
    return device, dataclasses.replace(run.software, **fields)


class Model:
    """Forecasts of runs for any constants. A closed form stands for the loop, scaled to the simulated one."""

    def __init__(self, runs: Sequence[rows.Run]) -> None:
        self.runs, self.ratio = runs, [1.0] * len(runs)

    def simulate(self, values: Values) -> None:
        """Simulate every loop, for the scale of the closed form."""
        for number, run in enumerate(self.runs):
            if run.how.pp > 1:
                on, software = replace(run, values)
                loop = step.step_time(run.model, run.how, on, software).loop
                self.ratio[number] = loop / self._closed(run, on, software)[0]

    @staticmethod
    def _closed(run: rows.Run, on: Device, software: Software) -> tuple[float, float, float]:
        how = run.how
        parts = layer_seconds.parts(run.model, how, on, software)
        stages = layer_seconds.times(run.model, how, parts)
        work = [sum(s.total for s in stages[r :: how.pp]) + 2 * how.interleave * parts.blocked for r in range(how.pp)]
        fill = (how.pp - 1) / how.interleave * (sum(work) / how.pp + 2 * how.interleave * parts.hop)
        loop = how.microbatches * max(work) + (fill if how.pp > 1 else 0.0)
        slower = 1 + step.stragglers(how, on, software)
        return loop, slower, sum(step.after(run.model, how, on, software, parts))

    def errors(self, values: Values) -> np.ndarray:
        """Return the logarithm of forecast over measured of each run."""
        errors = []
        for number, run in enumerate(self.runs):
            loop, slower, after = self._closed(run, *replace(run, values))
            errors.append(math.log((loop * self.ratio[number] * slower + after) / run.seconds))
        return np.array(errors)

    def slopes(self, values: Values, errors: np.ndarray) -> np.ndarray:
        """Return how much each error grows with the logarithm of each constant."""
        columns = [
            (self.errors(values | {name: value * math.exp(0.02)}) - errors) / 0.02 for name, value in values.items()
        ]
        return np.stack(columns, axis=1)


def weights(runs: Sequence[rows.Run]) -> list[float]:
    """Return the weight of each row: n rows of a source on a device weigh as the root of n."""
    keys = [(rows.prefix(run), run.device.name, bool(run.model.experts)) for run in runs]
    count = Counter(keys)
    return [count[key] ** -0.25 for key in keys]


def improve(at: np.ndarray, errors: np.ndarray, slopes: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the logarithms of the constants after a Gauss-Newton step."""
    middle = np.log([value for value, _ in ROUND.values()])
    spread = np.array([width for _, width in ROUND.values()])
    bounds = np.log([0.98 if any(word in name for word in _AT_MOST_ONE) else 1e9 for name in ROUND])
    scale = weight / _NOISE / np.sqrt(np.maximum(1, np.abs(errors) / (_NOISE * _LARGE)))
    sides = np.concatenate([slopes * scale[:, None], np.diag(1 / spread)])
    targets = np.concatenate([-errors * scale, (middle - at) / spread])
    return np.minimum(at + np.clip(np.linalg.lstsq(sides, targets, rcond=None)[0], -0.5, 0.5), bounds)


def _round(at: np.ndarray) -> Values:
    return {name: float(f"{value:.3g}") for name, value in zip(ROUND, np.exp(at), strict=True)}


def fit(runs: Sequence[rows.Run], turns: int = 5) -> Values:
    """Return the most probable constants."""
    at = np.log([value for value, _ in ROUND.values()])
    model, weight = Model(runs), np.array(weights(runs))
    for turn in range(turns):
        values = dict(zip(ROUND, map(float, np.exp(at)), strict=True))
        if turn in (0, 2):
            model.simulate(values)
        errors = model.errors(values)
        at = improve(at, errors, model.slopes(values, errors), weight)
    return _round(at)


def fit_without(runs: Sequence[rows.Run], values: Values) -> dict[str, Values]:
    """Return the constants that runs without each source give, from those of all: a forecast is about linear there."""
    model = Model(runs)
    model.simulate(values)
    errors = model.errors(values)
    slopes, start = model.slopes(values, errors), np.log([values[name] for name in ROUND])
    result = {}
    for source in dict.fromkeys(map(rows.prefix, runs)):
        keep = np.array([rows.prefix(run) != source for run in runs])
        weight = np.array(weights([run for run in runs if rows.prefix(run) != source]))
        at = start
        for _ in range(4):
            at = improve(at, (errors + slopes @ (at - start))[keep], slopes[keep], weight)
        result[source] = _round(at)
    return result


def list_sources(runs: Sequence[rows.Run], values: Values) -> dict[str, list[str]]:
    """Return the sources whose runs tell of each constant."""
    model = Model(runs)
    slopes = model.slopes(values, model.errors(values))
    return {
        name: sorted({rows.prefix(run) for run, slope in zip(runs, slopes[:, n], strict=True) if abs(slope) > _TELLS})
        for n, name in enumerate(values)
    }


def write(values: Values, sources: Mapping[str, Sequence[str]]) -> None:
    """Replace the numbers of both tables, and leave everything else in them."""
    of: dict[tuple[str, str], float] = {}
    for name, value in values.items():
        field, *tables = name.split(" ")
        rate = field.startswith(("matmul", "attention", "network"))
        of |= {(f"fitted.{table}" if rate else table, field): value for table in tables or ["nvidia"]}
    for file in ("devices.toml", "software.toml"):
        path = Path(str(resources.files("multimesh_planner.hardware").joinpath(file)))
        lines, table = [], ""
        for line in path.read_text(encoding="utf-8").splitlines():
            field, equals, _ = line.partition(" = ")
            table = line.strip("[]") if line.startswith("[") else table
            value = of.get((table, field)) if equals else None
            lines.append(line if value is None else f"{field} = {value:.3g}")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    FITTED.write_text(json.dumps({"values": values, "sources": sources}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", nargs="+", default=[], help="prefixes of the ids of rows to leave out")
    parser.add_argument("--write", action="store_true", help="write the constants into the package's TOML files")
    args = parser.parse_args()
    runs = [run for run in rows.read(*rows.FILES)[0] if is_used(run) and rows.prefix(run) not in args.leave_out]
    values = fit(runs)
    sources = list_sources(runs, values)
    for name, value in values.items():
        print(f"{name:32s} {value:10.3g}   round {ROUND[name][0]:g}   {', '.join(sources[name])}")
    errors = np.abs(Model(runs).errors(values))
    print(f"{len(values)} constants, {len(runs)} runs, median error {100 * statistics.median(errors):.1f} %")
    if args.write:
        write(values, sources)


if __name__ == "__main__":
    main()
