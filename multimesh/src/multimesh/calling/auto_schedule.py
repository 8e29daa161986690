"""``schedule="auto"`` within the memory of a device: the shortest table whose whole plan fits.

`multimesh.schedules.Auto` bounds activations. The plan also knows everything else that a submesh holds or sends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
from multimesh.schedules import Auto, Schedule, get


@dataclass(frozen=True, eq=False)
class PassResults:
    """A traced function with its schedules, and the results of its passes by name."""

    traced: PassInputs
    passes: Mapping[str, Pass]

    @property
    def plan(self) -> Plan:
        """The plan, by the table that ``auto`` chose."""
        plan: Plan = self.passes[LAST].result
        return plan

    @functools.cached_property
    def need(self) -> float:
        """The bytes of a device of the submesh that needs most."""
        with pause_gc():
            return max(submesh.total for submesh in estimate_memory(self.plan))


def fit_memory(traced: PassInputs, passes: Mapping[str, Pass]) -> tuple[PassInputs, Mapping[str, Pass]]:
    """Choose the table of a loop with ``schedule="auto"`` so that its plan fits into a device, by forecast.

    If the memory of a device is unknown, the limit is the need of 1F1B. Tables are tried, the shortest first. If none
    fits, a warning says so, and the table with the least need is taken. If there are several such loops, each only
    bounds its activations.
    """
    start, first = passes["recompute_transfers"], PassResults(traced, passes)  # schedules decide nothing earlier
    loops, choices = start.result.loops, first.plan.choices
    autos = [(n, loop.mark.schedule) for n, loop in enumerate(loops) if isinstance(loop.mark.schedule, Auto)]
    if len(autos) != 1 or len(choices) != 1:
        return traced, passes
    ((number, auto),) = autos

    def plan_with(schedule: Schedule) -> PassResults:
        retraced = replace(traced, schedules={number: schedule})
        done = pipeline.run(retraced, after=start)
        return PassResults(retraced, {**passes, **{result.name: result for result in done}})

    limit = auto.device if auto.device is not None else _memory_of(first.plan)
    if limit is None:
        if auto.memory is not None:
            return traced, passes
        names = {candidate.name: candidate for candidate in choices[0].candidates}  # else that of fewest activations
        usual = "1f1b" if "1f1b" in names else min(names, key=lambda name: max(names[name].peaks))
        limit = (first if choices[0].taken.name == usual else plan_with(get(usual))).need
    auto = replace(auto, device=limit)  # for measured costs too
    tries = [plan_with(auto)]
    while tries[-1].need > limit:
        auto = replace(auto, without=(*auto.without, tries[-1].plan.choices[0].taken.name))
        try:
            tries.append(plan_with(auto))
        except UsageError:  # no table is left
            break
    best = tries[-1] if tries[-1].need <= limit else min(tries, key=lambda result: result.need)
    if best.need > limit:
        _compat.warn_at(
            loops[number].mark.where,
            f"schedule auto: by the forecast no table fits into {amount(limit, 'bytes')} on each device; took "
            f"{best.plan.choices[0].taken.name}, which needs {amount(best.need, 'bytes')}; use smaller microbatches, "
            "jax.checkpoint or more devices",
        )
    return best.traced, best.passes


def _memory_of(plan: Plan) -> float | None:
    """Return the bytes of the smallest device, if known; None for several processes, which must choose the same."""
    if agree.several():
        return None
    devices = [device for mesh in plan.submeshes for device in mesh.devices.flat]
    return float(min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)) or None
