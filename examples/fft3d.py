"""A 3-D Fourier transform over 4 x 2 devices: what the slides write with mpi4jax's alltoall is one call.

    python examples/fft3d.py [SIZE]               # or: mpirun -n 2 python examples/fft3d.py; srun -n 4 ...

The slides' function, for two communicators and an array that each process holds a part of:

    def fft3d(arr, comms=None):
        shape = list(arr.shape); nx = comms[0].Get_size(); ny = comms[1].Get_size()
        arr = jnp.fft.fft(arr)                                        # along z
        arr = arr.reshape(shape[:-1] + [nx, shape[-1] // nx]).transpose([2, 1, 3, 0])
        arr, token = mpi4jax.alltoall(arr, comm=comms[0])
        arr = arr.transpose([1, 2, 0, 3]).reshape(shape)              # now [y, z, x]
        ...                                                           # once more, then the third dimension

Its output is transposed, as ours with ``transposed=True``. Sizes must divide there;
here they may be any in one process.
"""

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

job = mm.distributed.initialize(alone=True)  # under srun or mpirun: one of several processes
jax.config.update("jax_num_cpu_devices", 8 // len(job.hosts))
size = int(sys.argv[1]) if len(sys.argv) > 1 else 64
mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
noise = np.random.default_rng(0).standard_normal((size, size, size), dtype=np.float32)
arr = jax.device_put(noise, NamedSharding(mesh, P("x", "y")))  # every device has all of z


@jax.jit
def fft3d(arr):
    """Forward transform; the output is transposed."""
    return mm.fft.fftn(arr, mesh=mesh, spec=P("x", "y"), transposed=True)  # [z, y, x]


@jax.jit
def ifft3d(arr):
    """The way back from the transposed layout."""
    return mm.fft.ifftn(arr, (size,) * 3, mesh=mesh, spec=P("y", "x"), transposed=True)


def largest(x, expected):
    """The largest difference in the shards of this process."""
    return max(np.abs(np.asarray(shard.data) - expected[shard.index]).max() for shard in x.addressable_shards)


spectrum = fft3d(arr)
restored = ifft3d(spectrum)
one_device = np.asarray(jnp.fft.fftn(noise)).transpose(2, 1, 0)
scale = np.abs(one_device).max()
error = largest(mm.fft.unpad(spectrum, one_device.shape), one_device) / scale
roundtrip = largest(mm.fft.unpad(restored, arr.shape), noise)
if job.rank == 0:
    print(f"{size}^3 on {mesh.devices.size} devices: {arr.sharding.spec} -> {spectrum.sharding.spec}")
    print(f"largest difference to one device {error:.1e} of the largest value; there and back {roundtrip:.1e}")
if not (error < 1e-5 and roundtrip < 1e-4):
    raise SystemExit("the transforms differ")
