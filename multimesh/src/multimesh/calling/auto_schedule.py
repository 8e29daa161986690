"""``schedule="auto"`` within the memory of a device: the shortest table whose whole plan fits.

`multimesh.schedules.Auto` bounds activations. The plan also knows everything else that a submesh holds or sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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


def fit_memory(traced: PassInputs, passes: Mapping[str, Pass]) -> tuple[PassInputs, Mapping[str, Pass]]:
    """Choose the table of a loop with ``schedule="auto"`` so that its plan fits into a device, by forecast.

    If the memory of a device is unknown, the limit is the need of 1F1B. Tables are tried, the shortest first. If none
    fits, a warning says so, and the table with the least need is taken. If there are several such loops, each only
    bounds its activations.
    """
    start, plan = passes["recompute_transfers"], passes[LAST].result  # schedules decide nothing earlier
    loops, choices = start.result.loops, plan.choices
    autos = [(n, loop.mark.schedule) for n, loop in enumerate(loops) if isinstance(loop.mark.schedule, Auto)]
    if len(autos) != 1 or len(choices) != 1:
        return traced, passes
    ((number, auto),) = autos

    def try_schedule(schedule: Schedule) -> tuple[float, PassInputs, Mapping[str, Pass]]:
        retraced = replace(traced, schedules={number: schedule})
        results = {**passes, **{result.name: result for result in pipeline.run(retraced, after=start)}}
        return _need_of(results[LAST].result), retraced, results

    limit = auto.device if auto.device is not None else _memory_of(plan)
    if limit is None:
        if auto.memory is not None:
            return traced, passes
        names = {candidate.name: candidate for candidate in choices[0].candidates}  # else that of fewest activations
        default = "1f1b" if "1f1b" in names else min(names, key=lambda name: max(names[name].peaks))
        limit = _need_of(plan) if choices[0].taken.name == default else try_schedule(get(default))[0]
    auto = replace(auto, device=limit)  # for measured costs too
    tries = [try_schedule(auto)]
    while tries[-1][0] > limit:
        auto = replace(auto, without=(*auto.without, tries[-1][2][LAST].result.choices[0].taken.name))
        try:
            tries.append(try_schedule(auto))
        except UsageError:  # no table is left
            break
    need, retraced, results = tries[-1] if tries[-1][0] <= limit else min(tries, key=lambda tried: tried[0])
    table = results[LAST].result.choices[0].taken.name
    if need > limit:
        _compat.warn_at(
            loops[number].mark.where,
            f"schedule auto: by the forecast no table fits into {amount(limit, 'bytes')} on each device; took {table}, "
            f"which needs {amount(need, 'bytes')}; use smaller microbatches, jax.checkpoint or more devices",
        )
    return retraced, results


def _need_of(plan: Plan) -> float:
    """Return the bytes of a device of the submesh that needs most."""
    with pause_gc():
        return max(submesh.total for submesh in estimate_memory(plan))


def _memory_of(plan: Plan) -> float | None:
    """Return the bytes of the smallest device, if known; None for several processes, which must choose the same."""
    if agree.several():
        return None
    devices = [device for mesh in plan.submeshes for device in mesh.devices.flat]
    return float(min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)) or None
