"""An allreduce over processes: `lax.psum` against mpi4jax, where it is installed. Start it with mpirun:

    mpirun -n 4 python multimesh/benchmarks/allreduce.py

Each process has one CPU device. CPU time of all processes per call, contenders in turns; process 0 prints.
"""

from __future__ import annotations

import functools
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize(cluster_detection_method=None if "OMPI_MCA_orte_hnp_uri" in os.environ else "mpi4py")
try:
    import mpi4jax
    from mpi4py import MPI
except ImportError:
    mpi4jax = None

CALLS = 20


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    say = print if jax.process_index() == 0 else lambda *_: None
    say(f"{jax.process_count()} processes; per call, medians of 5 rounds of {CALLS} (load {os.getloadavg()[0]:.1f})")
    for size in (1 << 10, 1 << 20):
        mine = jnp.ones((size,), jnp.float32)
        whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P("ranks")), np.ones(size, np.float32))
        contenders = {
            "lax.psum": jax.jit(
                functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ranks"), out_specs=P())(
                    lambda x: lax.psum(x, "ranks")
                )
            )
        }
        given = {"lax.psum": whole}
        if mpi4jax is not None:
            contenders["mpi4jax.allreduce"] = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=MPI.COMM_WORLD))
            given["mpi4jax.allreduce"] = mine
        cpu: dict[str, list[float]] = {name: [] for name in contenders}
        wall: dict[str, list[float]] = {name: [] for name in contenders}
        for count in range(6):
            for name, f in contenders.items():
                multihost_utils.sync_global_devices(f"{name} {size} {count}")
                start, began = time.process_time(), time.perf_counter()
                for _ in range(CALLS):
                    jax.block_until_ready(f(given[name]))
                if count:
                    wall[name].append((time.perf_counter() - began) / CALLS)
                    cpu[name].append((time.process_time() - start) / CALLS)
        for name in contenders:
            times = multihost_utils.process_allgather(np.float32(statistics.median(cpu[name])))
            say(
                f"{4 * size:9} bytes  {name:18} {1e3 * times.sum():7.2f} ms of CPU in all processes, "
                f"{1e3 * statistics.median(wall[name]):7.2f} ms of time"
            )


if __name__ == "__main__":
    main()
