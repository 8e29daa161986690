"""The allreduce of mpi4jax's first example, in plain JAX.

    mpirun -n 4 python examples/allreduce.py      # one device in each of four processes; or srun -n 4
    python examples/allreduce.py                  # eight devices in one process

With mpi4jax the same is (each process runs it on an array of its own):

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()

    @jax.jit
    def foo(arr):
        arr = arr + rank
        arr_sum, _ = mpi4jax.allreduce(arr, op=MPI.SUM, comm=comm)
        return arr_sum

    result = foo(jnp.zeros((3, 3)))

Here a mesh is the communicator, an index along its axis the rank, and `lax.psum` the reduction. All processes run one
program, so nothing has to be ordered by tokens, XLA can overlap it, and it can be differentiated.
"""

import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with accelerators, delete this line and `jax_num_cpu_devices` below
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import multimesh as mm

job = mm.distributed.initialize(alone=True)
jax.config.update("jax_num_cpu_devices", 8 if job.launcher == "nobody" else 1)
mesh = Mesh(np.array(jax.devices()), ("ranks",))


@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
def foo(arr):
    """Sum over all ranks of the array plus the rank."""
    arr = arr + lax.axis_index("ranks")
    return lax.psum(arr, "ranks")


a = jnp.zeros((3, 3))
result = foo(a)
total = np.asarray(result.addressable_data(0))
np.testing.assert_array_equal(total, np.full((3, 3), sum(range(jax.device_count()))))
if job.rank == 0:
    print(total)
    print(f"ok: the sum over {jax.device_count()} devices of {jax.process_count()} processes")
