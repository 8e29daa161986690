"""A density field of the universe on eight devices: noise, linear field, displaced particles, painted mass.

    python examples/density_field.py [SIZE] [PICTURE.png]      # or: mpirun -n 2 python ...; srun -n 4 python ...

White noise becomes a linear field by a filter in Fourier space; the gradient of its potential displaces one particle
from each cell (Zel'dovich's approximation); cloud-in-cell painting gives each particle's mass to the eight cells around
it. Each device paints its slab with a halo of cells on both sides, which it then hands to its neighbours. All of it is
differentiable.
"""

import functools
import os
import struct
import sys
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with 8 accelerators, delete this line and `jax_num_cpu_devices` below
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm


def displacements(noise, scale, mesh):
    """Of the particle in each cell, in cells: (X, Y, Z, 3), sharded over X as the noise."""
    spec = P("x")
    spectrum = mm.fft.rfftn(noise, mesh=mesh, spec=spec, transposed=True)  # (Y, Z // 2 + 1, X), sharded over Y
    k2 = sum(k**2 for k in mm.grids.wavenumbers(noise.shape, mesh=mesh, spec=spec))
    power = jnp.where(k2 > 0, jnp.exp(-k2) / jnp.sqrt(jnp.where(k2 > 0, k2, 1)), 0)  # falls as exp(-2 k^2) / k^2
    field = mm.fft.irfftn(scale * power * spectrum, noise.shape, mesh=mesh, spec=spec, transposed=True)
    potential = mm.grids.poisson(-field, mesh=mesh, spec=spec)
    return jnp.stack(mm.grids.gradient(potential, mesh=mesh, spec=spec), -1)


@functools.partial(jax.jit, static_argnames=("mesh", "halo"))
def density(noise, scale, mesh, halo=4):
    """Mass per cell, mean 1 if no particle is lost, and the number of lost particles."""
    cells = jnp.stack(jnp.meshgrid(*map(jnp.arange, noise.shape), indexing="ij"), -1)
    moved = cells + displacements(noise, scale, mesh)
    return mm.grids.paint(moved, shape=noise.shape, mesh=mesh, spec=P("x"), halo=halo)


def write_png(path, image):
    """Gray values from 0 to 1, dark to bright."""
    rows = (255 * np.clip(image, 0, 1)).astype(np.uint8)
    height, width = rows.shape
    pixels = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    with open(path, "wb") as file:
        parts = (("IHDR", header), ("IDAT", zlib.compress(pixels)), ("IEND", b""))
        file.write(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind.encode(), data) for kind, data in parts))


def main():
    """All devices beside one."""
    job = mm.distributed.initialize(alone=True)  # under srun or mpirun: one of several processes
    jax.config.update("jax_num_cpu_devices", 8 // len(job.hosts))
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    path = sys.argv[2] if len(sys.argv) > 2 else "density_field.png"
    noise = np.random.default_rng(0).standard_normal((n, n, n)).astype(np.float32)
    scale, results = 1.5, []
    for devices in (jax.local_devices()[:1], jax.devices()):
        mesh = Mesh(np.array(devices), ("x",))
        placed = jax.device_put(noise, NamedSharding(mesh, P("x")))
        field, lost = density(placed, scale, mesh)
        slope = jax.grad(lambda s, x=placed, m=mesh: jnp.mean(density(x, s, m)[0] ** 2))(scale)
        total, variance = float(field.sum() / n**3), float(field.var())
        if job.rank == 0:
            print(
                f"{len(devices)} devices: {total:.6f} of the mass painted, {int(lost)} of {n**3} particles left the "
                f"halos, variance {variance:.5f}, d variance / d scale {float(slope):.5f}"
            )
        if int(lost) == 0:
            np.testing.assert_allclose(total, 1, rtol=1e-5)
        results.append((field, float(slope)))
    (one, expected), (field, slope) = results
    one = np.asarray(one)
    difference = max(np.abs(np.asarray(shard.data) - one[shard.index]).max() for shard in field.addressable_shards)
    np.testing.assert_allclose(slope, expected, rtol=1e-4)
    # Displacements beyond the halo are counted, not lost silently.
    lost = int(density(placed, 20 * scale, mesh)[1])
    if difference > 2e-4:
        raise SystemExit(f"process {job.rank}: its part of the field differs by {difference} from that of one device")
    if job.rank == 0:
        print(f"largest difference to one device: {difference:.1e}")
        print(f"with displacements twenty times as large {lost} particles leave the halos")
        column = np.log1p(one[:, :, : n // 4].sum(2))
        write_png(path, (column - column.min()) / np.ptp(column))
        print(f"ok: the mass along a quarter of the third axis is in {path}")


if __name__ == "__main__":
    main()
