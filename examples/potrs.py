"""A Cholesky solve over two processes of four devices each, as the multi-process page of jaxmg has it.

    examples/potrs.sh            # starts both processes and prints what they wrote

The page gathers the matrix into every process first, because its solver can't cross them, and needs GPUs. Here its last
cell runs on any devices, and what follows solves over all eight devices without gathering anything.
"""

import os
import sys

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # examples/potrs.sh says 4
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # CPU devices share the cores: threads of BLAS would only wait
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh_numerics.linalg import potrs

proc_id = int(sys.argv[1]) if len(sys.argv) > 1 else 0
num_procs = int(sys.argv[2]) if len(sys.argv) > 2 else 1

# initialize the distributed system
jax.config.update("jax_platform_name", "cpu")
jax.distributed.initialize(os.environ.get("COORDINATOR", "localhost:6000"), num_procs, proc_id)


def get_device_grid():
    """Devices, a row a process."""
    by_proc = {}
    for d in jax.devices():
        by_proc.setdefault(d.process_index, []).append(d)
    hosts = sorted(by_proc)
    return np.array([[by_proc[h][x] for x in range(jax.local_device_count())] for h in hosts])


def create_2d_mesh():
    """Processes x devices of each."""
    dev_grid = get_device_grid()
    return Mesh(dev_grid, ("x", "y"))


print(f"Rank {proc_id}")
print(f"Local devices {jax.local_device_count()}")
print(f"Global devices {jax.device_count()}")
print(f"World size {num_procs}")
print(f"Device grid{get_device_grid()}")

mesh2d = create_2d_mesh()
A = jax.device_put(
    jnp.diag(jnp.arange(1, jax.device_count() + 1, dtype=jnp.float32)),
    NamedSharding(mesh2d, P(None, ("x", "y"))),
)
replicated = A
for shard in A.addressable_shards:
    print(f"shard\n {shard.data}")

# Gather over the number of hosts
A = jax.lax.with_sharding_constraint(A, NamedSharding(mesh2d, P(None, "y")))
for shard in A.addressable_shards:
    print(f"shard\n {shard.data}")

out = potrs(
    A,
    jnp.ones((jax.device_count(), 1), dtype=jnp.float32),
    T_A=256,
    mesh=mesh2d,
    in_specs=(P(None, "T"), P(None, None)),  # the mesh has no axis "T": a warning, and the sharding of A itself
)

# The same over all devices of all processes: nothing is gathered, and N may be what no process could hold.
out_all = potrs(replicated, jnp.ones((jax.device_count(), 1), dtype=jnp.float32))

expected = 1 / np.arange(1, jax.device_count() + 1)
for name, x in (("gathered into each process", out), ("over all devices", out_all)):
    values = np.asarray(x.addressable_data(0))[:, 0]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    print(f"ok: {name}: {values}")
