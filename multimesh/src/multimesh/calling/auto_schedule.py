"""``schedule="auto"`` within the memory of a device: the shortest table whose whole plan fits.

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
from multimesh.observe.memory import estimate_memory
from multimesh.passes import pipeline
from multimesh.passes.pipeline import LAST, Pass, PassInputs
from multimesh.plan.plan import Plan
from multimesh.processes import agree
from multimesh.schedules import Auto, Choice, Schedule, get


@dataclass(frozen=True, eq=False)
class PassResults:
    """A traced function with its schedules, and the results of its passes by name."""

    traced: PassInputs
    passes: Mapping[str, Pass]

    @property
    def choice(self) -> Choice:
        """The choice that ``auto`` made."""
        plan: Plan = self.passes[LAST].result
        return plan.choices[0]

    @functools.cached_property
    def need(self) -> float:
        """The bytes of a device of the submesh that needs most."""
        with pause_gc():
            return max(submesh.total for submesh in estimate_memory(self.passes[LAST].result))


def fit_memory(traced: PassInputs, passes: Mapping[str, Pass]) -> tuple[PassInputs, Mapping[str, Pass]]:
    """Choose the table of a loop with ``schedule="auto"`` so that its plan fits into a device, by forecast.

    If the memory of a device is unknown, the limit is the need of 1F1B. Tables are tried, the shortest first. If none
    fits, a warning says so, and the table with the least need is taken. If there are several such loops, each only
    bounds its activations.
    """
    start = passes["recompute_transfers"]  # schedules decide nothing before it has run
    loops, plan = start.result.loops, passes[LAST].result
    autos = [(n, loop.mark.schedule) for n, loop in enumerate(loops) if isinstance(loop.mark.schedule, Auto)]
    if len(autos) != 1 or len(plan.choices) != 1:
        return traced, passes
    ((number, auto),) = autos

    def plan_with(schedule: Schedule) -> PassResults:
        retraced = replace(traced, schedules={number: schedule})
        done = pipeline.run(retraced, after=start)
        return PassResults(retraced, {**passes, **{result.name: result for result in done}})

    device = auto.device if auto.device is not None else _memory_of(plan)
    if device is None and auto.memory is not None:
        return traced, passes
    limit = device if device is not None else _usual(PassResults(traced, passes), plan_with)
    best = _first_within(limit, replace(auto, device=limit), plan_with)  # a limit for measured costs too
    if best.need > limit:
        _compat.warn_at(
            loops[number].mark.where,
            f"schedule auto: by the forecast no table fits into {amount(limit, 'bytes')} on each device; took "
            f"{best.choice.taken.name}, which needs {amount(best.need, 'bytes')}; use smaller microbatches, "
            "jax.checkpoint or more devices",
        )
    return best.traced, best.passes


def _first_within(limit: float, auto: Auto, plan_with: Callable[[Schedule], PassResults]) -> PassResults:
    """Return the plan of the shortest table whose need is within a limit, or else that with the least need."""
    tries = [plan_with(auto)]
    while tries[-1].need > limit:
        auto = replace(auto, without=(*auto.without, tries[-1].choice.taken.name))
        try:
            tries.append(plan_with(auto))
        except UsageError:  # no table is left
            return min(tries, key=lambda result: result.need)
    return tries[-1]


def _usual(results: PassResults, plan_with: Callable[[Schedule], PassResults]) -> float:
    """Return the largest need of 1F1B in bytes, else of the published table with the fewest activations."""
    published = {candidate.name: candidate for candidate in results.choice.candidates}
    name = "1f1b" if "1f1b" in published else min(published.values(), key=lambda c: max(c.peaks)).name
    return (results if results.choice.taken.name == name else plan_with(get(name))).need


def _memory_of(plan: Plan) -> float | None:
    """Bytes of the smallest device, if they are known.

    None for several processes, which must all choose the same.
    """
    if agree.several():
        return None
    devices = [device for mesh in plan.submeshes for device in mesh.devices.flat]
    sizes = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    return float(min(sizes)) or None
