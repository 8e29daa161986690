"""Fit the constants of devices and stacks to published runs, and print or write them.

    python multimesh/benchmarks/fit.py [--leave-out SOURCE] [--write]

Each constant has a prior: what tables of kernels and collectives that others published say, and how sure that is. The
fit is the most probable one: least squares of the logarithms of forecast over measured, and of constants over priors.
Constants belong to a generation of devices or to a stack, never to a row or a model. Rows of a source share their
surroundings, so n of them weigh as the root of n; large errors weigh less (Huber). While constants move, a closed form
stands for the loop, scaled to the simulated one. ``--leave-out`` fits without the sources that are named, and shows
the errors of the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import rows
from multimesh.hardware.devices import Device, Rates
from multimesh.hardware.software import Stack, make_stack
from multimesh.planner import layer, stage_layers, step

Values = dict[str, float]

_NOISE, _LARGE = 0.05, 1.5  # of a row, relative; times that, from which on an error weighs less

_PRIORS: Mapping[str, tuple[float, float]] = {
    "fitted.ampere.matmul_bf16": (0.80, 0.05),  # cuBLAS: 250 to 280 TFLOP/s
    "fitted.ampere.attention": (0.50, 0.15),  # FlashAttention 2, forward, causal: 150 to 190
    "fitted.hopper.matmul_bf16": (0.70, 0.05),  # cuBLAS under the power limit: 650 to 750
    "fitted.hopper.matmul_fp8": (0.64, 0.07),  # 1,200 to 1,400
    "fitted.hopper.attention": (0.60, 0.12),  # FlashAttention 3 and cuDNN, forward, causal: 550 to 650
    "fitted.blackwell.matmul_bf16": (0.70, 0.06),  # 1,500 to 1,700
    "fitted.blackwell.matmul_fp8": (0.64, 0.08),
    "fitted.blackwell.matmul_fp4": (0.50, 0.15),
    "fitted.blackwell.attention": (0.58, 0.15),  # cuDNN, forward, causal: 1,200 to 1,400
    "fitted.blackwell.early": (0.20, 0.5),
    "fitted.blackwell-ultra.matmul_bf16": (0.75, 0.08),
    "fitted.blackwell-ultra.matmul_fp8": (0.70, 0.10),
    "fitted.cdna.matmul_bf16": (0.57, 0.06),  # order 8192 on MI300X: 724 to 765 (AMD-AGI/Primus, node smoke test)
    "fitted.cdna.matmul_fp8": (0.42, 0.08),  # hipBLASLt: 1,015 to 1,159 (Azure AI-benchmarking-guide, ND MI300X v5)
    "fitted.cdna.attention": (0.33, 0.25),  # FlashAttention 2, heads of 64: 329 (the same guide)
    "fitted.cdna-4.matmul_bf16": (0.57, 0.06),  # hipBLASLt on MI355X: 1,310 to 1,540 (Primus, gpt_oss_20b)
    "fitted.cdna-4.matmul_fp8": (0.54, 0.08),  # 2,391 to 2,972 (the same files)
    "fitted.cdna-4.attention": (0.35, 0.30),  # sparse, forward: up to 878 (Primus, deepseek-v4); of dense none found
    "fitted.tpu.matmul_bf16": (0.80, 0.10),  # no table found: as the two below
    "fitted.tpu.attention": (0.50, 0.30),  # no table of Splash attention found
    "fitted.tpu-v6.matmul_bf16": (0.75, 0.06),  # order 8192: 668 to 689 (yangwhale/gpu-tpu-pedia)
    "fitted.tpu-v6.attention": (0.50, 0.30),
    "fitted.tpu-v7.matmul_bf16": (0.83, 0.05),  # order 16384: 950 of 1,153 a core (accelerator-microbenchmarks)
    "fitted.tpu-v7.matmul_fp8": (0.75, 0.12),
    "fitted.tpu-v7.attention": (0.50, 0.30),
    "fitted.ampere.network": (0.80, 0.15),
    "fitted.hopper.network": (0.80, 0.15),
    "modern.passes": (40, 0.3),
    "modern.head_passes": (15, 0.4),
    "modern.exposed_tensor": (0.25, 0.5),
    "modern.exposed_gradients": (0.15, 0.6),
    "modern.exposed_parameters": (0.25, 0.7),
    "modern.exposed_context": (0.5, 0.5),
    "modern.blocking": (0.9, 0.3),
    "modern.blocking_interleaved": (0.2, 0.7),
    "modern.kernel": (1e-5, 0.5),
    "modern.step": (0.03, 0.7),
    "modern.jitter": (0.004, 0.7),
    "megatron-2025.expert_passes": (8, 0.5),
    "megatron-2025.grouped": (1.3, 0.2),
    "megatron-2025.exposed_experts": (0.9, 0.3),
    "megatron-2025.expert_layer": (3e-3, 0.5),
    "megatron-2025-graphs.expert_layer": (1.5e-3, 0.5),
    "megatron-2025-alltoall.expert_passes": (12, 0.5),
    "megatron-2025-overlap.expert_layer": (3e-3, 0.5),
    "megatron-2026.expert_passes": (4, 0.5),
    "megatron-2026.grouped": (1.1, 0.1),
    "megatron-2026.exposed_experts": (0.5, 0.4),
    "maxtext-tpu.passes": (40, 0.3),
    "maxtext-tpu.exposed_tensor": (0.25, 0.5),
    "maxtext-tpu.exposed_gradients": (0.3, 0.6),
    "maxtext-tpu.exposed_parameters": (0.25, 0.7),
    "maxtext-tpu.jitter": (0.004, 0.7),
    "maxtext-tpu.expert_passes": (8, 0.5),
    "pytorch.passes": (60, 0.3),
    "pytorch.exposed_tensor": (0.9, 0.2),
    "pytorch.exposed_gradients": (0.3, 0.6),
    "pytorch.exposed_parameters": (0.3, 0.7),
    "pytorch.kernel": (1e-5, 0.5),
    "megatron-2021.passes": (20, 0.4),
    "megatron-2021.score_passes": (15, 0.3),
    "megatron-2021.misaligned": (16, 0.5),
    "megatron-2021.exposed_parameters": (0.5, 0.5),
    "megatron-2021.blocking": (0.9, 0.3),
    "megatron-2021.kernel": (1.5e-5, 0.5),
    "deepspeed-2021.passes": (60, 0.5),
    "deepspeed-2021.kernel": (1e-4, 0.5),
    "eager.layer": (2.5e-3, 0.5),
    "nanotron.passes": (130, 0.5),  # as counted for eager
    "nanotron.transfer": (2e-3, 1.0),
}
"""Constants, with the middle of the prior and the standard deviation of its logarithm."""

_AT_MOST_ONE = ("matmul", "attention", "network", "exposed", "blocking")


@functools.cache
def tables() -> Mapping[str, Values]:
    """Return the numbers of both files, by table."""
    folder = resources.files("multimesh.hardware")
    devices, stacks = (tomllib.loads((folder / name).read_text()) for name in ("devices.toml", "stacks.toml"))
    found = {f"fitted.{name}": dict(values) for name, values in devices["fitted"].items()}
    return {**found, **{name: dict(values) for name, values in stacks.items()}}


def now() -> Values:
    """Return the values of the constants that the files have."""
    known = tables()
    return {path: float(known[path.rpartition(".")[0]][path.rpartition(".")[2]]) for path in _PRIORS}


def applied(values: Values) -> dict[str, Values]:
    """Return the tables with other values of the constants."""
    known = {table: dict(fields) for table, fields in tables().items()}
    for path, value in values.items():
        table, _, field = path.rpartition(".")
        known[table][field] = value
    return known


def forgotten(values: Values, stack: str) -> Values:
    """Return the constants with those of a stack at the middle of their priors, as if no run told of it."""
    return {name: _PRIORS[name][0] if name.rpartition(".")[0] == stack else value for name, value in values.items()}


class Model:
    """Forecasts of runs for any constants."""

    def __init__(self, runs: Sequence[rows.Run]) -> None:
        self.runs = runs
        self.generation = {run.id: run.device.generation for run in runs}
        self.ratio = [1.0] * len(runs)

    def _of(self, run: rows.Run, known: Mapping[str, Values]) -> tuple[Device, Stack]:
        rates = Rates(**known[f"fitted.{self.generation[run.id]}"])
        on = dataclasses.replace(run.device, rates=rates)
        return on, dataclasses.replace(make_stack(run.stack.name, known), year=run.stack.year)

    def settle(self, values: Values) -> None:
        """Simulate every loop, for the scale of the closed form."""
        known = applied(values)
        for number, run in enumerate(self.runs):
            on, stack = self._of(run, known)
            self.ratio[number] = step.forecast(run.model, run.how, on, stack).loop / self._closed(run, on, stack)[0]

    @staticmethod
    def _closed(run: rows.Run, on: Device, stack: Stack) -> tuple[float, float, float]:
        how, used = run.how, on.with_software(stack.year)
        parts = layer.parts(run.model, how, used, stack)
        of = stage_layers.times(run.model, how, parts)
        per = [sum(s.total for s in of[row :: how.pp]) + 2 * how.interleave * parts.blocked for row in range(how.pp)]
        fill = (how.pp - 1) / how.interleave * (sum(per) / how.pp + 2 * how.interleave * parts.hop)
        loop = how.microbatches * max(per) + (fill if how.pp > 1 else 0.0)
        slower = 1 + step.stragglers(how, used, stack)
        return loop, slower, sum(step.after(run.model, how, used, stack, parts))

    def errors(self, values: Values, rows_of: Sequence[int] | None = None) -> list[float]:
        """Return the logarithm of forecast over measured, for each run or those of some numbers."""
        known, found = applied(values), []
        for number in range(len(self.runs)) if rows_of is None else rows_of:
            run = self.runs[number]
            loop, slower, rest = self._closed(run, *self._of(run, known))
            found.append(math.log((loop * self.ratio[number] * slower + rest) / run.seconds))
        return found

    def touched(self, path: str) -> list[int]:
        """Return the numbers of the runs whose forecast a constant may change."""
        table = path.rpartition(".")[0]
        return [
            number
            for number, run in enumerate(self.runs)
            if table in (f"fitted.{self.generation[run.id]}", *_lineage(run.stack.name))
        ]


@functools.cache
def _lineage(name: str) -> tuple[str, ...]:
    """Return a stack and those that it is like."""
    base = str(tables()[name].get("like", ""))
    return (name, *(_lineage(base) if base else ()))


def weights(runs: Sequence[rows.Run]) -> list[float]:
    """Return the weight of each row: n rows of a source on a generation of devices weigh as the root of n."""
    keys = [(rows.prefix(run), run.device.name, bool(run.model.experts)) for run in runs]
    count = Counter(keys)
    return [count[key] ** -0.25 for key in keys]


def fit(runs: Sequence[rows.Run], turns: int = 8, start: Values | None = None) -> Values:
    """Return the most probable constants: Gauss-Newton steps in their logarithms."""
    names = list(_PRIORS)
    middle = np.log([_PRIORS[name][0] for name in names])
    spread = np.array([_PRIORS[name][1] for name in names])
    most = np.log([0.98 if any(word in name for word in _AT_MOST_ONE) else 1e9 for name in names])
    at = np.log([start[name] for name in names]) if start else middle.copy()
    model, weight = Model(runs), np.array(weights(runs))

    def values(of: np.ndarray) -> Values:
        return dict(zip(names, map(float, np.exp(of)), strict=True))

    for turn in range(turns):
        if turn in (0, 2, 5):
            model.settle(values(at))
        errors = np.array(model.errors(values(at)))
        slopes = np.zeros((len(errors), len(names)))
        for number, name in enumerate(names):
            moved = at.copy()
            moved[number] += 0.02
            some = model.touched(name)
            slopes[some, number] = (np.array(model.errors(values(moved), some)) - errors[some]) / 0.02
        size = np.abs(errors) / (_NOISE * _LARGE)
        scale = weight / _NOISE / np.sqrt(np.maximum(1, size))
        left = np.concatenate([slopes * scale[:, None], np.diag(1 / spread)])
        right = np.concatenate([-errors * scale, (middle - at) / spread])
        change = np.linalg.lstsq(left, right, rcond=None)[0]
        at = np.minimum(at + np.clip(change, -0.5, 0.5), most)
    return values(at)


def shown(name: str, errors: Sequence[float]) -> str:
    """Return median, 90th percentile and mean of some errors."""
    sizes = sorted(map(abs, errors))
    last = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return (
        f"{name:24s} {len(sizes):4d} rows  median {100 * statistics.median(sizes):5.1f} %  "
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
            value = known.get(table, {}).get(field) if equals and f"{table}.{field}" in _PRIORS else None
            lines.append(f"{field} = {value:.3g}" if isinstance(value, float) else line)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", default=rows.FILES)
    parser.add_argument("--leave-out", nargs="+", default=[], help="prefixes of the ids of rows to leave out")
    parser.add_argument("--write", action="store_true", help="write the constants into the package's TOML files")
    args = parser.parse_args()
    runs, _ = rows.read(*args.runs)
    used = [run for run in runs if rows.prefix(run) not in args.leave_out]
    values = fit(used)
    model = Model(runs)
    model.settle(values)
    errors = dict(zip((run.id for run in runs), model.errors(values), strict=True))
    groups: dict[str, list[float]] = {}
    for run in runs:
        kind = "experts" if run.model.experts else run.how.precision
        groups.setdefault(f"{rows.prefix(run)} {run.device.name} {kind}", []).append(errors[run.id])
    for name, found in groups.items():
        print("#", shown(name, found) + (" (left out)" if name.split(" ")[0] in args.leave_out else ""))
    for name, value in values.items():
        print(f"{name:36s} {value:10.3g}   prior {_PRIORS[name][0]:g}, {_PRIORS[name][1]:g}")
    if args.write:
        write(applied(values))


if __name__ == "__main__":
    main()
