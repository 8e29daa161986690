"""A density field of the universe on eight devices: noise, linear field, displaced particles, painted mass.

    python examples/density_field.py [SIZE] [PICTURE.png]

White noise becomes a linear field by a filter in Fourier space; its gradient displaces one particle from each cell
(Zel'dovich's approximation); cloud-in-cell painting gives each particle's mass to the eight cells around it. Each
device paints its slab with a halo of cells on both sides, which it then hands to its neighbours. All of it is
differentiable.
"""

import functools
import itertools
import os
import struct
import sys
import zlib

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with 8 accelerators, delete this line and the one above
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm


def displacements(noise, scale, mesh):
    """Of the particle in each cell, in cells: (X, Y, Z, 3), sharded over X as the noise."""
    n = noise.shape[0]
    spectrum = mm.fft.rfftn(noise, mesh=mesh, spec=P("x"), transposed=True)  # (Y, Z // 2 + 1, X), sharded over Y
    kx = 2 * jnp.pi * jnp.fft.fftfreq(n)[None, None, :]
    ky = 2 * jnp.pi * mm.fft.fftfreq(n, mesh=mesh, spec=P("x"))[:, None, None]
    kz = 2 * jnp.pi * jnp.fft.rfftfreq(n)[None, :, None]
    k2 = kx**2 + ky**2 + kz**2
    inverse = jnp.where(k2 > 0, 1 / jnp.where(k2 > 0, k2, 1), 0)
    linear = spectrum * scale * jnp.sqrt(inverse) * jnp.exp(-k2)  # power falls as exp(-2 k^2) / k^2
    back = functools.partial(mm.fft.irfftn, s=(n, n, n), mesh=mesh, spec=P("x"), transposed=True)
    return jnp.stack([back(1j * k * inverse * linear) for k in (kx, ky, kz)], -1)


def paint(moved, halo):
    """My slab of displacements -> mass in each of my cells, and how many particles left the halos of their devices."""
    slab, n = moved.shape[:2]
    cells = jnp.stack(jnp.meshgrid(jnp.arange(slab), jnp.arange(n), jnp.arange(n), indexing="ij"), -1)
    position = cells + moved
    corner = jnp.floor(position)
    fraction, corner = position - corner, corner.astype(jnp.int32)
    x, y, z = corner[..., 0], corner[..., 1], corner[..., 2]
    grid = jnp.zeros((slab + 2 * halo + 1, n, n), moved.dtype)  # the last plane takes the right half of the halo's mass
    lost = (x < -halo) | (x >= slab + halo)
    for dx, dy, dz in itertools.product((0, 1), repeat=3):
        step = jnp.array((dx, dy, dz))
        mass = jnp.where(lost, 0, jnp.prod(jnp.where(step == 1, fraction, 1 - fraction), -1))
        grid = grid.at[x + dx + halo, (y + dy) % n, (z + dz) % n].add(mass, mode="drop")
    left, mine, right = grid[:halo], grid[halo : halo + slab], grid[halo + slab :]
    devices = lax.axis_size("x")
    forwards = [(i, (i + 1) % devices) for i in range(devices)]
    backwards = [(i, (i - 1) % devices) for i in range(devices)]
    mine = mine.at[: halo + 1].add(lax.ppermute(right, "x", forwards))
    mine = mine.at[slab - halo :].add(lax.ppermute(left, "x", backwards))
    return mine, lax.psum(jnp.sum(lost), "x")


@functools.partial(jax.jit, static_argnames=("mesh", "halo"))
def density(noise, scale, mesh, halo=4):
    """Mass per cell, mean 1 if no particle is lost, and the number of lost particles."""
    if halo >= noise.shape[0] // mesh.size:
        raise SystemExit(f"a halo of {halo} cells needs slabs of more: use fewer devices or a larger grid")
    run = jax.shard_map(lambda moved: paint(moved, halo), mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P()))
    return run(displacements(noise, scale, mesh))


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
    """Eight devices beside one."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    path = sys.argv[2] if len(sys.argv) > 2 else "density_field.png"
    noise = np.random.default_rng(0).standard_normal((n, n, n)).astype(np.float32)
    scale, fields, slopes = 1.5, [], []
    for devices in (1, 8):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
        placed = jax.device_put(noise, NamedSharding(mesh, P("x")))
        field, lost = density(placed, scale, mesh)
        slope = jax.grad(lambda s, x=placed, m=mesh: jnp.mean(density(x, s, m)[0] ** 2))(scale)
        print(
            f"{devices} devices: {float(field.sum() / n**3):.6f} of the mass painted, {int(lost)} of {n**3} particles "
            f"left the halos, variance {float(field.var()):.5f}, d variance / d scale {float(slope):.5f}"
        )
        if int(lost) == 0:
            np.testing.assert_allclose(field.sum() / n**3, 1, rtol=1e-5)
        fields.append(np.asarray(field))
        slopes.append(float(slope))
    difference = np.abs(fields[0] - fields[1]).max()
    print(f"largest difference of 8 devices to one: {difference:.1e}")
    np.testing.assert_allclose(fields[1], fields[0], atol=2e-4)
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-4)
    # Displacements beyond the halo are counted, not lost silently.
    _, lost = density(placed, 20 * scale, mesh)
    print(f"with displacements twenty times as large {int(lost)} particles leave the halos")
    column = np.log1p(fields[1][:, :, : n // 4].sum(2))
    write_png(path, (column - column.min()) / np.ptp(column))
    print(f"ok: the mass along a quarter of the third axis is in {path}")


if __name__ == "__main__":
    main()
