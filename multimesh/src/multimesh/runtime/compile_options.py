"""Options for XLA that MultiMesh adds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from multimesh.core import _compat
from multimesh.core._compat import executables
from multimesh.ir.flops import product_sizes
from multimesh.plan.plan import Plan
from multimesh.processes.launchers import LAUNCHERS

YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
"""Option: kinds of operations that YNNPACK gets, by name; none where it is empty.

On a CPU of two cores, float32, each product alone in both forms: from 8 million operations
a matrix YNNPACK saves about 10 microseconds a million, as Eigen's threads wait for each other there; a product over
many small matrices, those of attention, costs it about 5 microseconds more for each matrix. Other products are equal.
"""

_LARGE = 8e6
_SAVED, _LOST = 10e-12, 5e-6  # seconds: for an operation of a large product; for a small matrix of a batch


def cores() -> int:
    """Return the number of cores that this process may use: its share of the node if the launcher binds none."""
    every = os.cpu_count() or 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if available < every:
        return available
    counts = (os.environ.get(name, "") for launcher in LAUNCHERS for name in launcher.here)
    return max(1, available // next((int(n) for n in counts if n.isdecimal() and int(n)), 1))


def with_defaults(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler options, with ours where neither they nor ``XLA_FLAGS`` say otherwise.

    * On CPUs LLVM's level 2: level 3 takes a quarter of the compile time of a plan more, for code that is no faster.
    * On GPUs of several processes each process tunes its kernels alone: XLA would wait for processes that do not
      compile the kernel.
    """
    chosen = dict(options)
    platforms = {d.platform for mesh in plan.submeshes for d in mesh.devices.flat}
    if platforms != {"cpu"}:
        if "gpu" not in platforms or jax.process_count() == 1:
            return chosen
        from multimesh.core.known_faults import AUTOTUNING

        return {AUTOTUNING.name: False} | chosen
    level = "xla_backend_optimization_level"
    return ({} if _in_environment(level) else {level: 2}) | chosen


def for_kernel(plan: Plan, number: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a kernel: those of the plan, and on CPUs no YNNPACK where its products lose by it."""
    kernel = plan.kernels[number]
    mesh = plan.submeshes[kernel.submesh]
    if any(device.platform != "cpu" for device in mesh.devices.flat):
        return dict(options)
    chosen: dict[str, Any] = {}
    if (
        YNNPACK not in options
        and not _in_environment(YNNPACK)
        and sum(_seconds(op.prim.name, op.params, op.ins, mesh.size) for op in kernel.ops) < 0
    ):
        chosen |= {YNNPACK: ""} if executables.takes_option(YNNPACK, "") else {}
    return chosen | dict(options)


def _in_environment(name: str) -> bool:
    return name in os.environ.get("XLA_FLAGS", "")


def _seconds(name: str, params: dict[str, Any], ins: Sequence[Any], devices: int) -> float:
    """Return the seconds that YNNPACK saves in an operation; devices share the batch, or else the matrix."""
    if name == "dot_general" and ins[0].aval.dtype == ins[1].aval.dtype == jnp.float32:
        batch, m, k, n = product_sizes(params, ins)
        work = 2.0 * m * k * n
        matrices, work = (batch / devices, work) if batch >= devices else (batch, work / devices)
        if work >= _LARGE:
            return matrices * work * _SAVED
        return -matrices * _LOST if batch > 1 else 0.0
    inner = [
        sum(_seconds(e.primitive.name, e.params, e.invars, devices) for e in jaxpr.eqns)
        for jaxpr in _compat.subjaxprs(params)
    ]
    return sum(inner) * (params["length"] if name == "scan" else 1)
