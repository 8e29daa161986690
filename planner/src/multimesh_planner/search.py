"""The search for the fastest configurations that fit, which ``python -m multimesh suggest`` prints.

It tries what has the best bound first, until no bound is below what was found.

A mesh has a lower bound of its seconds, and each of its configurations has one of its seconds and bytes. Only meshes
whose bounds are below what was found so far are searched, and only such configurations are simulated, each once, so
the result is that of simulating all.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from multimesh.core import checks
from multimesh.core.text import amount
from multimesh.errors import DoesNotFitError, UsageError

from multimesh import schedules
from multimesh_planner import bands, footprint, layer_seconds, step
from multimesh_planner.configuration import Configuration
from multimesh_planner.hardware.devices import device, device_names
from multimesh_planner.layer_seconds import LayerParts
from multimesh_planner.space import Space, Training, spread
from multimesh_planner.suggestions import Option, Suggestions, describe_how

T = TypeVar("T")
Where = Callable[[Configuration], bool]
Progress = Callable[[int, str], None]

EQUAL = 0.05
"""Two configurations of one model and cluster whose forecasts differ by less are about as fast."""

_CLOSE = 1e-3  # a partition that is faster by less is not worth a flag
_SIMPLE: tuple[Where, ...] = (
    lambda how: how.pp == how.tp == how.cp == 1 and how.recompute == "none",
    lambda how: how.pp == how.tp == how.cp == 1,
    lambda how: how.pp == 1,
    lambda how: how.interleave == 1 and how.schedule == "1f1b",
)
"""What is simple, the simplest first."""

_TIMES = (2, 4, 8, 16, 32, 64)  # so many times the devices are tried to find out what would fit


class Candidate(NamedTuple):
    """A configuration, with seconds and bytes that it takes at least."""

    how: Configuration
    seconds: float
    bytes: float


def suggest(
    job: Training, devices: int, *, count: int = 10, accepts: Where = lambda how: True, progress: Progress | None = None
) -> Suggestions:
    """Find the ``count`` fastest configurations of a training on so many devices that fit into memory.

    ``accepts`` is asked last, whether a configuration can be run. ``progress`` is called with the number of simulations
    so far, and what is looked for.

    Raises ``DoesNotFitError`` if none fits, with the nearest, and what would make it fit; ``UsageError`` if what is
    fixed, the batch and the devices leave no configuration.
    """
    search = Search(spread(job, checks.integer("suggest: devices", devices, 1)), accepts, progress)
    if not search.considered:
        raise UsageError(f"suggest: {search.space.impossible()}")
    options = search.best(count)
    if not options:
        raise DoesNotFitError(_too_large(job, devices, search))
    simple, roomy = _simplest(search, options[0]), list[Option]()
    if simple.may_not_fit(search.limit):
        roomy = search.best(1, memory=search.limit / (1 + simple.memory_band), goal="more room")
    options = sorted(dict.fromkeys((*options, simple, *roomy)), key=lambda option: option.seconds)
    title = f"{job.model.name} on {devices} {job.device.name}, batch {job.batch} x {job.sequence} tokens"
    counts, room = (search.considered, search.simulated), roomy[0].how if roomy else None
    return Suggestions(title, tuple(options), job.bytes, *counts, simplest=simple.how, roomy=room)


def _simplest(search: Search, fastest: Option) -> Option:
    """Return the fastest of the simplest configurations that are about as fast as the fastest of all."""
    for simple in _SIMPLE:
        if simple(fastest.how):
            return fastest
        if options := search.best(1, simple, within=(1 + EQUAL) * fastest.seconds, goal="the simplest"):
            return options[0]
    return fastest


def _too_large(job: Training, devices: int, search: Search) -> str:
    """Name the configuration that is nearest to fit, and the change by which it would."""
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
        return any(c.bytes <= job.bytes and search.peak_bytes(c.how) <= job.bytes for c in search.list_frugal())

    if more := next((devices * times for times in _TIMES if fits(job, devices * times)), None):
        yield f"{more} devices"
    offload, memory = job.flags
    if offload and not job.offloads and fits(dataclasses.replace(job, offloads=True), devices):
        yield f"the host's memory ({offload})"
    share = job.bytes / job.device.memory
    if larger := [name for name in device_names() if share * device(name).memory >= needed]:
        yield f"devices with more memory ({', '.join(larger)})"
    if (share := (needed + job.workspace) / job.device.memory) <= 0.95:
        yield f"more of the memory ({memory}; {math.ceil(100 * share)} % of it would do)"


class Search:
    """All candidates of a space, each simulated at most once.

    Bounds of their seconds and bytes are below what any table of a schedule can reach, and need no simulation.
    ``accepts`` and ``progress`` are as in `suggest`.
    """

    def __init__(self, space: Space, accepts: Where = lambda how: True, progress: Progress | None = None) -> None:
        self.space, self.software, self.limit = space, space.software, space.bytes
        self.accepts, self.progress = accepts, progress
        self.simulated = self.considered = 0
        self._computed: dict[tuple[object, ...], Any] = {}  # by its name, and the fields that it depends on
        self._bounded: list[Candidate] = []  # the fastest first
        self._numbers = itertools.count()  # order what is equally fast
        self._queue: list[tuple[float, int, Candidate | Configuration]] = []  # beside these: a heap, also of meshes
        for grid in space.grids():
            hows = tuple(space.within(grid))
            self.considered += len(hows)
            self._queue.append((self._bound_grid(hows), next(self._numbers), grid))
        heapq.heapify(self._queue)

    def best(
        self,
        count: int,
        where: Where = lambda how: True,
        within: float = float("inf"),
        memory: float | None = None,
        goal: str = "the best",
    ) -> list[Option]:
        """Find the ``count`` fastest options that fit into memory, the fastest first.

        Options that differ only in schedule, recomputation or layers of their stages are one: the fastest of them.
        ``where`` says which configurations; `accepts` is asked last, of those that are fast and fit. They take
        ``within`` seconds and ``memory`` bytes at most, by default the limit. ``goal`` is for the progress.
        """
        limit = self.limit if memory is None else memory
        best: dict[tuple[object, ...], Option] = {}
        for candidate in self._sort():
            worst = within if len(best) < count else min(within, _rank(best)[count - 1].seconds)
            if candidate.seconds > worst:
                break
            key = _shape(candidate.how)
            slow = key in best and best[key].seconds <= candidate.seconds
            if slow or candidate.bytes > limit or not where(candidate.how):
                continue
            option = self.simulate(candidate.how, limit, goal)
            if option is None or option.seconds > worst or not self.accepts(option.how):
                continue
            if key not in best or option.seconds < best[key].seconds:
                best[key] = option
        return _rank(best)[:count]

    def simulate(self, how: Configuration, limit: float, goal: str = "") -> Option | None:
        """Simulate a configuration; None: it does not fit, or its schedule has no table of this shape."""

        def run() -> Option:
            self.simulated += 1
            if self.progress:
                self.progress(self.simulated, goal)
            one = step.step_time(self.space.model, how, self.space.device, self.software)
            band = max(bands.band(one, self.space.run), self.space.least_band)
            return Option(**vars(one), band=band, memory_band=bands.memory_band(one))

        return self._once(("option", how), run) if self.peak_bytes(how) <= limit else None

    def peak_bytes(self, how: Configuration) -> float:
        """Return the bytes of the fullest device; infinity: the schedule has no table of this shape."""

        def count() -> float:
            with suppress(UsageError):
                return max(part.total for part in footprint.peak_bytes(self.space.model, how, self.software))
            return float("inf")

        return self._once(("bytes", how), count)

    def nearest(self) -> tuple[Configuration, float] | None:
        """Return the configuration that needs the fewest bytes, with these; None if there is none."""
        nearest, fewest = None, float("inf")
        for candidate in sorted(self.list_frugal(), key=lambda candidate: candidate.bytes):
            if candidate.bytes >= fewest:
                break
            if (needed := self.peak_bytes(candidate.how)) < fewest:
                nearest, fewest = (candidate.how, needed), needed
        return nearest

    def list_frugal(self) -> Iterator[Candidate]:
        """Yield the configurations that compute most again, with bounds of their bytes."""
        for grid in self.space.grids():
            hows = tuple(self.space.within(grid))
            most = (how for how in hows if how.recompute == hows[-1].recompute)
            yield from (Candidate(cut, 0.0, self._least(cut, 1)) for how in most for cut in self._cuts(how))

    def _sort(self) -> Iterator[Candidate]:
        """Yield the configurations that may fit, the fastest first. Those of a mesh are bounded when it is its turn."""
        yield from self._bounded
        while self._queue:
            _, _, first = heapq.heappop(self._queue)
            if isinstance(first, Candidate):
                self._bounded.append(first)
                yield first
            else:
                for candidate in self._bound(first):
                    heapq.heappush(self._queue, (candidate.seconds, next(self._numbers), candidate))

    def _bound_grid(self, hows: Iterable[Configuration]) -> float:
        """Return a lower bound of a step of all configurations of a mesh: no submesh waits, all have equal work."""
        model, least = self.space.model, float("inf")
        for how, parts in {id(parts): (how, parts) for how in hows if (parts := self._find_parts(how))}.values():
            work = parts.layer.total * (model.layers - model.dense_layers) + parts.first.total * model.dense_layers
            work += parts.embedding.total + parts.head.total + 2 * parts.blocked * how.stages
            least = min(least, self._finish(how, how.microbatches * work / how.pp))
        return least

    def _bound(self, grid: Configuration) -> Iterator[Candidate]:
        """Yield the configurations of a mesh that may fit, with their bounds."""
        for how in self.space.within(grid):
            before = float("inf")  # seconds of the other cut into stages: one that is not clearly faster is left out
            for cut in self._cuts(how):
                size = self._least(cut, self._in_flight(cut))
                if size <= self.limit:
                    seconds = self._bound_seconds(cut)
                    if seconds < (1 - _CLOSE) * before:
                        yield Candidate(cut, seconds, size)
                    before = seconds

    def _bound_seconds(self, how: Configuration) -> float:
        """Return a lower bound of a step."""
        parts = self._find_parts(how)
        stages = layer_seconds.times(self.space.model, how, parts)
        shape = how.schedule, how.pp, how.microbatches
        return self._finish(how, step.least_seconds(*shape, stages, parts.hop, parts.blocked))

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the result of the first call with such a key: a name, and the fields that the result depends on."""
        if key not in self._computed:
            self._computed[key] = make()
        result: T = self._computed[key]
        return result

    def _find_parts(self, how: Configuration) -> LayerParts:
        """Return seconds of a layer and of the other parts."""
        key = (
            *("parts", how.microbatch, how.tp, how.cp, how.ep, how.etp, how.fsdp, how.pp > 1, how.interleave > 1),
            *(how.recompute, how.precision, how.offload, how.microbatches if how.gather_once else 0),
            *(how.sequence_parallel, how.dp if how.sharded == "parameters" else 0),
        )
        return self._once(key, lambda: layer_seconds.parts(self.space.model, how, self.space.device, self.software))

    def _finish(self, how: Configuration, loop: float) -> float:
        """Return the seconds of a step with a loop of so many."""
        model, on, parts = self.space.model, self.space.device, self._find_parts(how)
        axes = how.dp, how.fsdp, how.cp, how.pp
        key = ("beside", *axes, how.sharded, how.offload_optimizer, how.microbatches, id(parts))
        after_loop = self._once(key, lambda: sum(step.after(model, how, on, self.software, parts)))
        return loop * (1 + step.stragglers(how, on, self.software)) + after_loop

    def _least(self, how: Configuration, in_flight: int) -> float:
        """Return the fewest bytes of the fullest device among the first and the last submesh."""
        if how.pp == 1:
            return self.peak_bytes(how)
        last = schedules.get(how.schedule).placement(how.pp)[-1]
        least = {0: in_flight} if last == 0 else {0: in_flight, how.pp - 1: 1}
        axes = how.microbatch, how.tp, how.cp, how.ep, how.fsdp, how.dp
        key = ("layer", *axes, how.recompute, how.precision, how.offload, how.gather_once)
        layer = self._once(key, lambda: footprint.layer_bytes(self.space.model, how, self.software))
        return max(part.total for part in footprint.of_rows(self.space.model, how, self.software, least, layer))

    @staticmethod
    def _in_flight(how: Configuration) -> int:
        """Return a lower bound of the activations of stages that the first submesh holds at once."""
        p, v, m = how.pp, how.interleave, how.microbatches
        if v == 1:
            return {"1f1b": min(m, p), "zb-h1": min(m, p), "eager-1f1b": min(m, 2 * p - 1)}.get(how.schedule, 1)
        if how.schedule in ("1f1b", "interleaved", "interleaved-zb") and m >= p:
            return min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
        return 1

    def _cuts(self, how: Configuration) -> Iterator[Configuration]:
        """Yield the configuration with layers for its stages: equal ones if these divide, and balanced ones."""
        if "layers" in self.space.fixed:
            sizes = self.space.fixed["layers"]
            if isinstance(sizes, tuple) and len(sizes) == how.stages:
                yield how.with_policy(layers=sizes)
            return
        number, over = divmod(self.space.model.layers, how.stages)
        if not over:
            yield how
        if how.pp == 1:
            return
        route, parts = schedules.get(how.schedule).placement(how.pp), self._find_parts(how)
        key = "balanced", id(parts), how.pp, how.interleave, route
        sizes = self._once(key, lambda: layer_seconds.balance(self.space.model, how, parts, route))
        if over or set(sizes) != {number}:
            yield how.with_policy(layers=sizes)


def _shape(how: Configuration) -> tuple[object, ...]:
    return how.dp, how.fsdp, how.tp, how.pp, how.cp, how.ep, how.interleave, how.microbatch, how.sequence_parallel


def _rank(options: dict[tuple[object, ...], Option]) -> list[Option]:
    return sorted(options.values(), key=lambda option: option.seconds)
