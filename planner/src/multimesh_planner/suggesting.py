"""The configurations that suit a model and a cluster: what ``python -m multimesh suggest`` prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from multimesh.core import checks
from multimesh.core.text import amount
from multimesh.errors import DoesNotFitError, UsageError

from multimesh_planner.best_first import Option, Progress, Search, Where
from multimesh_planner.hardware import devices as tables
from multimesh_planner.space import Training, spread
from multimesh_planner.suggestions import Suggestions, describe_how

COUNT = 10
EQUAL = 0.05
"""Two configurations of one model and cluster whose forecasts differ by less are about as fast."""

_SIMPLE: tuple[Where, ...] = (
    lambda how: how.pp == how.tp == how.cp == 1 and how.recompute == "none",
    lambda how: how.pp == how.tp == how.cp == 1,
    lambda how: how.pp == 1,
    lambda how: how.interleave == 1 and how.schedule == "1f1b",
)
"""What is simple, the simplest first."""

_TIMES = (2, 4, 8, 16, 32, 64)  # so many times the devices are tried to find out what would fit


def suggest(
    job: Training,
    devices: int,
    *,
    count: int = COUNT,
    accepts: Where = lambda how: True,
    progress: Progress | None = None,
) -> Suggestions:
    """Find the ``count`` fastest configurations of a training on so many devices that fit into memory.

    ``accepts`` is asked last, whether a configuration can be run. ``progress`` is called with the number of simulations
    so far, and what is looked for.

    Raises ``DoesNotFitError`` if none fits, with the nearest, and what would make it fit; ``UsageError`` if what is
    fixed, the batch and the devices leave no configuration.
    """
    search = Search(spread(job, checks.integer("suggest: devices", devices, 1)), progress)
    if not search.considered:
        raise UsageError(f"suggest: {search.space.impossible()}")
    options = search.best(count, accepts=accepts)
    if not options:
        raise DoesNotFitError(_too_large(job, devices, search))
    simple, roomy = _simplest(search, options[0], accepts), list[Option]()
    if simple.may_not_fit(search.limit):
        memory = search.limit / (1 + simple.memory_band)
        roomy = search.best(1, accepts=accepts, memory=memory, goal="more room")
    options = sorted(dict.fromkeys((*options, simple, *roomy)), key=lambda option: option.seconds)
    return Suggestions(
        f"{job.model.name} on {devices} {job.device.name}, batch {job.batch} x {job.sequence} tokens",
        tuple(options),
        job.bytes,
        search.considered,
        search.simulated,
        simplest=simple.how,
        roomy=roomy[0].how if roomy else None,
    )


def _simplest(search: Search, fastest: Option, accepts: Where) -> Option:
    """Return the fastest of the simplest configurations that are about as fast as the fastest of all."""
    within = (1 + EQUAL) * fastest.seconds
    for simple in _SIMPLE:
        if simple(fastest.how):
            return fastest
        if options := search.best(1, simple, accepts=accepts, within=within, goal="the simplest"):
            return options[0]
    return fastest


def _too_large(job: Training, devices: int, search: Search) -> str:
    """Say which configuration is nearest to fit, and by which change it would."""
    nearest, limit = search.nearest(), amount(search.limit, "bytes")
    if nearest is None or nearest[1] <= search.limit:
        return f"suggest: nothing that fits into {limit} can be run; fix fewer fields"
    how, needed = nearest
    remedies = " or ".join(_remedies(job, devices, needed)) or "a smaller model, or fix fewer fields"
    return (
        f"suggest: nothing fits into {limit} of a device; the nearest, {describe_how(how)}, "
        f"needs {amount(needed, 'bytes')}, {amount(needed - search.limit, 'bytes')} too many; use {remedies}"
    )


def _remedies(job: Training, devices: int, needed: float) -> Iterator[str]:
    def fits(job: Training, devices: int) -> bool:
        search = Search(spread(job, devices))
        return any(c.bytes <= job.bytes and search.needed(c.how) <= job.bytes for c in search.list_frugal())

    if more := next((devices * times for times in _TIMES if fits(job, devices * times)), None):
        yield f"{more} devices"
    offload, memory = job.flags
    if offload and not job.offloads and fits(dataclasses.replace(job, offloads=True), devices):
        yield f"the host's memory ({offload})"
    share = job.bytes / job.device.memory
    if larger := [name for name in tables.device_names() if share * tables.device(name).memory >= needed]:
        yield f"devices with more memory ({', '.join(larger)})"
    if (share := (needed + job.workspace) / job.device.memory) <= 0.95:
        yield f"more of the memory ({memory}; {math.ceil(100 * share)} % of it would do)"
