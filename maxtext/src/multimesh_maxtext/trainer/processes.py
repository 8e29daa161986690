"""Arrays of a pipeline over several processes: some lie elsewhere, and some every process reads."""

from __future__ import annotations

import functools
import re
import signal
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding

import multimesh


def has_device(layout: Sharding) -> bool:
    """Return whether this process has a device of a layout."""
    return bool(layout.addressable_devices)


def absent(like: Any, layout: Sharding) -> jax.Array:
    """Return an array of which this process has no shard."""
    return jax.make_array_from_single_device_arrays(like.shape, layout, [], dtype=like.dtype)


def place(x: np.ndarray, layout: Sharding) -> jax.Array:
    """Lay out an array; every process that has a shard has the whole array."""
    if not has_device(layout):
        return absent(x, layout)
    return jax.make_array_from_callback(x.shape, layout, lambda index: x[index])


def everywhere(tree: Any) -> Any:
    """Send arrays, wherever they lie, to one device of every process; nothing waits for them here."""
    return tree if jax.process_count() == 1 else _sender()(tree)


@functools.cache
def _sender() -> multimesh.Jitted:
    warnings.filterwarnings("ignore", re.escape(f"{__file__}:"))  # moving its arguments is its purpose
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[process] for process in sorted(firsts)]), ("process",))
    return multimesh.jit(multimesh.task(lambda tree: tree, "everywhere", mesh=mesh))


ended_by_signal = False
"""Whether a signal ended the training; MaxText then leaves its loop."""


def listen() -> None:
    """Let a signal end the training with a checkpoint.

    JAX's preemption service needs several processes and a coordinator. A run of one process takes SIGTERM from now on,
    and asks once for each step whether it came before.
    """
    ask: Callable[[int], bool] = multihost_utils.reached_preemption_sync_point
    if jax.process_count() == 1:
        came = list[int]()
        signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
        ask = functools.lru_cache(maxsize=1)(lambda _step: bool(came))

    def reached(step: int) -> bool:
        global ended_by_signal
        ended_by_signal = ask(step) or ended_by_signal
        return ended_by_signal

    multihost_utils.reached_preemption_sync_point = reached
