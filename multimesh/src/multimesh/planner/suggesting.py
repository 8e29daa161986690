"""The configurations that suit a model and a cluster: what ``python -m multimesh suggest`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from multimesh.core import checks
from multimesh.core.text import amount
from multimesh.errors import DoesNotFitError, UsageError
from multimesh.hardware import devices as known
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack, stack
from multimesh.planner import lost
from multimesh.planner.best_first import Option, Search, Told, Where
from multimesh.planner.bounds import Transformers
from multimesh.planner.configuration import USUAL
from multimesh.planner.space import Space
from multimesh.planner.suggestions import Suggestions
from multimesh.planner.transformer import Transformer

SHARE = 0.75
"""Part of a device's memory that JAX takes by default."""

COUNT = 10
EQUAL = 0.05
"""Two configurations of one model and cluster whose forecasts differ by less are about as fast."""

_MOST_TIMES = 64  # so many times the devices are tried at most to find out what would fit


@dataclass(frozen=True)
class Training:
    """A model to train, with the devices that it may use.

    Attributes
    ----------
    model, batch, sequence
        As in `multimesh.planner.step.forecast`.
    device
        An accelerator.
    gpus
        Accelerators of a node; 0: as many as the fast link connects.
    fixed
        Fields of `Configuration` that keep their values.
    software
        The software that runs it. ``reserved`` is not counted, because it is no part of ``limit``.
    limit
        Bytes of a device that may be used; 0: what JAX takes by default.
    least_band
        Half width of the bands at least.
    policies
        Of recomputation: those that the software has, the most frugal last.
    precisions, sharded, offloads, sharded_alone, gathers
        As in `multimesh.planner.space.Space`.
    """

    model: Transformer
    batch: int
    sequence: int
    device: Device
    gpus: int = 0
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    software: Stack = dataclasses.field(default_factory=lambda: stack("modern"))
    limit: float = 0.0
    least_band: float = 0.0
    policies: tuple[str, ...] = USUAL
    precisions: tuple[str, ...] = ("bf16",)
    sharded: str = "optimizer"
    offloads: bool = False
    sharded_alone: str = ""
    gathers: bool = False

    @property
    def bytes(self) -> float:
        """Bytes of a device that may be used."""
        return self.limit or SHARE * self.device.memory

    def search(self, devices: int, told: Told | None = None) -> Search:
        """Search all configurations of so many devices.

        Raises ``UsageError`` if there is none.
        """
        costs, space = self._costs(devices)
        found = Search(costs, self.bytes, told)
        if not found.candidates:
            raise UsageError(f"suggest: {space.impossible()}")
        return found

    def fits(self, devices: int) -> bool:
        """Return whether any configuration of so many devices fits."""
        costs, _ = self._costs(devices)
        return any(
            candidate.bytes <= self.bytes and costs.bytes(candidate.how) <= self.bytes
            for candidate in costs.candidates()
        )

    def _costs(self, devices: int) -> tuple[Transformers, Space]:
        where = self.device
        if 0 < self.gpus < where.domain <= 8:  # larger domains span nodes
            where = dataclasses.replace(where, domain=self.gpus)
        more = self.policies, self.precisions, self.sharded, self.offloads, self.sharded_alone, self.gathers
        space = Space(self.model, where, devices, self.batch, self.sequence, self.fixed, *more)
        return Transformers(space, dataclasses.replace(self.software, reserved=0.0), self.bytes, self.least_band), space


def suggest(
    job: Training,
    devices: int,
    *,
    count: int = COUNT,
    accepts: Where = lambda how: True,
    told: Told | None = None,
    front: bool = False,
) -> Suggestions:
    """Find the fastest configurations that fit into memory.

    Parameters
    ----------
    job
        The model to train.
    devices
        Of the cluster.
    count
        How many to find.
    accepts
        Asked last: whether a configuration can be run.
    told
        Called with the number of simulations so far, and what is looked for.
    front
        Whether to find also the fastest ones in less memory, for the picture.

    Raises
    ------
    DoesNotFitError
        If none fits. The message names the nearest, and what would make it fit.
    UsageError
        If what is fixed, the batch and the devices leave no configuration.
    """
    search = job.search(checks.whole("suggest: devices", devices, 1), told)
    options = search.best(count, accepts=accepts)
    if not options:
        raise DoesNotFitError(_too_large(job, devices, search))
    simple = _simplest(search, options[0], accepts)
    if simple not in options:
        options = sorted((*options, simple), key=lambda option: option.seconds)
    return Suggestions(
        f"{job.model.name} on {devices} {job.device.name}, batch {job.batch} x {job.sequence} tokens",
        tuple(options),
        tuple(lost.sentences(search, options[0])),
        job.bytes,
        len(search.candidates),
        search.simulated,
        front=tuple(search.front(accepts)) if front else (),
        simplest=simple.how,
    )


_SIMPLE: tuple[Where, ...] = (
    lambda how: how.pp == how.tp == how.cp == 1 and how.recompute == "none",
    lambda how: how.pp == how.tp == how.cp == 1,
    lambda how: how.pp == 1,
    lambda how: how.interleave == 1 and how.schedule == "1f1b",
)
"""What is simple, the simplest first."""


def _simplest(search: Search, fastest: Option, accepts: Where) -> Option:
    """Return the fastest of the simplest configurations that are about as fast as the fastest of all."""
    within = (1 + EQUAL) * fastest.seconds
    for simple in _SIMPLE:
        if simple(fastest.how):
            return fastest
        if found := search.best(1, simple, accepts=accepts, within=within, what="the simplest"):
            return found[0]
    return fastest


def fewest(job: Training, most: int, each: int, tokens: float, told: Told | None = None) -> tuple[int, Option]:
    """Find the fewest devices that reach a number of tokens a second, and their best configuration.

    Parameters
    ----------
    job
        The model to train.
    most, each
        Devices at most, and of a node: whole nodes are tried.
    tokens
        A second, on all devices.
    told
        As in `suggest`.

    Raises
    ------
    UsageError
        If no number of devices reaches it.
    """
    if not tokens > 0:
        raise checks.refuse("suggest: budget", "a number of tokens a second above 0", tokens)
    seconds = job.batch * job.sequence / tokens
    peak = max(job.device.peak(str(job.fixed.get("precision", name))) for name in job.precisions)
    least = job.batch * job.sequence * job.model.operations(job.sequence) / peak / seconds
    nodes = max(1, int(least / each))
    fastest: Option | None = None
    for devices in range(nodes * each, most + 1, each):
        try:
            search = job.search(devices, told)
        except UsageError:
            continue
        found = search.best(1, within=seconds, what=f"{devices} devices")
        if found:
            return devices, found[0]
        if devices + each > most:
            fastest = next(iter(search.best(1)), None)
    reached = f"; {most} reach {fastest.tokens_per_second * most:,.0f}" if fastest else ""
    raise UsageError(
        f"suggest: no {most} devices or fewer reach {tokens:,.0f} tokens a second with a batch of {job.batch} "
        f"sequences{reached}; allow more nodes, or use a larger batch"
    )


def _too_large(job: Training, devices: int, search: Search) -> str:
    """Say which configuration is nearest to fit, and by which change it would."""
    nearest = search.nearest()
    if nearest is None or nearest[1] <= search.limit:
        return f"suggest: nothing that fits into {amount(search.limit, 'bytes')} can be run; fix fewer fields"
    how, needed = nearest
    remedies = list(_remedies(job, devices, needed))
    return (
        f"suggest: nothing fits into {amount(search.limit, 'bytes')} of a device; "
        f"the nearest, {lost.describe_how(how)}, "
        f"needs {amount(needed, 'bytes')}, {amount(needed - search.limit, 'bytes')} too many; use "
        f"{' or '.join(remedies) or 'a smaller model, or fix fewer fields'}"
    )


def _remedies(job: Training, devices: int, needed: float) -> Iterator[str]:
    times = 2
    while times <= _MOST_TIMES:
        if job.fits(devices * times):
            yield f"{devices * times} devices"
            break
        times *= 2
    share = job.bytes / job.device.memory
    larger = [name for name in known.device_names() if share * known.device(name).memory >= needed]
    if larger:
        yield f"devices with more memory ({', '.join(larger)})"
    if needed <= 0.95 * job.device.memory:
        yield f"more of the memory ({100 * needed / job.device.memory:.0f} % of it would do)"
