"""Constants that fit one run of the user's own: of kernels, of traffic, and of the time that no kernel needs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multimesh.errors import UsageError

from multimesh_planner import models
from multimesh_planner.configuration import Configuration
from multimesh_planner.hardware.devices import Device, check_positive
from multimesh_planner.hardware.software import Software
from multimesh_planner.step import Step, step_time
from multimesh_planner.transformer import Transformer

_SPREAD = {"products": 0.10, "traffic": 0.25, "rest": 0.40}  # standard deviations of the logarithms before the run
_NOISE = 0.01  # of the measured run
_TURNS = 6
_PRODUCTS = ("matmul_bf16", "matmul_fp8", "matmul_fp4", "attention", "flash2")
_REST = ("passes", "kernel", "expert_layer", "step")


@dataclass(frozen=True)
class Calibration:
    """A device and software with constants that fit a run."""

    device: Device
    software: Software
    run: Step  # its forecast with the constants before
    factors: Mapping[str, float]  # times that kernels of products, collectives, and all else take of those before
    # before, after: forecast over measured seconds of the run, with the constants before and after
    before: float
    after: float

    def __str__(self) -> str:
        return (
            "calibrated: products take {products:.2f} times, traffic {traffic:.2f}, all else {rest:.2f}; your run was "
            "forecast {before:+.0f} % off, and is now {after:+.0f} %"
        ).format(**self.factors, before=100 * (self.before - 1), after=100 * (self.after - 1))


def read(file: Path, on: Device, software: Software) -> Calibration:
    """Return the calibration of a JSON file.

    The file has a run: ``model`` (a name, or fields of `Transformer`), ``configuration`` (fields of `Configuration`)
    and ``seconds`` of a step.

    Raises ``UsageError`` if it cannot be read, or says something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"calibrate: {file} cannot be read: {error}") from None
    if isinstance(data, dict) and "rates" in data:
        raise UsageError(f"calibrate: {file}: rates belong to a device; write them into its TOML, for --devices-file")
    if not isinstance(data, dict) or "seconds" not in data:
        raise UsageError(f"calibrate: {file} has no run with its seconds; see planner/README.md")
    check_positive(f"calibrate: {file}: seconds", data["seconds"])
    try:
        name = data.get("model")
        model = models.model(name) if isinstance(name, str) else Transformer(**{"name": "yours", **dict(name or {})})
        how = Configuration(**data["configuration"])
    except (TypeError, KeyError) as error:
        raise UsageError(f"calibrate: {file}: model and configuration: {error}") from None
    return fit(model, how, on, software, float(data["seconds"]))


def fit(model: Transformer, how: Configuration, on: Device, software: Software, seconds: float) -> Calibration:
    """Return the most probable factors for a run that took ``seconds``: each moves as far as it is unsure.

    Gauss-Newton steps, for one measurement and a prior of each factor.
    """

    def scale(at: Mapping[str, float]) -> tuple[Device, Software]:
        products, traffic, others = (math.exp(at[name]) for name in _SPREAD)
        faster = {name: min(1.5, getattr(on.rates, name) / products) for name in _PRODUCTS}
        slower = {name: min(1.0, getattr(on.rates, name) / traffic) for name in ("link", "network")}
        of = dataclasses.replace(software, **{name: getattr(software, name) * others for name in _REST})
        return dataclasses.replace(on, rates=dataclasses.replace(on.rates, **faster, **slower)), of

    def error(at: Mapping[str, float]) -> float:
        return math.log(step_time(model, how, *scale(at)).seconds / seconds)

    at = dict.fromkeys(_SPREAD, 0.0)
    before = now = error(at)
    for _ in range(_TURNS):
        slope = {name: (error({**at, name: at[name] + 0.02}) - now) / 0.02 for name in _SPREAD}
        spread = sum((slope[name] * _SPREAD[name]) ** 2 for name in _SPREAD) + _NOISE**2
        lacks = -now + sum(slope[name] * at[name] for name in _SPREAD)
        at = {name: _SPREAD[name] ** 2 * slope[name] * lacks / spread for name in _SPREAD}
        now = error(at)
    run, factors = step_time(model, how, on, software), {name: math.exp(power) for name, power in at.items()}
    return Calibration(*scale(at), run, factors, math.exp(before), math.exp(now))
