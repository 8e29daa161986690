"""Two processes of four devices each: which devices there are, a matrix over all of them, then a pipeline over both.

    examples/multi_process.sh    # starts both processes and prints what they wrote

The first half is jaxmg's multi-process page. In the second each process has one stage of a pipeline, and compares its
part of the gradients with plain ``jax.jit`` on one device.
"""

import os
import sys

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # examples/multi_process.sh says 4
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

proc_id = int(sys.argv[1]) if len(sys.argv) > 1 else 0
num_procs = int(sys.argv[2]) if len(sys.argv) > 2 else 1

# 1. All processes meet. Under srun or mpirun, initialize() needs no arguments.
jax.config.update("jax_platform_name", "cpu")
mm.distributed.initialize(os.environ.get("COORDINATOR", "localhost:6000"), num_procs, proc_id)


def get_device_grid():
    """Devices, a row a process."""
    by_proc = {}
    for d in jax.devices():
        by_proc.setdefault(d.process_index, []).append(d)
    hosts = sorted(by_proc)
    return np.array([[by_proc[h][x] for x in range(jax.local_device_count())] for h in hosts])


print(f"Rank {proc_id}")
print(f"Local devices {jax.local_device_count()}")
print(f"Global devices {jax.device_count()}")
print(f"World size {num_procs}")
print(f"Device grid{get_device_grid()}")

# 2. A matrix whose columns lie on all devices, then on those of each process.
mesh2d = Mesh(get_device_grid(), ("x", "y"))
A = jax.device_put(
    jnp.diag(jnp.arange(1, jax.device_count() + 1, dtype=jnp.float32)),
    NamedSharding(mesh2d, P(None, ("x", "y"))),
)
for shard in A.addressable_shards:
    print(f"shard\n {shard.data}")
A = jax.lax.with_sharding_constraint(A, NamedSharding(mesh2d, P(None, "y")))
for shard in A.addressable_shards:
    print(f"shard\n {shard.data}")

# 3. A pipeline of two stages. Every process calls the same function, and runs its own stage.
front, back = (Mesh(d, ("data",)) for d in np.split(get_device_grid().flatten(), 2))


def loss(w, x):
    """Sum of squares of what two layers make of rows of x."""
    x = mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=front)(w["first"], x)
    return mm.task(lambda w, x: jnp.sum((x @ w) ** 2), "second", mesh=back)(w["second"], x)


def step(w, x):
    """Loss and gradients, summed over four microbatches."""
    return mm.microbatch(jax.value_and_grad(loss), argnum=1, size=8)(w, x)


draw = np.random.default_rng(0).standard_normal
w = {name: draw((16, 16)).astype(np.float32) / 4 for name in ("first", "second")}
x = draw((32, 16)).astype(np.float32)
total, grads = mm.jit(step)(w, x)

with mm.context(ignore_transforms=True):
    expected, slopes = jax.jit(step)(w, x)
for name, grad in grads.items():
    local = [f"{s.data.shape} on {s.device}" for s in grad.addressable_shards]
    print(f"gradient of {name}: {', '.join(local) if local else 'elsewhere'}")
    for shard in grad.addressable_shards:
        np.testing.assert_allclose(shard.data, slopes[name][shard.index], rtol=0, atol=1e-5 * abs(slopes[name]).max())
total = mm.distributed.gather(total)  # it lies on the last stage
np.testing.assert_allclose(total, expected, rtol=1e-5)
print(f"loss {total:.6f}, as on one device")
