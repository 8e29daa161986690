"""The bill of a training run: days, device hours, money and energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multimesh.core import checks
from multimesh.core.text import columns
from multimesh.errors import UsageError
from multimesh.hardware.devices import Device
from multimesh.planner.best_first import Option

OVERHEAD = 1.5
"""Watts of a cluster for each watt of its devices: hosts, network, losses and cooling; an assumption."""

RESTART = 600.0
"""Seconds from a failure until steps run again; an assumption."""

_DAY = 86400.0


@dataclass(frozen=True)
class Terms:
    """The terms of a bill: tokens, prices, power."""

    tokens: float  # of the whole training
    price: float | None = None  # of a device for an hour; None: no costs are told
    # watts of a device with its part of all else; None: ``OVERHEAD`` times those of its data sheet
    power: float | None = None
    failures: float = 0.0  # failures a day of 1,000 devices
    save: float = 0.0  # seconds that a checkpoint stops the steps

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("tokens", "price", "power", "failures", "save"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise checks.refuse(f"bill: {name}", "a number of at least 0", value)

    def goodput(self, devices: int) -> float:
        """Return the share of the time in which steps run that count.

        With a checkpoint every ``sqrt(2 save between)`` seconds (Young 1974), where ``between`` are the seconds between
        failures, the saves and the steps that are lost take equal shares.

        Raises ``UsageError`` if failures come faster than the run restarts.
        """
        if not self.failures:
            return 1.0
        between = _DAY * 1000 / (self.failures * devices)
        every = math.sqrt(2 * self.save * between)
        lost = (self.save / every if every else 0.0) + (every / 2 + RESTART) / between
        if lost >= 1:
            raise UsageError(
                f"bill: {devices:,} devices fail every {between:,.0f} s, and restarts take {RESTART:,.0f} s: nothing "
                "is left to train in; check the rate of failures"
            )
        return 1 - lost


@dataclass(frozen=True)
class Bill:
    """The days, device hours, money and energy of a configuration, for all tokens."""

    # device, devices: of the cluster
    device: str
    devices: int
    # seconds, band: of a step, and half the width of the band around it, relative: that of each number below
    seconds: float
    band: float
    goodput: float  # share of the time in which steps run that count
    tokens_a_day: float  # on all devices
    # days, device_hours, cost, megawatt_hours: of the training; None: not asked for, or not known
    days: float
    device_hours: float
    cost: float | None
    megawatt_hours: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the same as data."""
        return asdict(self)


def bill(option: Option, device: Device, terms: Terms) -> Bill:
    """Return the bill of a configuration."""
    count = option.how.devices
    goodput = terms.goodput(count)
    rate = option.tokens_per_second * count * goodput
    days = terms.tokens / rate / _DAY
    hours = days * 24 * count
    watts = terms.power if terms.power is not None else OVERHEAD * device.power
    return Bill(
        device.name,
        count,
        option.seconds,
        option.band or 0.0,
        goodput,
        rate * _DAY,
        days,
        hours,
        None if terms.price is None else hours * terms.price,
        hours * watts / 1e6 if watts else None,
    )


def table(bills: Sequence[Bill], terms: Terms) -> list[str]:
    """Return bills as lines of a table."""
    parts: list[tuple[str, Sequence[str]]] = [
        ("device", [each.device for each in bills]),
        ("number", [f"{each.devices:,}" for each in bills]),
        ("step s", [f"{each.seconds:.4g}" for each in bills]),
        ("days", [f"{each.days:,.1f}" for each in bills]),
        ("device hours", [f"{each.device_hours:,.0f}" for each in bills]),
        ("tokens/day", [f"{each.tokens_a_day:.3g}" for each in bills]),
    ]
    if any(each.cost is not None for each in bills):
        parts.append(("cost", ["-" if each.cost is None else f"{each.cost:,.0f}" for each in bills]))
    energy = ["-" if each.megawatt_hours is None else f"{each.megawatt_hours:,.0f}" for each in bills]
    parts.append(("MWh", energy))
    if terms.failures:
        parts.append(("goodput", [f"{100 * each.goodput:.1f}%" for each in bills]))
    parts.append(("band", [f"±{100 * each.band:.0f}%" for each in bills]))
    lines = [f"{terms.tokens:.3g} tokens", ""]
    return lines + [line.rstrip() for line in columns(parts, left=(0,), gap="  ")]
