"""Adds time, memory and MFU of each step to its record, and writes the record before the checkpoint of the step.

MaxText writes the record of a step once it has started the next one, after the checkpoint of the step. Its own time of
a step is how long it took to start it.
"""

from __future__ import annotations

import functools
import resource
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax

from multimesh import planner
from multimesh_maxtext.handoff import MEMORY, SECONDS, TIME, UTILIZATION


class _Step:
    """A step that was started. A thread notes its end."""

    def __init__(self, logger: Any, metrics: dict[str, Any], took: timedelta) -> None:
        self.logger, self.metrics, self.took = logger, metrics, took
        self.begun = time.monotonic() - took.total_seconds()
        self.ended = self.at = 0.0
        # Python waits for threads of a pool, also where a lost process leaves the step without an end.
        self.thread = threading.Thread(target=self._wait, args=(dict(metrics["scalar"]),), daemon=True)
        self.thread.start()

    def _wait(self, results: dict[str, Any]) -> None:
        with suppress(Exception):  # their readers raise the error
            jax.block_until_ready(results)
            self.ended, self.at = time.monotonic(), time.time()


_started: dict[int, _Step] = {}  # steps without a record, by their numbers
_last_end: float | None = None


def stepped(logger: Any, metrics: dict[str, Any], step: int, took: timedelta) -> None:
    """Take note of a step that MaxText has just started."""
    _started[step] = _Step(logger, metrics, took)


def recording(metrics: dict[str, Any], step: int, kind: str) -> bool:
    """Add the time of a step to its record. Return whether to write the record: not again after `saving`."""
    global _last_end
    if kind != "train":
        return True
    started = _started.pop(step, None)
    if started is None:
        return False
    started.thread.join()
    seconds = started.ended - (started.begun if _last_end is None else _last_end)
    config, scalars = started.logger.config, metrics["scalar"]
    scalars |= {SECONDS: seconds, TIME: started.at} | _read_gauges(scalars, config, seconds)
    _last_end = started.ended
    profile_on_request(Path(config.base_output_directory), step)
    return True


def saving() -> None:
    """Write the records of all steps that were started, before a checkpoint of the newest."""
    for number, step in sorted(_started.items()):
        step.logger.record_train_metrics(step.metrics, number, step.took.total_seconds())
        step.logger.write_metrics(step.metrics, number)


def _read_gauges(scalars: dict[str, Any], config: Any, seconds: float) -> dict[str, float]:
    """Return memory and utilization at the end of a step that took so long."""
    used = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    # on CPU devices the most that the process has had
    gauges = {MEMORY: float(max(used) or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}
    # MaxText divides the operations by the devices of its own mesh
    operations, peak = 1e12 * scalars.get("perf/per_device_tflops", 0.0) * config.num_target_devices, _peak_rate()
    if operations and peak and seconds:
        gauges[UTILIZATION] = operations / (seconds * peak * jax.device_count())
    return gauges


@functools.cache
def _peak_rate() -> float:
    """Return the bfloat16 operations a second of a device; 0 where the table of devices has no such kind."""
    kind = jax.devices()[0].device_kind.lower()
    names = [name for name in planner.devices() if name in kind.replace("-", " ").split()]
    return planner.device(max(names, key=len)).bf16 if names else 0.0


REQUEST, FOLDER, STEPS = "profile", "profiles", 3
"""A file of this name in the output folder of a process asks for a profile of so many steps, in a folder beside it."""

_until: int | None = None


def profile_on_request(output: Path, step: int) -> None:
    """Start or end a profile, as the file asks. An error is told, and ends nothing. Called after each step."""
    global _until
    if not ((output / REQUEST).is_file() if _until is None else step >= _until):
        return
    try:
        if _until is None:
            jax.profiler.start_trace(output / FOLDER)
            _until = step + STEPS
            print(f"multimesh: profile of steps {step + 1} to {_until} goes to {output / FOLDER}", flush=True)
            return
        _until = None
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:  # MaxText's own profile runs
        print(f"multimesh: no profile ({error}); training goes on", flush=True)
    with suppress(OSError):
        (output / REQUEST).unlink()
