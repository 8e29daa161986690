"""The forecast of a train step: the memory of its stages, by estimate, and by XLA's compiler for GPUs.

Also MaxText's own program of a step, compiled for GPUs that need not be here: what a pipeline is compared with."""

from __future__ import annotations

import collections
import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax

import multimesh
from multimesh_maxtext.handoff import TrainerConfig
from multimesh_maxtext.trainer.placement import lay_out, name_path

_CALL_SECONDS = {"kernels": 11e-6, "arrays": 1e-6, "transfers": 51e-6}
"""Time of a process's main thread, as measured with CPU devices (docs/performance.md#the-hosts-share)."""


def forecast_stages(lowered: multimesh.Lowered, state: Any, config: TrainerConfig) -> dict[str, Any]:
    """Return the forecast of a step, as data, and draw its timeline beside the file that will have it.

    ``forecast`` is the memory of each stage, as `needs`; ``bubble`` the share of a step that devices wait for each
    other, by operations of kernels; ``host`` as `count_calls`. With a target comes what `compile_stages` returns.
    """
    lowered = lowered.over(config.processes)
    timeline = lowered.plan.simulate(lowered.plan.estimate())
    timeline.to_svg(Path(config.forecast).with_suffix(".svg"))
    platform = config.platform and ("cpu" if config.platform == "cpu" else "gpu")
    return {
        "forecast": needs(lowered, state, lowered.memory_estimate(platform or None)),
        "bubble": timeline.bubble,
        "host": count_calls(lowered.plan),
        **(compile_stages(lowered, state, config.target) if config.target else {}),
    }


def count_calls(plan: multimesh.Plan) -> list[Mapping[str, float]]:
    """Return the calls of the main thread of each stage's processes: kernels, their arrays, arrays sent or received."""
    calls = [collections.Counter(dict.fromkeys(_CALL_SECONDS, 0)) for _ in plan.submeshes]
    for instruction in plan.instructions:
        count, size = calls[instruction.submesh], len(instruction.ins) + len(instruction.outs)
        if instruction.kind == "RUN":
            count.update(kernels=1, arrays=size)
        elif instruction.kind != "FREE":
            count.update(transfers=size)
    return [{**count, "seconds": sum(count[name] * took for name, took in _CALL_SECONDS.items())} for count in calls]


def compile_stages(lowered: multimesh.Lowered, state: Any, target: Mapping[str, Any]) -> dict[str, Any]:
    """Compile the kernels of all stages for GPUs that need not be here. The command reads the lines on progress.

    ``compiled``: the memory of each stage, with the workspace of kernels by XLA's buffer assignment.
    ``calls``: of each kernel, in how many places it calls cuBLASLt, cuDNN, Triton and the like.
    ``costs``: of each stage, on a device in a step, by the names of `multimesh.count_costs`.
    ``compilation``: how many kernels there are, how many were compiled (equal stages have equal ones), in which time.
    """
    log = logging.getLogger("multimesh")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.propagate = False
    devices = multimesh.topology(**target)
    begin = time.perf_counter()
    compiled = lowered.on(devices).compile()
    seconds, unlike = time.perf_counter() - begin, sum(took > 0 for took in compiled.compile_seconds)
    return {
        "compiled": needs(lowered, state, compiled.device_memory()),
        "calls": [dict(calls) for calls in compiled.custom_calls()],
        "costs": compiled.cost_analysis(),
        "compilation": {"kernels": len(lowered.plan.kernels), "compiled": unlike, "seconds": seconds},
    }


def needs(lowered: multimesh.Lowered, state: Any, memory: Sequence[Any]) -> list[dict[str, int]]:
    """Return the bytes on each device of each stage, with parameters and the state of the optimizer told apart.

    Held all the time are ``parameters``, ``optimizer``, and ``batch``: rows of the step and other arguments, copies of
    parameters for other stages among them. At the moment when most memory is in use there are ``gradients``, sums over
    microbatches; ``activations``, that the schedule keeps between kernels; ``workspace``, of the running kernel.
    """
    sizes = collections.Counter[tuple[str, frozenset[jax.Device]]]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        nbytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        sizes[name_path(path)[0], frozenset(leaf.sharding.device_set)] += nbytes
    result = []
    for mesh, need in zip(lowered.plan.submeshes, memory, strict=True):
        parameters, optimizer = (sizes[name, frozenset(mesh.devices.flat)] for name in ("model", "optimizer"))
        parts = {"parameters": parameters, "optimizer": optimizer}
        parts["batch"] = max(0, need.arguments - parameters - optimizer)
        parts |= {"gradients": need.sums, "activations": need.values, "workspace": need.workspace}
        result.append({**parts, "total": sum(parts.values())})
    return result


def compile_program(target: Mapping[str, Any], file: Path) -> None:
    """Make this process, which is to be MaxText's trainer, end with the costs of its step in a file.

    MaxText builds its mesh of the devices of ``target``. Nothing is allocated on these, and no data is read.
    """
    from maxtext.utils import multimesh_hooks as hooks

    devices = multimesh.topology(**target)

    hooks.stage_devices = lambda _devices=None: devices
    hooks.first_device = lambda _mesh: SimpleNamespace(platform="gpu")
    hooks.everywhere = lambda _x: 0  # the number of the first step
    hooks.batches = lambda _config, _mesh: (iter(()), None)
    hooks.init_state = lambda fn, *, out_shardings, **_: lambda: lay_out(jax.eval_shape(fn), out_shardings)
    hooks.jit = lambda fn, **options: SimpleNamespace(lower=partial(_write_costs, jax.jit(fn, **options), file))


def _write_costs(step: Any, file: Path, *arguments: Any) -> NoReturn:
    """Compile a step for its arguments, and end."""
    begin = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    costs = {"peak": peak - memory.alias_size_in_bytes, "seconds": time.perf_counter() - begin}
    file.write_text(json.dumps(multimesh.count_costs(compiled.as_text()) | costs))
    sys.exit()
