"""Devices and their links: what data sheets say, and what was fitted to published runs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from multimesh.core import checks
from multimesh.errors import UsageError

from multimesh_planner import tables

PRECISIONS = ("bf16", "fp8", "fp4")

_LACKING = ("fp8", "fp4", "rates.matmul_fp8", "rates.matmul_fp4", "rates.flash2")  # may be 0

EXAMPLE = """\
  [my-machine]               # --device my-machine --devices-file FILE
  like = "h100"              # takes over all else: rates, and shares of them that are reached
  network = 25e9             # bytes a second that a device sends to other nodes
  domain = 8                 # devices that the fast link connects
  link = 450e9               # bytes a second over it
  memory = 80e9              # bytes
  bandwidth = 3.35e12        # of the memory, bytes a second
  bf16 = 989e12              # operations a second, without sparsity"""
"""A table of a device that users can complete."""


@dataclass(frozen=True)
class Rates:
    """Shares of a device's rates that kernels and collectives reach."""

    # matmul_bf16, matmul_fp8, matmul_fp4: a large matrix product, of the peak of its precision
    matmul_bf16: float
    attention: float  # fused attention, of the bfloat16 peak
    # memory, link, network: of the bandwidth of the memory, the fast link and the network
    memory: float
    link: float
    network: float
    matmul_fp8: float = 0.0
    matmul_fp4: float = 0.0
    flash2: float = 0.0  # FlashAttention 2, which knows nothing of units that came later; 0: as attention


@dataclass(frozen=True)
class Device:
    """An accelerator in its machine."""

    name: str  # as users write it
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes a second
    bf16: float  # operations a second without sparsity; a multiplication and an addition are two
    domain: int  # devices that the fast link connects
    # link, network: bytes a second that a device sends over the fast link, and to other domains, in one direction
    link: float
    network: float
    rates: Rates  # shares of these rates that are reached
    # fp8, fp4: as bf16; 0: it has no such unit
    fp8: float = 0.0
    fp4: float = 0.0
    host: float = 25e9  # bytes a second to or from the host's memory
    clock: float = 1.0  # share of the sheet's rates that a limit of power leaves
    generation: str = "own"  # whose fitted rates it has; ``own``: it came with rates
    sources: str = ""  # where the numbers are from

    def __post_init__(self) -> None:
        """Check the numbers: each is divided by, but for the peak of a unit that the device lacks."""
        numbers = vars(self) | {f"rates.{name}": share for name, share in vars(self.rates).items()}
        for name in numbers.keys() - {"name", "rates", "generation", "sources"}:
            if numbers[name] or name not in _LACKING:
                check_positive(f"device {self.name}: {name}", numbers[name])

    def peak(self, precision: str) -> float:
        """Return the operations per second of the data sheet in ``bf16``, ``fp8`` or ``fp4``.

        Raises ``UsageError`` if the device has no such unit.
        """
        rate: float = getattr(self, precision) if precision in PRECISIONS else 0.0
        if not rate:
            raise UsageError(f"device {self.name} computes no {precision}; choose another precision")
        return rate

    def matmul_rate(self, precision: str) -> float:
        """Return the operations per second of a large matrix product.

        A precision without a share of its own has that of the next wider one.
        """
        rates = self.rates
        fp8 = rates.matmul_fp8 or rates.matmul_bf16
        share = {"bf16": rates.matmul_bf16, "fp8": fp8, "fp4": rates.matmul_fp4 or fp8}[precision]
        return self.peak(precision) * self.clock * share


def check_positive(label: str, value: object) -> None:
    """Raise ``UsageError`` for what is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"{label} must be a number above 0, got {value!r}")


def device_names() -> tuple[str, ...]:
    """Return the names of the devices in the table that comes with MultiMesh."""
    return tuple(name for name in tables.read_table("hardware/devices.toml") if name != "fitted")


def device(name: str | Device, file: str | Path | None = None) -> Device:
    """Look a device up, such as ``h100``. A `Device` is returned as it is.

    ``file`` is a TOML file of further devices, in the form of ``devices.toml`` beside this module. A table gives fields
    of `Device` and the ``generation`` whose fitted rates it has, or a table ``rates`` of its own. ``like`` names a
    device whose fields it takes over, for the same accelerator in another machine.

    Raises ``UsageError`` if no table has the device, or the file is none.
    """
    if isinstance(name, Device):
        return name
    devices, name = tables.read_table("hardware/devices.toml"), checks.string("device", name).lower()
    if file is not None:
        try:
            devices = devices | tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"devices: {file} cannot be read: {error}") from None
    if name not in devices or name == "fitted":
        raise UsageError(
            f"device: there is no {name!r}; known are {', '.join(n for n in devices if n != 'fitted')}; or describe it "
            "in a TOML file, of which python -m multimesh suggest --help has an example"
        )
    fields = dict(devices[name])
    if like := fields.pop("like", ""):
        if like not in devices or "like" in devices[like]:
            raise UsageError(f"device {name}: like = {like!r} names no device of the table")
        fields = {**devices[like], **fields}
    generation, rates = fields.pop("generation", None), fields.pop("rates", None)
    fitted = devices["fitted"]
    if rates is None and generation not in fitted:
        raise UsageError(f"device {name}: generation must be one of {', '.join(fitted)}, or give rates")
    try:
        shares = Rates(**(rates or fitted[generation]))
        return Device(name=name, rates=shares, generation="own" if rates else generation, **fields)
    except TypeError as error:
        raise UsageError(f"device {name}: {str(error).split('__init__() ')[-1]}; see the fields of Device") from None
