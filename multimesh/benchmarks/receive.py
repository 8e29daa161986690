"""What a transfer between processes costs the calling threads: the parts of a send and of a receive, in us of CPU time.

One process is both ends of a connection of ``jax.experimental.transfer``. Parts are measured in turns, round by round,
in changing order. An array for a kernel is pulled into the layout of its submesh; one for the caller, or one shard of
several, to its device first. After each pull the thread waits for the array, as a pipeline does where it is ahead.

``python multimesh/benchmarks/receive.py [ROUNDS]``
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from multimesh.core import _compat
from multimesh.runtime.transport import ends

import multimesh

SHAPE = (128, 512)
WARM = 20  # rounds that do not count


def parts(rounds: int) -> dict[str, list[float]]:
    """CPU time of the calling thread in each part of a transfer, of each round."""
    multimesh.virtual_devices(2)
    source, target = (NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec()) for device in jax.devices()[:2])
    (device,) = target.device_set
    server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"] * 2)
    offer, pull = _compat.offerer(server), _compat.puller(server.connect(server.address()), device.client)
    x = jax.device_put(np.ones(SHAPE, np.float32), source)
    both = ends(source, target, x.shape, x.dtype)
    single = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    receives = {"for a kernel": [both.piece], "for the caller": [single]}
    numbers = itertools.count()
    found: dict[str, list[float]] = {}

    def timed(part: str, call: Callable[[], Any]) -> Any:
        begun = time.thread_time()
        result = call()
        found.setdefault(part, []).append(1e6 * (time.thread_time() - begun))
        return result

    for _ in range(rounds + WARM):
        timed("(to read the clock twice)", lambda: None)
        for reader in random.sample([*receives], 2):
            number, wanted = next(numbers), receives[reader]
            (held,) = timed("send: take the shards", lambda: both.leave(x))
            pieces = [*held.values()]
            timed("send: offer them", lambda number=number, pieces=pieces: offer(number, pieces))
            got = timed(f"receive {reader}: pull", lambda number=number, wanted=wanted: pull(number, wanted))
            made = timed(f"receive {reader}: the array", lambda got=got: both.arrive(got))
            assert made.sharding == target
            np.testing.assert_array_equal(made, x)
        checked = timed(
            "(the array, by JAX's public function)",
            lambda got=got: jax.make_array_from_single_device_arrays(x.shape, target, got),
        )
        assert checked.sharding == target
    return {part: times[WARM:] for part, times in found.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print(f"us of the calling thread, {rounds} rounds of float32{[*SHAPE]}, jax {jax.__version__}")
    print(f"{'':45}{'fastest':>9}{'median':>9}")
    for part, times in parts(rounds).items():
        print(f"{part:45}{min(times):9.1f}{statistics.median(times):9.1f}")


if __name__ == "__main__":
    main()
