"""A particle-mesh step on eight devices, and the gradient of what comes out by what went in.

    python examples/particle_mesh.py [SIZE]      # or: mpirun -n 2 python ...; srun -n 4 python ...

Particles give their mass to a grid, Poisson's equation gives the potential, and its gradient, read at the particles,
their forces. They are kicked and drift (leapfrog). The gradient of a cost of the new density by the old positions goes
back through all of it. Each device holds its particles and its slab of the grid; a device never has all of either.
"""

import functools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with 8 accelerators, delete this line and `jax_num_cpu_devices` below
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

SPEC, HALO = P("x"), 2


def forces(positions, shape, mesh):
    """Of the particles at these positions, in cells: minus the gradient of the potential."""
    density, _ = mm.grids.paint(positions, shape=shape, mesh=mesh, spec=SPEC, halo=HALO)
    potential = mm.grids.poisson(density - 1, mesh=mesh, spec=SPEC)
    slopes = mm.grids.gradient(potential, mesh=mesh, spec=SPEC)
    return -jnp.stack([mm.grids.read(f, positions, mesh=mesh, spec=SPEC, halo=HALO) for f in slopes], -1)


@functools.partial(jax.jit, static_argnames=("shape", "mesh"))
def step(positions, velocities, shape, mesh, dt=0.5):
    """Kick, drift, kick."""
    velocities = velocities + forces(positions, shape, mesh) * dt / 2
    positions = positions + velocities * dt
    return positions, velocities + forces(positions, shape, mesh) * dt / 2


def cost(positions, velocities, shape, mesh):
    """The variance of the density after a step."""
    moved, _ = step(positions, velocities, shape, mesh)
    density, lost = mm.grids.paint(moved, shape=shape, mesh=mesh, spec=SPEC, halo=HALO)
    return jnp.mean((density - 1) ** 2), lost


def main():
    """All devices beside one."""
    job = mm.distributed.initialize(alone=True)  # under srun or mpirun: one of several processes
    jax.config.update("jax_num_cpu_devices", 8 // len(job.hosts))
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    shape, rng = (n, n, n), np.random.default_rng(0)
    cells = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
    start = (cells + rng.uniform(-0.4, 0.4, cells.shape)).astype(np.float32)
    found = []
    for devices in (jax.local_devices()[:1], jax.devices()):
        mesh = Mesh(np.array(devices), ("x",))
        positions = jax.device_put(start, NamedSharding(mesh, SPEC))
        run = jax.value_and_grad(functools.partial(cost, shape=shape, mesh=mesh), has_aux=True)
        (value, lost), slopes = run(positions, jnp.zeros_like(positions))
        if job.rank == 0:
            print(f"{len(devices)} devices: variance {float(value):.6f}, {int(lost)} particles left the halos")
        found.append((float(value), slopes))
    (expected, one), (value, slopes) = found
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    one = np.asarray(one)
    largest = np.abs(one).max()
    for each in slopes.addressable_shards:
        np.testing.assert_allclose(each.data, one[each.index], atol=1e-4 * largest)
    if job.rank == 0:
        print(f"ok: gradients by {one.size} coordinates are those of one device")


if __name__ == "__main__":
    main()
