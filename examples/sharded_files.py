"""A sharded array to a Zarr file and back: every process writes and reads the parts of its own devices, nothing else.

    python examples/sharded_files.py [SIZE] [FILE]      # or: mpirun -n 2 python ...; srun -n 4 python ...

Chunks of the file are shards of the array that is written, so no two processes write to one chunk. It is read with
another sharding: a shard is cut from several chunks. FILE must be in a folder that all processes see. HDF5 is read by
the same `jax.make_array_from_callback`, with a dataset of h5py in place of the store.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with 8 accelerators, delete this line and `jax_num_cpu_devices` below
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores

import jax
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

job = mm.distributed.initialize(alone=True)  # under srun or mpirun: one of several processes
jax.config.update("jax_num_cpu_devices", 8 // len(job.hosts))
size = int(sys.argv[1]) if len(sys.argv) > 1 else 64
path = Path(sys.argv[2] if len(sys.argv) > 2 else f"{tempfile.gettempdir()}/field-{size}.zarr").absolute()
mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def write(x):
    """Write the first copy of each shard that this process has."""
    chunks = {"name": "regular", "configuration": {"chunk_shape": x.sharding.shard_shape(x.shape)}}
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/", "metadata": {"chunk_grid": chunks}}
    if job.rank == 0:  # one process makes the file, in place of an older one
        ts.open(spec, dtype=x.dtype, shape=x.shape, create=True, delete_existing=True).result()
    multihost_utils.sync_global_devices("made")
    store = ts.open(spec, open=True).result()
    writes = [store[s.index].write(np.asarray(s.data)) for s in x.addressable_shards if s.replica_id == 0]
    for future in writes:
        future.result()
    multihost_utils.sync_global_devices("written")


def load(sharding):
    """Read the shards of this process."""
    store = ts.open({"driver": "zarr3", "kvstore": f"file://{path}/"}, open=True).result()
    return jax.make_array_from_callback(store.shape, sharding, lambda index: store[index].read().result())


noise = np.random.default_rng(0).standard_normal((size, size, size), dtype=np.float32)
field = jax.device_put(noise, NamedSharding(mesh, P("x", "y")))
write(field)
copy = load(NamedSharding(mesh, P(None, ("y", "x"))))
equal = all((np.asarray(shard.data) == noise[shard.index]).all() for shard in copy.addressable_shards)
if not equal:
    raise SystemExit(f"process {job.rank}: what was read differs from what was written")
spectrum = mm.fft.fftn(load(field.sharding))  # straight from the file into a transform
if job.rank == 0:
    mean = float(np.asarray(spectrum.addressable_shards[0].data)[0, 0, 0].real) / size**3
    print(f"ok: {size}^3 in {path.name} as {field.sharding.spec}, read as {copy.sharding.spec}; its mean is {mean:.6f}")
