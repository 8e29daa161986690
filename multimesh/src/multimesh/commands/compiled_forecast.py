"""Memory of a user's step by XLA's compiler for GPUs, none of which need be here."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multimesh.calling.aot import Lowered
from multimesh.core.targets import facts_of
from multimesh.core.text import amount, columns
from multimesh.core.topologies import topology
from multimesh.errors import DoesNotFitError, MultiMeshError, UsageError
from multimesh.observe.memory import MemoryEstimate

SHARE = 0.75
"""The part of a GPU's memory that JAX takes by default."""


def compile_step(
    step: str, device: str, nodes: int, gpus: int, limit: float | None, say: Callable[[str], object]
) -> dict[str, Any]:
    """Compile the step that ``FILE:FUNCTION`` lowers for ``nodes`` of ``gpus`` GPUs; return its memory as data.

    The function takes the devices, and returns ``mm.jit(f).lower(...)`` for meshes of them. ``say`` gets a table with a
    row for each submesh. Raise `DoesNotFitError` where one needs more than JAX may use of a device: ``limit`` bytes.
    """
    lowered = _lower(step, device, nodes, gpus)
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    limit = limit or SHARE * facts_of(device)["memory"]
    estimates, needs = lowered.memory_estimate("gpu"), compiled.device_memory()
    programs = sum(seconds > 0 for seconds in compiled.compile_seconds)
    say(f"memory on each device of a submesh at the peak of a call, compiled for {device}")
    say(_draw_table(estimates, needs, limit))
    kernels = len(lowered.plan.kernels)
    effort = f"{kernels} kernels, {programs} of them unlike, compiled in {seconds:.0f} s"
    say(f"{effort}; {amount(limit, 'bytes')} of a device")
    most = max(range(len(needs)), key=lambda number: needs[number].total)
    if needs[most].total > limit:
        raise DoesNotFitError(
            f"submesh {most} needs {amount(needs[most].total, 'bytes')} on each device, and JAX may use "
            f"{amount(limit, 'bytes')}; use more devices, a smaller microbatch or jax.checkpoint"
        )
    return {
        "forecast": [{**asdict(entry), "total": entry.total} for entry in estimates],
        "compiled": [{**asdict(entry), "total": entry.total} for entry in needs],
        "calls": [dict(entry) for entry in compiled.custom_calls()],
        "compilation": {"kernels": kernels, "compiled": programs, "seconds": seconds},
        "limit": limit,
    }


def _draw_table(estimates: Sequence[MemoryEstimate], needs: Sequence[MemoryEstimate], limit: float) -> str:
    """Return a text table: what XLA gives each submesh, beside the forecast."""
    pairs = list(zip(estimates, needs, strict=True))
    parts = ("arguments", "sums", "values", "workspace", "total")
    lines = columns(
        [
            ("submesh", [str(number) for number in range(len(pairs))]),
            *((name, [amount(getattr(need, name), "bytes") for need in needs]) for name in parts),
            ("forecast", [amount(estimate.total, "bytes") for estimate in estimates]),
            ("off", [f"{100 * (estimate.total / need.total - 1):+.1f} %" for estimate, need in pairs]),
            ("fits", ["yes" if need.total <= limit else "no" for need in needs]),
            ("largest", [max(asdict(need).items(), key=lambda item: item[1])[0] for need in needs]),
        ],
        texts=(8, 9),
    )
    return "\n".join(line.rstrip() for line in lines)


def _lower(step: str, device: str, nodes: int, gpus: int) -> Lowered:
    """Return the step that the function of a file lowers for devices of a topology."""
    file, _, name = step.rpartition(":")
    if not name.isidentifier() or not Path(file).is_file():
        raise UsageError(f"--compile {step}: write FILE:FUNCTION, such as train.py:lower; the file must exist")
    devices = topology(device, nodes=nodes, gpus=gpus)
    try:
        function = runpy.run_path(file).get(name)
        if not callable(function):
            raise UsageError(f"--compile {step}: {file} has no function {name!r}")
        lowered = function(devices)
    except MultiMeshError:
        raise
    except Exception as error:
        raise MultiMeshError(f"--compile {step}: it raised {type(error).__name__}: {error}") from error
    if not isinstance(lowered, Lowered):
        raise UsageError(
            f"--compile {step}: {name} takes the devices and returns mm.jit(f).lower(...) for meshes of them; it "
            f"returned a {type(lowered).__name__}"
        )
    return lowered
