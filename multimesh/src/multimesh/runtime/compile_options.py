"""Options for XLA: those that MultiMesh adds, and those that decide the code of a kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

from multimesh.core._compat import executables, small_tiles
from multimesh.hardware import known_faults
from multimesh.plan.plan import Plan
from multimesh.processes.launchers import LAUNCHERS
from multimesh.runtime import ynnpack


def cores() -> int:
    """Return the number of cores that this process may use: its share of the node if the launcher binds none."""
    every = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if mine < every:
        return mine
    given = (os.environ.get(name, "") for launcher in LAUNCHERS for name in launcher.here)
    return max(1, mine // next((int(n) for n in given if n.isdecimal() and int(n)), 1))


def with_defaults(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler options, with ours where neither they nor ``XLA_FLAGS`` say otherwise.

    * On CPUs LLVM's level 2: level 3 takes a quarter of the compile time of a plan more, for code that is no faster.
    * On GPUs of several processes each process tunes its kernels alone: XLA would wait for processes that do not
      compile the kernel.
    """
    chosen = dict(options)
    platforms = {d.platform for mesh in plan.submeshes for d in mesh.devices.flat}
    if platforms != {"cpu"}:
        alone = {known_faults.AUTOTUNING.name: False} if "gpu" in platforms and jax.process_count() > 1 else {}
        return alone | chosen
    level = "xla_backend_optimization_level"
    return ({} if _in_environment(level) else {level: 2}) | chosen


def for_kernel(plan: Plan, number: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a kernel: those of the plan, and on CPUs those that its devices and products gain by.

    * No threads within a device's part where the submesh has a device for each core.
    * No YNNPACK where its products lose by it.
    """
    kernel = plan.kernels[number]
    mesh = plan.submeshes[kernel.submesh]
    if any(device.platform != "cpu" for device in mesh.devices.flat):
        return dict(options)
    chosen: dict[str, Any] = {}
    if mesh.size >= cores() and _is_free(small_tiles.NO_THREADS, options) and small_tiles.has_small_tiles():
        chosen[small_tiles.NO_THREADS] = False
    if _is_free(ynnpack.OPTION, options) and ynnpack.loses(kernel.ops, mesh.size):
        chosen |= {ynnpack.OPTION: ""} if executables.takes_option(ynnpack.OPTION, "") else {}
    return chosen | dict(options)


def _is_free(name: str, options: Mapping[str, Any]) -> bool:
    return name not in options and not _in_environment(name)


def _in_environment(name: str) -> bool:
    return name in os.environ.get("XLA_FLAGS", "")


_NO_CODE = ("--xla_dump", "--xla_force_host_platform_device_count")
"""Beginnings of flags that do not change code."""


def flags_of_code(flags: str, options: Mapping[str, Any], *, cpu: bool) -> list[str]:
    """Return the flags of ``XLA_FLAGS`` and the options that decide the code of kernels, in order.

    Flags of how XLA finds the fastest code for a product are none of them: it does that where it compiles. Nor are
    those of XLA's CPU compiler for other devices.
    """
    others = _NO_CODE if cpu else (*_NO_CODE, "--xla_cpu")
    all_flags = {*flags.split(), *(f"--{name}={value}" for name, value in options.items())}
    found = (flag for flag in all_flags if not flag.startswith(others))
    return sorted(flag for flag in found if "autotun" not in flag and "triton_gemm" not in flag)
