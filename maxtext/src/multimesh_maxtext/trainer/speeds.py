"""How long each process computes, beside the others: a product on its devices, every some steps.

In a pipeline all processes have the same time of a step, because they wait for each other. So each times the same
product on each of its devices, between two steps, and the slowest is named.
"""

from __future__ import annotations

import functools
import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh
from multimesh_maxtext.handoff import MEDIAN, SLOWEST, WORST

EVERY = 100
"""Steps from one comparison to the next; the first is after the second step."""

SLOW = 1.2
"""A process that takes this many times as long as the median is named in the log."""

_WIDTH = {"cpu": 256, "gpu": 4096}  # of the square matrices
_LONG = 0.05  # seconds of products: another program's turn on the same core is part of them
_NAME = 64  # bytes of a host's name


@dataclass(frozen=True)
class Speeds:
    """Seconds of the product in each process, on its slowest device, and the names of their machines."""

    seconds: tuple[float, ...]
    hosts: tuple[str, ...]

    @property
    def slowest(self) -> int:
        """Number of the process that takes longest."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)

    def scalars(self) -> dict[str, float]:
        """Return what the record of a step gets."""
        worst = self.seconds[self.slowest]
        return {MEDIAN: statistics.median(self.seconds), WORST: worst, SLOWEST: float(self.slowest)}

    def line(self, step: int) -> str:
        """Return a line that names the slowest; empty where it takes hardly longer than the others."""
        rank, median = self.slowest, statistics.median(self.seconds)
        if self.seconds[rank] < SLOW * median:
            return ""
        return (
            f"multimesh: process {rank} of {len(self.seconds)} (on {self.hosts[rank]}) is slow after step {step}: a "
            f"product takes {1e3 * self.seconds[rank]:.2f} ms on its devices, {1e3 * median:.2f} ms in the median; "
            "look at clocks, temperatures and other programs there"
        )


def compare_speeds(step: int) -> dict[str, float]:
    """Compare the processes and print who is slow; return scalars for the record of the step. All processes call it."""
    if jax.process_count() == 1 or step % EVERY != 1:
        return {}
    seconds = max(map(_time_product, jax.local_devices()))
    name = socket.gethostname().encode()[:_NAME].ljust(_NAME, b"\0")
    each, names = multimesh.distributed.gather(
        (_share_row(np.array([seconds])), _share_row(np.frombuffer(name, "u1")[None]))
    )
    hosts = tuple(bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in names)
    speeds = Speeds(tuple(map(float, each)), hosts)
    if jax.process_index() == 0 and (line := speeds.line(step)):
        print(line, flush=True)
    return speeds.scalars()


def _time_product(device: jax.Device) -> float:
    """Return the seconds of a product on a device: the mean of some, once its queue is empty."""
    product, x = _product(device)
    product(x).block_until_ready()  # waits for the kernels of the step in flight
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _LONG:
        product(x).block_until_ready()
        count += 1
    return spent / count


@functools.cache
def _product(device: jax.Device) -> tuple[Any, jax.Array]:
    width = _WIDTH.get(device.platform, _WIDTH["gpu"])
    return jax.jit(lambda x: x @ x), jax.device_put(jnp.ones((width, width), jnp.bfloat16), device)


def _share_row(row: np.ndarray) -> jax.Array:
    """Return an array with a row of each process, of which this one has its own."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    layout = NamedSharding(Mesh(np.array([firsts[rank] for rank in sorted(firsts)]), ("process",)), P("process"))
    mine = jax.device_put(row, firsts[jax.process_index()])
    return jax.make_array_from_single_device_arrays((len(firsts), *row.shape[1:]), layout, [mine])
