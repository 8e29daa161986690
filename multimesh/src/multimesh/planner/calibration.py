"""Constants that fit one run of the user's own: of kernels, of traffic, and of the time that no kernel needs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimesh.errors import UsageError
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack
from multimesh.planner import bands, models
from multimesh.planner.configuration import Configuration
from multimesh.planner.step import forecast
from multimesh.planner.transformer import Transformer

_SPREAD = {"products": 0.10, "traffic": 0.25, "rest": 0.40}  # standard deviations of the logarithms before the run
_NOISE = 0.01  # of the measured run
_TURNS = 6
_MEASURED = {"matmul_bf16": "bf16", "memory": "bandwidth", "link": "link", "network": "network"}


@dataclass(frozen=True)
class Calibration:
    """Factors of three constants, and the run that they were fitted to."""

    # products, traffic, rest: times that kernels of products, collectives, and all else take of what they took before
    products: float = 1.0
    traffic: float = 1.0
    rest: float = 1.0
    # before, after: forecast over measured seconds of the run, with the constants before and after
    before: float = 1.0
    after: float = 1.0
    run: bands.MeasuredStep | None = None  # the run, as bands see it; None: only rates were measured
    rates: tuple[tuple[str, float], ...] = ()  # shares of a device's rates that were measured in place

    def moved(self, at: Mapping[str, float]) -> Calibration:
        """Return the same with other factors, of which ``at`` has the logarithms."""
        products, traffic, rest = (math.exp(at[name]) for name in _SPREAD)
        return dataclasses.replace(self, products=products, traffic=traffic, rest=rest)

    def device(self, on: Device) -> Device:
        """Return a device with the constants of the run."""
        rates = dataclasses.replace(on.rates, **dict(self.rates))
        faster = {name: min(1.5, getattr(rates, name) / self.products) for name in _PRODUCTS}
        slower = {name: min(1.0, getattr(rates, name) / self.traffic) for name in ("link", "network")}
        return dataclasses.replace(on, rates=dataclasses.replace(rates, **faster, **slower))

    def stack(self, software: Stack) -> Stack:
        """Return software with the constants of the run."""
        return dataclasses.replace(software, **{name: getattr(software, name) * self.rest for name in _REST})

    def __str__(self) -> str:
        if self.run is None:
            return f"rates measured in place: {', '.join(f'{name} {share:.2f}' for name, share in self.rates)}"
        return (
            f"calibrated: products take {self.products:.2f} times, traffic {self.traffic:.2f}, all else "
            f"{self.rest:.2f}; your run was forecast {100 * (self.before - 1):+.0f} % off, and is now "
            f"{100 * (self.after - 1):+.0f} %"
        )


_PRODUCTS = ("matmul_bf16", "matmul_fp8", "matmul_fp4", "attention", "flash2")
_REST = ("passes", "kernel", "layer", "expert_layer", "step")


def read(file: Path, on: Device, software: Stack) -> Calibration:
    """Return the calibration of a JSON file.

    The file has a run: ``model`` (a name, or fields of `Transformer`), ``configuration`` (fields of `Configuration`)
    and ``seconds`` of a step; or ``rates`` that were measured in place: operations a second of ``matmul_bf16``, and
    bytes a second of ``memory``, ``link`` and ``network``; or both.

    Raises ``UsageError`` if it cannot be read, or says something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"calibrate: {file} cannot be read: {error}") from None
    if not isinstance(found, dict) or not ({"rates", "seconds"} & found.keys()):
        raise UsageError(f"calibrate: {file} has neither rates nor a run with its seconds; see docs/suggesting.md")
    rates = _rates(found.get("rates") or {}, on, file)
    if "seconds" not in found:
        return Calibration(rates=rates)
    seconds = found["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(f"calibrate: {file}: seconds must be a number above 0, got {seconds!r}")
    try:
        named = found.get("model")
        model = models.model(named) if isinstance(named, str) else Transformer(**{"name": "yours", **dict(named or {})})
        how = Configuration(**found["configuration"])
    except (TypeError, KeyError) as error:
        raise UsageError(f"calibrate: {file}: model and configuration: {error}") from None
    return fit(model, how, on, software, float(seconds), Calibration(rates=rates))


def _rates(given: Mapping[str, Any], on: Device, file: Path) -> tuple[tuple[str, float], ...]:
    shares = []
    for name, value in given.items():
        if name not in _MEASURED or isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UsageError(f"calibrate: {file}: rates has {name!r} = {value!r}; known are {', '.join(_MEASURED)}")
        shares.append((name, float(value) / getattr(on, _MEASURED[name])))
    return tuple(shares)


def fit(
    model: Transformer, how: Configuration, on: Device, software: Stack, seconds: float, start: Calibration
) -> Calibration:
    """Return the most probable factors for a run that took ``seconds``: each moves as far as it is unsure."""
    names = tuple(_SPREAD)

    def error(at: Mapping[str, float]) -> float:
        now = start.moved(at)
        return math.log(forecast(model, how, now.device(on), now.stack(software)).seconds / seconds)

    at = dict.fromkeys(names, 0.0)
    before = error(at)
    for _ in range(_TURNS):
        at = _improve(error, at, names)
    step = forecast(model, how, on, software)
    run = bands.describe(step, "yours", before)
    return dataclasses.replace(start.moved(at), before=math.exp(before), after=math.exp(error(at)), run=run)


def _improve(
    error: Callable[[Mapping[str, float]], float], at: Mapping[str, float], names: tuple[str, ...]
) -> dict[str, float]:
    """Return the point after a Gauss-Newton step: one measurement, and a prior for each factor."""
    now = error(at)
    slope = {name: (error({**at, name: at[name] + 0.02}) - now) / 0.02 for name in names}
    spread = sum((slope[name] * _SPREAD[name]) ** 2 for name in names) + _NOISE**2
    lacks = -now + sum(slope[name] * at[name] for name in names)
    return {name: _SPREAD[name] ** 2 * slope[name] * lacks / spread for name in names}
