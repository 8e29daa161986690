"""Readings of this process for the record of a step: the time of day, the memory, and the share of the peak."""

from __future__ import annotations

import functools
import resource
import time
from typing import Any

import jax

from multimesh import planner
from multimesh_maxtext.handoff import MEMORY, TIME, UTILIZATION


def read_gauges(scalars: dict[str, Any], config: Any, seconds: float) -> dict[str, float]:
    """Return the readings at the end of a step.

    Parameters
    ----------
    scalars
        What MaxText has recorded of the step. It divides a step's operations by the devices of its own mesh.
    config
        MaxText's, which has the number of those.
    seconds
        How long the step took.
    """
    found = {TIME: time.time(), MEMORY: _peak_bytes()}
    operations, peak = 1e12 * scalars.get("perf/per_device_tflops", 0.0) * config.num_target_devices, _peak_rate()
    if operations and peak and seconds:
        found[UTILIZATION] = operations / (seconds * peak * jax.device_count())
    return found


def _peak_bytes() -> float:
    """Return the most memory that a device of this process has had in use; on CPU devices, that the process has had."""
    used = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    return float(max(used) or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@functools.cache
def _peak_rate() -> float:
    """Return the bfloat16 operations a second of a device; 0 where the table of devices has no such kind."""
    kind = jax.devices()[0].device_kind.lower()
    known = [name for name in planner.devices() if name in kind.replace("-", " ").split()]
    return planner.device(max(known, key=len)).bf16 if known else 0.0
