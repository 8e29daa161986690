"""The measured numbers in the form of ``devices.toml``, for forecasts and suggestions of this cluster."""

from __future__ import annotations

from collections.abc import Sequence

from multimesh.check.verdicts import Row
from multimesh.hardware import measured

_HEAD = """\
# Written by python -m multimesh check --calibrate. Rates are those that the slowest device and link reached, so their
# shares are 1. Use it so: python -m multimesh suggest --device measured --devices-file THIS_FILE ...
"""


def device_table(rows: Sequence[Row]) -> str:
    """Return a TOML table of the device ``measured``, from the rows of a check whose steps passed."""
    numbers: dict[str, float] = {}
    for row in rows:  # device_put comes after pull, and is the better one where both work
        numbers |= row.numbers
    memory = numbers.get("memory") or measured.machine().memory
    links = [numbers[name] for name in ("link", "collective", "network") if name in numbers]
    near = links[0] if links else numbers["copy"] / 2
    far = numbers.get("network", near)
    domain = max(1, int(numbers.get("devices", 1) // numbers.get("hosts", 1)))
    values = {"memory": memory, "bandwidth": numbers["copy"], "bf16": numbers["product"], "link": near, "network": far}
    lines = [f"{name} = {value:.4g}" for name, value in values.items()]
    shares = ", ".join(f"{name} = 1.0" for name in ("matmul_bf16", "attention", "memory", "link", "network"))
    return "\n".join(
        [
            _HEAD,
            "[measured]",
            *lines,
            f"domain = {domain}",
            f"rates = {{ {shares} }}",
            'sources = "multimesh check"',
            "",
        ]
    )
