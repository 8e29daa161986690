"""The forecast of a train step: the memory of its stages, by estimate, and by XLA's compiler for GPUs."""

from __future__ import annotations

import collections
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import multimesh
from multimesh_maxtext.handoff import CompiledStages, Forecast, Handoff, HostCalls, Need


def forecast_stages(lowered: multimesh.Lowered, state: Any, handoff: Handoff) -> Forecast:
    """Return the forecast of a step, and draw its timeline beside the file that will have it.

    ``lowered``: the train step.
    ``state``: the train state, as for `needs`.
    """
    lowered = lowered.over(handoff.processes)
    timeline = lowered.plan.forecast(lowered.plan.estimate())
    timeline.to_svg(Path(handoff.forecast).with_suffix(".svg"))
    platform = handoff.platform and ("cpu" if handoff.platform == "cpu" else "gpu")
    found = needs(lowered, state, lowered.memory_forecast(platform or None))
    if handoff.precompile and not handoff.target:
        _show_progress()
        lowered.compile().save(handoff.precompile)
    stages = compile_stages(lowered, state, handoff) if handoff.target else None
    return Forecast(found, timeline.bubble, count_calls(lowered.plan), stages)


def count_calls(plan: multimesh.Plan) -> tuple[HostCalls, ...]:
    """Return what the processes of each stage call in a step."""
    runs, arrays, transfers = (collections.Counter[int]() for _ in range(3))
    for each in plan.instructions:
        size = len(each.ins) + len(each.outs)
        if each.kind == "RUN":
            runs[each.submesh] += 1
            arrays[each.submesh] += size
        elif each.kind != "FREE":
            transfers[each.submesh] += size
    return tuple(HostCalls(runs[n], arrays[n], transfers[n]) for n in range(len(plan.submeshes)))


def _show_progress() -> None:
    log = logging.getLogger("multimesh")  # its lines on progress are read by the command
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.propagate = False


def compile_stages(lowered: multimesh.Lowered, state: Any, handoff: Handoff) -> CompiledStages:
    """Compile the kernels of all stages for the GPUs that the hand-over names; keep them where it says so."""
    _show_progress()
    devices = multimesh.topology(
        handoff.target,
        nodes=handoff.target_nodes,
        gpus=handoff.target_gpus,
        process_per=handoff.target_process,
    )
    begin = time.perf_counter()
    compiled = lowered.on(devices).compile()
    took = time.perf_counter() - begin
    if handoff.precompile:
        compiled.save(handoff.precompile)
    calls: list[collections.Counter[str]] = [collections.Counter() for _ in lowered.plan.submeshes]
    for kernel, found in zip(lowered.plan.kernels, compiled.custom_calls(), strict=True):
        calls[kernel.submesh].update(found)
    return CompiledStages(
        needs(lowered, state, compiled.device_memory()),
        len(lowered.plan.kernels),
        sum(seconds > 0 for seconds in compiled.compile_seconds),
        took,
        tuple(map(dict, calls)),
        _costs(compiled),
    )


def _costs(compiled: multimesh.Compiled) -> tuple[dict[str, float], ...]:
    """Return what a step costs on a device of each stage: operations of products, and bytes of collectives."""
    plan, collectives = compiled.plan, compiled.collectives()
    result: list[dict[str, float]] = [{"flops": costs["flops"]} for costs in compiled.cost_analysis()]
    for run in plan.runs:
        for each in collectives[run.kernel]:
            name = " ".join([each.kind, *each.axes(plan.submeshes[run.submesh])])
            result[run.submesh][name] = result[run.submesh].get(name, 0) + each.nbytes * each.times
    return tuple(result)


def needs(lowered: multimesh.Lowered, state: Any, found: Sequence[Any]) -> tuple[Need, ...]:
    """Return the memory of each stage, with parameters and the state of the optimizer told apart.

    ``lowered``: the train step.
    ``state``: the train state, arrays or their types, each leaf with its sharding: the first argument of the step.
    ``found``: the bytes on each device of each submesh.
    """
    held: dict[tuple[str, frozenset[jax.Device]], int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = getattr(path[0], "key", getattr(path[0], "name", ""))
        key = name, frozenset(leaf.sharding.device_set)
        held[key] = held.get(key, 0) + math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    result = []
    for mesh, need in zip(lowered.plan.submeshes, found, strict=True):
        parameters, optimizer = (held.get((name, frozenset(mesh.devices.flat)), 0) for name in ("model", "optimizer"))
        batch = max(0, need.arguments - parameters - optimizer)
        result.append(Need(parameters, optimizer, batch, need.sums, need.values, need.workspace))
    return tuple(result)
