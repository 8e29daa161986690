"""``schedule="auto"`` within the memory of a device: take a table only if its whole plan fits.

`multimesh.schedules.Auto` bounds activations. The plan also knows everything else that a submesh holds or sends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from multimesh.core import _compat
from multimesh.core.text import amount
from multimesh.errors import UsageError
from multimesh.marking.tracing import pause_gc
from multimesh.observe.memory import MemoryForecast, forecast
from multimesh.passes import pipeline
from multimesh.passes.cutting.parts import Pipeline
from multimesh.passes.pipeline import LAST, Pass, Traced
from multimesh.plan.plan import Plan
from multimesh.processes import agree
from multimesh.schedules import Auto, Choice, Schedule, get
from multimesh.schedules.auto import FOUND

_SEARCHES = 3  # searches in less memory, after a plan that did not fit


@dataclass(frozen=True, eq=False)
class Made:
    """A traced function with its schedules, and the results of its passes by name."""

    traced: Traced
    passes: Mapping[str, Pass]

    @property
    def plan(self) -> Plan:
        """The finished plan."""
        return self.passes[LAST].made

    @property
    def choice(self) -> Choice:
        """The choice that ``auto`` made."""
        return self.plan.choices[0]

    @functools.cached_property
    def needs(self) -> tuple[MemoryForecast, ...]:
        """The bytes that a device of each submesh needs."""
        with pause_gc():
            return forecast(self.plan)

    def over(self, limit: float) -> float:
        """Return the bytes by which the submesh with the largest need exceeds a limit; at most 0 if all fits."""
        return max(need.total for need in self.needs) - limit

    def room(self, limit: float) -> tuple[float, ...]:
        """Return the memory that is left for activations on each submesh of the loop, within a limit for a device.

        The forecast counts bytes on a device, and the choice those of whole arrays. The plan may have other submeshes
        besides, and those of the loop in another order.
        """
        pipelines = (part for part in self.passes["tables"].made.parts if isinstance(part, Pipeline))
        (rows,) = (part.submeshes for part in pipelines if part.choice is not None)
        needs = (self.needs[self.plan.submeshes.index(mesh)] for mesh in rows)
        pairs = zip(needs, self.choice.taken.peaks, strict=True)
        return tuple(
            max(0.0, limit - need.total + need.values) * (peak / need.values if need.values else 1.0)
            for need, peak in pairs
        )


def fit_memory(made: Made) -> Made:
    """Choose the table of a loop with ``schedule="auto"`` so that its plan fits into a device, by forecast.

    If the memory of a device is unknown, the limit is the largest need of 1F1B. If the table does not fit, the search
    runs again with less memory. Then the published tables are tried, the shortest first. If none fits, a warning says
    so, and the table with the least need is taken. If there are several such loops, each only bounds its activations.
    """
    start = made.passes["send_less"]  # schedules decide nothing before it has run
    loops = start.made.loops
    autos = [(n, loop.mark.schedule) for n, loop in enumerate(loops) if isinstance(loop.mark.schedule, Auto)]
    if len(autos) != 1 or len(made.plan.choices) != 1:
        return made
    ((number, auto),) = autos

    def again(schedule: Schedule) -> Made | None:
        traced = replace(made.traced, schedules={number: schedule})
        try:
            done = pipeline.run(traced, after=start)
            return Made(traced, {**made.passes, **{each.name: each for each in done}})
        except UsageError:
            return None  # no table is within its bounds

    device = auto.device if auto.device is not None else _memory_of(made.plan)
    if device is None and auto.memory is not None:
        return made
    limit = device if device is not None else _usual(made, again)
    auto = replace(auto, device=limit)  # also the limit when costs are measured later
    tries = [made]
    if auto.memory is None:
        tries = [again(replace(auto, memory=made.room(limit))) or made]
    best = _first(tries, auto, limit, again)
    if best.over(limit) > 0:
        needs, has = (amount(size, "bytes") for size in (limit + best.over(limit), limit))
        _compat.warn_at(
            loops[number].mark.where,
            f"schedule auto: by the forecast no table fits into {has} on each device; took "
            f"{best.choice.taken.name}, which needs {needs}; use smaller microbatches, jax.checkpoint or more devices",
        )
    return best


def _first(tries: list[Made], auto: Auto, limit: float, again: Callable[[Schedule], Made | None]) -> Made:
    """The first candidate that fits, or else the one with the least need."""
    most = max(max(c.peaks) for c in tries[0].choice.candidates)
    for _ in range(_SEARCHES):
        last = tries[-1]
        if last.over(limit) <= 0:
            return last
        found = again(replace(auto, memory=tuple(map(min, last.choice.limits, last.room(limit)))))
        if found is None:
            break
        tries.append(found)
    without = [FOUND]
    while tries[-1].over(limit) > 0:
        without += [tries[-1].choice.taken.name] * (tries[-1].choice.taken.name not in without)
        found = again(replace(auto, memory=most, without=tuple(without)))
        if found is None:
            return min(tries, key=lambda made: made.over(limit))
        tries.append(found)
    return tries[-1]


def _usual(made: Made, again: Callable[[Schedule], Made | None]) -> float:
    """Return the largest need of 1F1B in bytes, else of the published table with the fewest activations.

    A route of the user's own may have no published table: then it is the need of the table that was found.
    """
    published = {c.name: c for c in made.choice.candidates if c.name != FOUND}
    least = min(published.values(), key=lambda c: max(c.peaks), default=made.choice.taken).name
    name = "1f1b" if "1f1b" in published else least
    usual = made if made.choice.taken.name == name else again(get(name)) or made
    return max(need.total for need in usual.needs)


def _memory_of(plan: Plan) -> float | None:
    """Bytes of the smallest device, if they are known.

    None for several processes, which must all choose the same.
    """
    if agree.several():
        return None
    devices = [device for mesh in plan.submeshes for device in mesh.devices.flat]
    known = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    return float(min(known)) or None
