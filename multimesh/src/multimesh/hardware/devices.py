"""Devices and their links: what data sheets say, and what was fitted to published runs."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from multimesh.core import checks
from multimesh.errors import UsageError
from multimesh.hardware import measured

_MANY = 2**20
PRECISIONS = ("bf16", "fp8", "fp4")
_YOUNG = 2.0  # years
_GROWING = ("matmul_bf16", "matmul_fp8", "matmul_fp4", "attention", "flash2")


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
    # since, early: the year in which software began to know the device, and the share of the rates of products and
    # attention that it lacked then; it is gone after two years
    since: float = 0.0
    early: float = 0.0


@dataclass(frozen=True)
class Device:
    """An accelerator in its machine.

    Attributes
    ----------
    name
        As users write it.
    memory
        Bytes.
    bandwidth
        Of the memory, in bytes a second.
    bf16, fp8, fp4
        Operations a second without sparsity; 0: it has no such unit. A multiplication and an addition are two.
    domain
        Devices that the fast link connects.
    link, network
        Bytes a second that a device sends over the fast link, and to other domains, in one direction.
    rates
        Shares of these rates that are reached.
    generation
        Whose fitted rates it has; ``own``: it came with rates.
    sources
        Where the numbers are from.
    """

    name: str
    memory: float
    bandwidth: float
    bf16: float
    domain: int
    link: float
    network: float
    rates: Rates
    fp8: float = 0.0
    fp4: float = 0.0
    host: float = 25e9
    power: float = 0.0
    clock: float = 1.0
    generation: str = "own"
    sources: str = ""

    def __post_init__(self) -> None:
        """Check the numbers: each is divided by, but for the peak of a unit that the device lacks."""
        for name in ("memory", "bandwidth", "bf16", "domain", "link", "network"):
            _positive(self.name, name, getattr(self, name))
        for name in ("fp8", "fp4"):
            if getattr(self, name):
                _positive(self.name, name, getattr(self, name))
        for name, share in vars(self.rates).items():
            if share or name not in ("matmul_fp8", "matmul_fp4", "flash2", "since", "early"):
                _positive(self.name, f"rates.{name}", share)

    def peak(self, precision: str) -> float:
        """Return the operations per second of the data sheet in ``bf16``, ``fp8`` or ``fp4``.

        Raises ``UsageError`` if the device has no such unit.
        """
        found: float = getattr(self, _check_precision(precision))
        if not found:
            raise UsageError(f"device {self.name} computes no {precision}; choose another precision")
        return found

    def matmul_rate(self, precision: str) -> float:
        """Return the operations per second of a large matrix product.

        A precision without a share of its own has that of the next wider one.
        """
        shares = self.rates.matmul_bf16, self.rates.matmul_fp8, self.rates.matmul_fp4
        wider = shares[: PRECISIONS.index(_check_precision(precision)) + 1]
        return self.peak(precision) * next(share for share in reversed(wider) if share)

    def with_software(self, year: float) -> Device:
        """Return the device as software of a year uses it."""
        young = min(1.0, max(0.0, 1 - (year - self.rates.since) / _YOUNG))
        share = self.clock * (1 - self.rates.early * young)
        if share == 1:
            return self
        slower = {name: getattr(self.rates, name) * share for name in _GROWING}
        return dataclasses.replace(self, rates=dataclasses.replace(self.rates, **slower))

    @property
    def memory_rate(self) -> float:
        """Bytes a second that kernels read and write."""
        return self.bandwidth * self.rates.memory


def _positive(name: str, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"device {name}: {field} must be a number above 0, got {value!r}")


def _check_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        raise checks.refuse("precision", " or ".join(PRECISIONS), precision)
    return precision


def device_names() -> tuple[str, ...]:
    """Return the names of the devices in the table that comes with MultiMesh."""
    return tuple(name for name in _table() if name != "fitted")


def device(name: str | Device, file: str | Path | None = None) -> Device:
    """Look a device up.

    Parameters
    ----------
    name
        Such as ``h100``, in any case; ``cpu`` is this machine's, measured in place. A `Device` is returned as it is.
    file
        A TOML file of further devices, in the form of ``devices.toml`` beside this module. A table gives fields of
        `Device` and the ``generation`` whose fitted rates it has, or a table ``rates`` of its own. ``like`` names a
        device whose fields it takes over, for the same accelerator in another machine.

    Raises
    ------
    UsageError
        If no table has the device, or the file is none.
    """
    if isinstance(name, Device):
        return name
    tables = _table() if file is None else {**_table(), **_read(Path(file))}
    known = [each for each in tables if each != "fitted"]
    wanted = checks.string("device", name).lower()
    if wanted == "cpu" and wanted not in known:
        return _cpu()
    if wanted not in known:
        listed = ", ".join(("cpu", *known))
        raise UsageError(f"device: there is no {name!r}; known are {listed}, or describe it in a TOML file")
    return _make(wanted, tables)


@functools.cache
def _cpu() -> Device:
    """This machine's CPU. Its virtual devices are near, because they share its memory."""
    found = measured.machine()
    return Device(
        name="cpu",
        memory=found.memory,
        bandwidth=found.bandwidth,
        bf16=found.product,
        domain=_MANY,
        link=found.bandwidth / 2,
        network=found.bandwidth / 2,
        rates=Rates(matmul_bf16=1.0, attention=1.0, memory=1.0, link=1.0, network=1.0),
        sources="measured in place: float32 products and copies of NumPy",
    )


def _make(name: str, tables: Mapping[str, Any]) -> Device:
    fields = dict(tables[name])
    like = fields.pop("like", None)
    if like is not None:
        if like not in tables or "like" in tables[like]:
            raise UsageError(f"device {name}: like = {like!r} names no device of the table")
        fields = {**tables[like], **fields}
    generation, rates = fields.pop("generation", None), fields.pop("rates", None)
    if rates is None and generation not in tables["fitted"]:
        raise UsageError(f"device {name}: generation must be one of {', '.join(tables['fitted'])}, or give rates")
    try:
        known = Rates(**(rates or tables["fitted"][generation]))
        return Device(name=name, rates=known, generation="own" if rates else generation, **fields)
    except TypeError as error:
        raise UsageError(f"device {name}: {str(error).split('__init__() ')[-1]}; see the fields of Device") from None


@functools.cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("multimesh.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"devices: {file} cannot be read: {error}") from None
