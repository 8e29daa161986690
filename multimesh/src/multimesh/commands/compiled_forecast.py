"""Memory of a user's step by XLA's compiler for GPUs, none of which need be here."""

from __future__ import annotations

import runpy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class CompiledForecast:
    """A compiled step: the memory of its submeshes by forecast and by XLA, in bytes of a device.

    ``kernels`` were compiled as ``programs`` in ``seconds``; ``limit`` is what JAX may use of a device.
    """

    forecast: tuple[MemoryEstimate, ...]
    compiled: tuple[MemoryEstimate, ...]
    calls: tuple[Mapping[str, int], ...]
    kernels: int
    programs: int
    seconds: float
    limit: float

    def table(self) -> str:
        """Return a text table with a row for each submesh."""
        parts = ("arguments", "sums", "values", "workspace", "total")
        cells = [(name, [amount(getattr(estimate, name), "bytes") for estimate in self.compiled]) for name in parts]
        pairs = list(zip(self.forecast, self.compiled, strict=True))
        lines = columns(
            [
                ("submesh", [str(number) for number in range(len(pairs))]),
                *cells,
                ("forecast", [amount(estimate.total, "bytes") for estimate, _ in pairs]),
                ("off", [f"{100 * (estimate.total / need.total - 1):+.1f} %" for estimate, need in pairs]),
                ("fits", ["yes" if need.total <= self.limit else "no" for _, need in pairs]),
                ("largest", [max(asdict(need).items(), key=lambda item: item[1])[0] for _, need in pairs]),
            ],
            texts=(8, 9),
        )
        effort = f"{self.kernels} kernels, {self.programs} of them unlike, compiled in {self.seconds:.0f} s"
        return "\n".join([*(line.rstrip() for line in lines), f"{effort}; {amount(self.limit, 'bytes')} of a device"])

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the table, as data; and the library calls of each kernel."""
        return {
            "forecast": [{**asdict(entry), "total": entry.total} for entry in self.forecast],
            "compiled": [{**asdict(entry), "total": entry.total} for entry in self.compiled],
            "calls": [dict(entry) for entry in self.calls],
            "compilation": {"kernels": self.kernels, "compiled": self.programs, "seconds": self.seconds},
            "limit": self.limit,
        }

    def check_fits(self) -> None:
        """Raise `DoesNotFitError` where a submesh needs more than a device has."""
        most = max(range(len(self.compiled)), key=lambda number: self.compiled[number].total)
        total = self.compiled[most].total
        if total > self.limit:
            raise DoesNotFitError(
                f"submesh {most} needs {amount(total, 'bytes')} on each device, and JAX may use "
                f"{amount(self.limit, 'bytes')}; use more devices, a smaller microbatch or jax.checkpoint"
            )


def compile_step(step: str, device: str, nodes: int, gpus: int, limit: float | None) -> CompiledForecast:
    """Compile the step that ``FILE:FUNCTION`` lowers for ``nodes`` of ``gpus`` GPUs.

    The function takes the devices, and returns ``mm.jit(f).lower(...)`` for meshes of them.
    """
    lowered = _lower(step, device, nodes, gpus)
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    return CompiledForecast(
        lowered.memory_estimate("gpu"),
        compiled.device_memory(),
        compiled.custom_calls(),
        len(lowered.plan.kernels),
        sum(took > 0 for took in compiled.compile_seconds),
        seconds,
        limit or SHARE * facts_of(device)["memory"],
    )


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
