"""The search for the fastest configurations that fit: best bound first, until no bound is below what was found.

A cost model gives candidates with lower bounds of their seconds and bytes. Only candidates whose bounds are below what
was found so far are simulated, each once, so the result is that of simulating all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from multimesh.errors import UsageError
from multimesh.planner import bands
from multimesh.planner.configuration import Configuration
from multimesh.planner.step import Step

Where = Callable[[Configuration], bool]
Told = Callable[[int, str], None]

_LESS = 0.05  # share of the memory by which the next of a front needs less
_SLOWEST = 1.3  # times the seconds of the first of a front


@dataclass(frozen=True)
class Bounded:
    """A configuration, with seconds and bytes that it takes at least."""

    how: Configuration
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Option:
    """A simulated configuration.

    Attributes
    ----------
    how
        The configuration.
    seconds, band
        Of a step, and half the width of the band around it, relative; None: not known.
    tokens_per_second
        On each device.
    utilization
        Model FLOPs utilization.
    bubble
        Share of the loop in which a submesh waits, on average.
    bytes
        Of the fullest device.
    shares
        Parts of the seconds, by name.
    nearest
        The measured run that is most like it, and how far its forecast was off.
    memory_band
        Half width of the band around ``bytes``, relative; None: not known.
    memory_parts
        Parts of ``bytes``, by name.
    checked
        Further remarks, such as that the plan of the whole step needs as many bytes.
    """

    how: Configuration
    seconds: float
    band: float | None
    tokens_per_second: float
    utilization: float
    bubble: float
    bytes: float
    shares: tuple[tuple[str, float], ...]
    checked: str = ""
    nearest: str = ""
    memory_band: float | None = None
    memory_parts: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of_step(cls, step: Step, least_band: float = 0.0) -> Option:
        """Return the option of a forecast. ``least_band`` is the smallest half-width of its band."""
        return cls(
            step.how,
            step.seconds,
            max(bands.band(step), least_band),
            step.tokens_per_second,
            step.utilization,
            step.bubble,
            step.bytes,
            step.shares,
            nearest=str(bands.nearest(step)),
            memory_band=bands.memory_band(step),
            memory_parts=tuple(vars(max(step.memory, key=lambda held: held.total)).items()),
        )

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.shares, key=lambda share: share[1])[0]


class CostModel(Protocol):
    """The problem of a search: its configurations, and bounds of each."""

    def candidates(self) -> Iterable[Bounded]:
        """Return all configurations, with their bounds."""

    def bytes(self, how: Configuration) -> float:
        """Return the bytes of the fullest device."""

    def option(self, how: Configuration) -> Option:
        """Simulate a step."""


class Search:
    """All candidates of a cost model, each simulated at most once.

    Parameters
    ----------
    costs
        The cost model.
    limit
        Bytes of a device.
    told
        Called with the number of simulations so far, and what is looked for.
    """

    def __init__(self, costs: CostModel, limit: float, told: Told | None = None) -> None:
        self.costs, self.limit, self.told = costs, limit, told
        self.candidates = sorted(costs.candidates(), key=lambda candidate: candidate.seconds)
        self.simulated = 0
        self._bytes: dict[Configuration, float] = {}
        self._options: dict[Configuration, Option] = {}

    def best(
        self,
        count: int,
        where: Where = lambda how: True,
        *,
        accepts: Where = lambda how: True,
        within: float = float("inf"),
        memory: float | None = None,
        what: str = "the best",
    ) -> list[Option]:
        """Find the fastest options that fit into memory, the fastest first.

        Options that differ only in schedule, recomputation or layers of their stages are one: the fastest of them.

        ``count``: how many.
        ``where``: which configurations.
        ``accepts``: asked last, of those that are fast and fit.
        ``within``: seconds at most.
        ``memory``: bytes of a device; None: the limit.
        ``what``: the words for the progress bar.
        """
        limit = self.limit if memory is None else memory
        found: dict[tuple[object, ...], Option] = {}
        for candidate in self.candidates:
            worst = within if len(found) < count else min(within, _rank(found)[count - 1].seconds)
            if candidate.seconds > worst:
                break
            key = _alike(candidate.how)
            if candidate.bytes > limit or not where(candidate.how):
                continue
            if key in found and found[key].seconds <= candidate.seconds:
                continue
            option = self.option(candidate.how, limit, what)
            if option is None or option.seconds > worst or not accepts(option.how):
                continue
            if key not in found or option.seconds < found[key].seconds:
                found[key] = option
        return _rank(found)[:count]

    def front(self, accepts: Where = lambda how: True) -> Iterator[Option]:
        """Yield the fastest option, then the fastest in less memory, and so on, up to `_SLOWEST` times as slow."""
        memory, within = self.limit, float("inf")
        while found := self.best(1, accepts=accepts, within=within, memory=memory, what="less memory"):
            yield found[0]
            memory, within = (1 - _LESS) * found[0].bytes, min(within, _SLOWEST * found[0].seconds)

    def option(self, how: Configuration, limit: float, what: str = "") -> Option | None:
        """Simulate a configuration; None: it does not fit, or its schedule has no table of this shape."""
        try:
            if self.needed(how) > limit:
                return None
            if how not in self._options:
                self._options[how] = self.costs.option(how)
                self.simulated += 1
                if self.told:
                    self.told(self.simulated, what)
        except UsageError:
            self._bytes[how] = float("inf")
            return None
        return self._options[how]

    def needed(self, how: Configuration) -> float:
        """Return the bytes of the fullest device."""
        if how not in self._bytes:
            self._bytes[how] = self.costs.bytes(how)
        return self._bytes[how]

    def nearest(self, where: Where = lambda how: True) -> tuple[Configuration, float] | None:
        """Return the configuration that needs the fewest bytes, with these; None if there is none."""
        best: tuple[Configuration, float] | None = None
        for candidate in sorted((c for c in self.candidates if where(c.how)), key=lambda c: c.bytes):
            if best is not None and candidate.bytes >= best[1]:
                break
            try:
                needed = self.needed(candidate.how)
            except UsageError:
                continue
            if best is None or needed < best[1]:
                best = candidate.how, needed
        return best


def _alike(how: Configuration) -> tuple[object, ...]:
    return how.dp, how.fsdp, how.tp, how.pp, how.cp, how.ep, how.interleave, how.microbatch, how.sequence_parallel


def _rank(found: dict[tuple[object, ...], Option]) -> list[Option]:
    return sorted(found.values(), key=lambda option: option.seconds)
