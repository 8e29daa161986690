"""The forecast of a train step: the memory of its stages, by estimate, and by XLA's compiler for GPUs."""

from __future__ import annotations

import collections
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import multimesh
from multimesh_maxtext.handoff import CompiledStages, Forecast, HostCalls, Need, Target, TrainerConfig


def forecast_stages(lowered: multimesh.Lowered, state: Any, config: TrainerConfig) -> Forecast:
    """Return the forecast of a step, and draw its timeline beside the file that will have it.

    ``lowered``: the train step.
    ``state``: the train state, as for `needs`.
    """
    lowered = lowered.over(config.processes)
    timeline = lowered.plan.simulate(lowered.plan.estimate())
    timeline.to_svg(Path(config.forecast).with_suffix(".svg"))
    platform = config.platform and ("cpu" if config.platform == "cpu" else "gpu")
    memory = needs(lowered, state, lowered.memory_estimate(platform or None))
    stages = compile_stages(lowered, state, config.target) if config.target else None
    return Forecast(memory, timeline.bubble, count_calls(lowered.plan), stages)


def count_calls(plan: multimesh.Plan) -> tuple[HostCalls, ...]:
    """Return what the processes of each stage call in a step."""
    runs, arrays, transfers = (collections.Counter[int]() for _ in range(3))
    for instruction in plan.instructions:
        size, submesh = len(instruction.ins) + len(instruction.outs), instruction.submesh
        if instruction.kind == "RUN":
            runs[submesh] += 1
            arrays[submesh] += size
        elif instruction.kind != "FREE":
            transfers[submesh] += size
    return tuple(HostCalls(runs[n], arrays[n], transfers[n]) for n in range(len(plan.submeshes)))


def compile_stages(lowered: multimesh.Lowered, state: Any, target: Target) -> CompiledStages:
    """Compile the kernels of all stages for GPUs that need not be here. The command reads the lines on progress."""
    log = logging.getLogger("multimesh")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.propagate = False
    devices = multimesh.topology(**asdict(target))
    begin = time.perf_counter()
    compiled = lowered.on(devices).compile()
    took = time.perf_counter() - begin
    calls: list[collections.Counter[str]] = [collections.Counter() for _ in lowered.plan.submeshes]
    for kernel, counts in zip(lowered.plan.kernels, compiled.custom_calls(), strict=True):
        calls[kernel.submesh].update(counts)
    return CompiledStages(
        needs(lowered, state, compiled.device_memory()),
        len(lowered.plan.kernels),
        sum(seconds > 0 for seconds in compiled.compile_seconds),
        took,
        tuple(map(dict, calls)),
        compiled.cost_analysis(),
    )


def needs(lowered: multimesh.Lowered, state: Any, memory: Sequence[Any]) -> tuple[Need, ...]:
    """Return the memory of each stage, with parameters and the state of the optimizer told apart.

    ``lowered``: the train step.
    ``state``: the train state, arrays or their types, each leaf with its sharding: the first argument of the step.
    ``memory``: the bytes on each device of each submesh.
    """
    sizes: dict[tuple[str, frozenset[jax.Device]], int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = getattr(path[0], "key", getattr(path[0], "name", ""))
        key = name, frozenset(leaf.sharding.device_set)
        sizes[key] = sizes.get(key, 0) + math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    result = []
    for mesh, need in zip(lowered.plan.submeshes, memory, strict=True):
        parameters, optimizer = (sizes.get((name, frozenset(mesh.devices.flat)), 0) for name in ("model", "optimizer"))
        batch = max(0, need.arguments - parameters - optimizer)
        result.append(Need(parameters, optimizer, batch, need.sums, need.values, need.workspace))
    return tuple(result)
