"""The forecast of a job: it is made by a process of its own, shown, and held against the memory of a device."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from multimesh_maxtext.command import memory, report
from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.command.inspecting import forecast
from multimesh_maxtext.command.kernel_folders import describe_kernels
from multimesh_maxtext.command.launch import forecasting
from multimesh_maxtext.command.memory import check_fits
from multimesh_maxtext.command.sizes import forecast_step, step_json, step_text
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import TrainerFailedError
from multimesh_maxtext.handoff import CompiledStages, Forecast, HostCalls, Need


def check_memory(job: Job, paths: Paths, console: Console, gpu_memory: int | None) -> None:
    """Show the memory that a pipeline will need, where a flag asks or a limit is known; refuse what exceeds that."""
    o, limit = job.options, memory.limit(job, gpu_memory)
    if not o.forecast and limit is None:
        return
    try:
        found = _forecast(job, paths, console, gpu_memory)
    except TrainerFailedError as error:
        if o.forecast or o.has("device_memory"):
            raise
        print(f"warning: memory was not checked: {error}", file=sys.stderr)
        return
    _show_forecast(job, paths, console, found, limit)
    if limit is not None:
        check_fits((found.stages or found).needs, limit)


def _forecast(job: Job, paths: Paths, console: Console, gpu_memory: int | None) -> Forecast:
    """Run the process that forecasts, and show how far it is."""
    what = f"forecasting: tracing a step of {job.model.layers} layers"
    start = forecasting(job, paths, inherited=os.environ, gpu_memory=gpu_memory)
    shown = not job.options.json
    if shown and not console.is_terminal:
        console.print(what, highlight=False)
    with console.status(what) as status:

        def tell(line: str) -> None:
            status.update(line)
            if shown and not console.is_terminal:
                console.print(line, highlight=False)

        return forecast(start, paths, tell)


def _show_forecast(job: Job, paths: Paths, console: Console, found: Forecast, limit: int | None) -> None:
    o, step = job.options, forecast_step(job)
    if o.json:
        if o.forecast:
            print(
                json.dumps(
                    {"forecast": _with_totals(found.needs), "bubble": found.bubble, "limit": limit}
                    | {"host": [asdict(each) | {"seconds": each.seconds} for each in found.host]}
                    | (_stages_json(found.stages) if found.stages else {})
                    | ({"precompiled": describe_kernels(o.precompile)} if o.precompile else {})
                    | (step_json(step) if step else {})
                    | report.schedule_choice(paths.schedule)
                )
            )
        return
    console.print("memory on each device of a stage at the peak of a step (forecast)", highlight=False)
    console.print(memory.memory_table(found.needs))
    if not o.forecast:
        return
    if stages := found.stages:
        console.print(f"the same as XLA compiled it for {o.device} ({_effort(stages)})", highlight=False)
        console.print(memory.tabulate_stages(found.needs, stages, limit))
    if o.precompile:
        kept = describe_kernels(o.precompile)
        console.print(
            f"{kept['kernels']} kernels, {kept['programs']} of them unlike, are in {o.precompile} "
            f"({memory.show_size(kept['bytes'])}); train with --precompiled {o.precompile} in place of --precompile",
            highlight=False,
        )
    if limit is not None:
        console.print(f"of {memory.show_size(limit)} that JAX may use of a device", highlight=False)
    if schedule := report.schedule_choice(paths.schedule):
        console.print(schedule["schedule"]["text"], highlight=False, markup=False)
    picture = paths.forecast.with_suffix(".svg")
    console.print(
        f"devices wait {100 * found.bubble:.1f} % of a step, by operations of their kernels, transfers take no time: "
        f"see {picture}",
        highlight=False,
    )
    console.print(_host_text(found.host, step.seconds if step else None), highlight=False)
    if step:
        console.print(step_text(step), highlight=False)
    elif o.device:
        console.print("no forecast of seconds: microbatches are not whole sequences on each device", highlight=False)


def _host_text(host: Sequence[HostCalls], step: float | None) -> str:
    """Return how much the main thread of the busiest process does in a step of so many seconds, in words."""
    most = max(host, key=lambda each: each.seconds)
    share = f", {100 * most.seconds / step:.1f} % of the step" if step else ""
    return (
        f"the busiest process starts {most.kernels:,} kernels a step with {most.arrays:,} arrays, and "
        f"{most.transfers:,} arrays are sent or received: about {1e3 * most.seconds:,.0f} ms of its main thread{share}"
    )


def _with_totals(needs: Sequence[Need]) -> list[dict[str, int]]:
    return [{**asdict(need), "total": need.total} for need in needs]


def _stages_json(stages: CompiledStages) -> dict[str, object]:
    """Return the compiled stages, as data."""
    return {
        "compiled": _with_totals(stages.needs),
        "calls": stages.calls,
        "costs": stages.costs,
        "compilation": {"kernels": stages.kernels, "compiled": stages.compiled, "seconds": stages.seconds},
    }


def _effort(stages: CompiledStages) -> str:
    return f"{stages.kernels} kernels, {stages.compiled} of them unlike, in {stages.seconds:.0f} s"
