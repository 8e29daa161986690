"""What JAX itself costs underneath a step: calls of executables, transfers, the cache of compilations, other processes.

Microseconds of the main thread's CPU time: the least and the median of many rounds. Run it in turns with two
versions of JAX.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ |= {"NPROC": "64", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

import jax
import jax.experimental.transfer
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.core import _compat
from multimesh.core._compat import executables

ARRAYS, ROUNDS = 16, 300


def least_and_median(run: Callable[[], object], rounds: int = ROUNDS) -> str:
    """Microseconds of this thread's CPU time for a call, whose results are awaited outside of it."""
    took = []
    for _ in range(rounds):
        start = time.thread_time()
        result = run()
        took.append(1e6 * (time.thread_time() - start))
        jax.block_until_ready(result)
    return f"{min(took):.0f} / {np.median(took):.0f}"


def layouts(count: int) -> tuple[NamedSharding, NamedSharding]:
    """The same layout on the first devices, and on the next."""
    grid = np.array(jax.devices()[: 2 * count]).reshape(2, count)
    first, second = (NamedSharding(Mesh(part, ("data",)), P("data")) for part in grid)
    return first, second


def peer(size: int) -> None:
    """The other process: offers an array for every line that it reads."""
    server = jax.experimental.transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
    sent = jax.device_put(np.zeros(size, np.uint8))
    print(server.address(), flush=True)
    for line in sys.stdin:
        server.await_pull(int(line), [sent])
        print("offered", flush=True)


def between_processes(size: int, rounds: int = 60) -> str:
    """Microseconds from a pull to the array, by the clock."""
    server = jax.experimental.transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
    command = [sys.executable, __file__, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        connection = server.connect(other.stdout.readline().strip())
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shape, took = jax.ShapeDtypeStruct((size,), np.uint8, sharding=here), []
        for n in range(rounds):
            print(n, file=other.stdin, flush=True)
            other.stdout.readline()
            start = time.perf_counter()
            jax.block_until_ready(connection.pull(n, [shape]))
            took.append(1e6 * (time.perf_counter() - start))
        other.stdin.close()
    return f"{min(took):.0f} / {np.median(took):.0f}"


def from_cache() -> str:
    """Milliseconds of CPU time to compile a program, and to find it in the persistent cache."""
    took = []
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for _ in range(2):
            lowered = jax.jit(lambda x: [jax.nn.softmax(x @ x.T * k) for k in range(20)]).lower(np.ones((64, 64), "f"))
            start = time.process_time()
            lowered.compile()
            took.append(1e3 * (time.process_time() - start))
            jax.clear_caches()
        jax.config.update("jax_compilation_cache_dir", None)
    return f"{took[0]:.0f}, {took[1]:.0f}"


def main() -> None:
    """Print one line a measurement."""
    print(f"jax {jax.__version__}, Python {sys.version.split()[0]}, load average {os.getloadavg()[0]:.0f}")
    for count in (1, 2, 4):
        here, there = layouts(count)
        arrays = [jax.device_put(np.ones((8, 8), "f"), here) for _ in range(ARRAYS)]
        call = jax.jit(lambda *xs: [x + 1 for x in xs])
        jax.block_until_ready(call(*arrays))
        print(f"a call, {ARRAYS} arrays each way, {count} devices: {least_and_median(lambda: call(*arrays))}")  # noqa: B023
        print(f"device_put of one array, {count} devices: {least_and_median(lambda: jax.device_put(arrays[0], there))}")  # noqa: B023
        print(f"device_put of {ARRAYS} at once: {least_and_median(lambda: jax.device_put(arrays, [there] * ARRAYS))}")  # noqa: B023
        for some in (arrays[:1], arrays):
            move = executables.transfer([here] * len(some), [there] * len(some), some)
            with _compat.explicit_transfers():
                print(f"copy of the shards of {len(some)}: {least_and_median(lambda: move(*some))}")  # noqa: B023
    print(f"compile, then from the cache (ms of all threads): {from_cache()}")
    for size in (1 << 10, 1 << 20):
        print(f"jax.experimental.transfer of {size >> 10} KiB (by the clock): {between_processes(size)}")


if __name__ == "__main__":
    peer(int(sys.argv[1])) if len(sys.argv) > 1 else main()
