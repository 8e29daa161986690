"""The configurations that suit a model and a cluster: what ``python -m multimesh suggest`` prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from multimesh.core import checks, names
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


@names.accept_former("told", "progress")
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
    search = _search(job, checks.integer("suggest: devices", devices, 1), progress)
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
        len(search.candidates),
        search.simulated,
        simplest=simple.how,
        roomy=roomy[0].how if roomy else None,
    )


def _search(job: Training, devices: int, progress: Progress | None = None) -> Search:
    """Search all configurations of so many devices.

    Raises ``UsageError`` if there is none.
    """
    space = spread(job, devices)
    search = Search(space, progress)
    if not search.candidates:
        raise UsageError(f"suggest: {space.impossible()}")
    return search


def _simplest(search: Search, fastest: Option, accepts: Where) -> Option:
    """Return the fastest of the simplest configurations that are about as fast as the fastest of all."""
    within = (1 + EQUAL) * fastest.seconds
    for simple in _SIMPLE:
        if simple(fastest.how):
            return fastest
        if options := search.best(1, simple, accepts=accepts, within=within, goal="the simplest"):
            return options[0]
    return fastest


@names.accept_former("told", "progress")
def fewest(job: Training, most: int, each: int, tokens: float, progress: Progress | None = None) -> tuple[int, Option]:
    """Find the fewest devices that reach so many tokens a second, of all, and their best configuration.

    Whole nodes of ``each`` devices are tried, ``most`` devices at most; ``progress`` is as in `suggest`.

    Raises ``UsageError`` if no number of devices reaches it.
    """
    if not tokens > 0:
        raise checks.refuse("suggest: budget", "a number of tokens a second above 0", tokens)
    seconds = job.batch * job.sequence / tokens
    peak = max(job.device.peak(str(job.fixed.get("precision", name))) for name in job.precisions)
    least = int(tokens * job.model.operations(job.sequence) / peak)
    fastest: Option | None = None
    for devices in range(max(1, least // each) * each, most + 1, each):
        try:
            search = _search(job, devices, progress)
        except UsageError:
            continue
        if options := search.best(1, within=seconds, goal=f"{devices} devices"):
            return devices, options[0]
        if devices + each > most:
            fastest = next(iter(search.best(1)), None)
    reached = f"; {most} reach {fastest.tokens_per_second * most:,.0f}" if fastest else ""
    raise UsageError(
        f"suggest: no {most} devices or fewer reach {tokens:,.0f} tokens a second with a batch of {job.batch} "
        f"sequences{reached}; allow more nodes, or use a larger batch"
    )


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
        return any(c.bytes <= job.bytes and search.needed(c.how) <= job.bytes for c in search.bound_all())

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
