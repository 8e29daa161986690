"""A particle-mesh step on eight devices, and the gradient of its result with respect to its input.

    python examples/particle_mesh.py [SIZE] [--picture FILE.png]     # or: mpirun -n 2 python ...; srun -n 4 python ...

``--picture`` also lets structure grow in 24 steps from the displacements of `density_field.py`, on eight devices and on
one, and draws the mass along the third axis: at the start and at the end on eight devices, and at the end on one.

Particles give their mass to a grid, Poisson's equation gives the potential, and its gradient, read at the particles,
their forces. They are kicked and drift (leapfrog). The gradient of a cost of the new density by the old positions goes
back through all of it. Each device holds its particles and its slab of the grid; a device never has all of either.
"""

import argparse
import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with 8 accelerators, delete this line and `jax_num_cpu_devices` below
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import jax.numpy as jnp
import numpy as np
from density_field import displacements, write_png
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

SPEC, HALO = P("x"), 2
STEPS, FAR = 24, 8  # of the picture; its particles move up to eight cells


def forces(positions, shape, mesh, halo=HALO):
    """Of the particles at these positions, in cells: minus the gradient of the potential."""
    density, _ = mm.grids.paint(positions, shape=shape, mesh=mesh, spec=SPEC, halo=halo)
    potential = mm.grids.poisson(density - 1, mesh=mesh, spec=SPEC)
    slopes = mm.grids.gradient(potential, mesh=mesh, spec=SPEC)
    return -jnp.stack([mm.grids.read(f, positions, mesh=mesh, spec=SPEC, halo=halo) for f in slopes], -1)


@functools.partial(jax.jit, static_argnames=("shape", "mesh", "halo"))
def step(positions, velocities, shape, mesh, dt=0.5, halo=HALO):
    """Kick, drift, kick."""
    velocities = velocities + forces(positions, shape, mesh, halo) * dt / 2
    positions = positions + velocities * dt
    return positions, velocities + forces(positions, shape, mesh, halo) * dt / 2


def cost(positions, velocities, shape, mesh):
    """The variance of the density after a step."""
    moved, _ = step(positions, velocities, shape, mesh)
    density, lost = mm.grids.paint(moved, shape=shape, mesh=mesh, spec=SPEC, halo=HALO)
    return jnp.mean((density - 1) ** 2), lost


@functools.partial(jax.jit, static_argnames="mesh")
def grown(noise, mesh):
    """The density at the start and after ``STEPS`` steps, and how many particles left the halos at the end."""
    shape, offsets = noise.shape, displacements(noise, 0.5, mesh)
    cells = jnp.stack(jnp.meshgrid(*map(jnp.arange, shape), indexing="ij"), -1)
    paint = functools.partial(mm.grids.paint, shape=shape, mesh=mesh, spec=SPEC, halo=FAR)
    start = cells + offsets, offsets  # without expansion, growing modes of small waves grow as exp(t)
    end, _ = jax.lax.fori_loop(0, STEPS, lambda _, state: step(*state, shape, mesh, 0.1, FAR), start)
    density, lost = paint(end)
    return paint(start[0])[0], density, lost


def draw(path, n, job):
    """The picture: what eight devices and one make of the same noise."""
    noise = np.random.default_rng(0).standard_normal((n, n, n)).astype(np.float32)
    results = []
    for devices in (jax.devices(), jax.local_devices()[:1]):
        mesh = Mesh(np.array(devices), ("x",))
        *densities, lost = grown(jax.device_put(noise, NamedSharding(mesh, SPEC)), mesh)
        np.testing.assert_equal(int(lost), 0)
        images = mm.distributed.gather(densities) if len(devices) > 1 else densities
        results.append([np.asarray(x).sum(2) for x in images])
    (start, many), (_, one) = results
    difference = np.abs(many - one).max()
    np.testing.assert_allclose(many, one, rtol=1e-2, atol=1e-2)
    if job.rank == 0:
        columns = np.log1p(np.concatenate([np.pad(x, 1) for x in (start, many, one)], 1))
        dark, bright = np.percentile(np.log1p(one), (1, 99.9))
        write_png(path, np.kron((columns - dark + 0.1) / (bright - dark + 0.1), np.ones((4, 4))))
        print(f"{path}: eight devices and one differ by {difference:.1e} of columns up to {one.max():.0f}")


def main():
    """All devices beside one."""
    job = mm.distributed.initialize(alone=True)  # under srun or mpirun: one of several processes
    jax.config.update("jax_num_cpu_devices", 8 // len(job.hosts))
    parser = argparse.ArgumentParser()
    parser.add_argument("size", type=int, nargs="?", default=32)
    parser.add_argument("--picture")
    args = parser.parse_args()
    n = args.size
    if args.picture and n < 8 * FAR:
        parser.error(f"a picture needs a size of {8 * FAR}, so that each device has {FAR} cells along the first axis")
    shape, rng = (n, n, n), np.random.default_rng(0)
    cells = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
    start = (cells + rng.uniform(-0.4, 0.4, cells.shape)).astype(np.float32)
    results = []
    for devices in (jax.local_devices()[:1], jax.devices()):
        mesh = Mesh(np.array(devices), ("x",))
        positions = jax.device_put(start, NamedSharding(mesh, SPEC))
        run = jax.value_and_grad(functools.partial(cost, shape=shape, mesh=mesh), has_aux=True)
        (value, lost), slopes = run(positions, jnp.zeros_like(positions))
        if job.rank == 0:
            print(f"{len(devices)} devices: variance {float(value):.6f}, {int(lost)} particles left the halos")
        results.append((float(value), slopes))
    (expected, one), (value, slopes) = results
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    one = np.asarray(one)
    largest = np.abs(one).max()
    for shard in slopes.addressable_shards:
        np.testing.assert_allclose(shard.data, one[shard.index], atol=1e-4 * largest)
    if job.rank == 0:
        print(f"ok: gradients by {one.size} coordinates are those of one device")
    if args.picture:
        draw(args.picture, n, job)


if __name__ == "__main__":
    main()
