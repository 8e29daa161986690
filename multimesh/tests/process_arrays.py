"""Arrays and meshes of several processes, for `process_cases`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

RTOL = 1e-5
REPLICATED = P()


def assert_shards(actual: Any, expected: Any, rtol: float = RTOL) -> int:
    """Every shard that this process has is that part of ``expected``; returns their number."""
    count = 0
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), w in zip(jax.tree.flatten_with_path(actual)[0], jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        if x.addressable_shards and isinstance(x.sharding, NamedSharding):
            assert jax.typeof(x).sharding.mesh == x.sharding.mesh.abstract_mesh, name
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            if not x.sharding.addressable_devices:
                continue
            x, w = jax.random.key_data(x), jax.random.key_data(w)
        w = np.asarray(w)
        assert (x.shape, x.dtype) == (w.shape, w.dtype), name
        scale = np.abs(w.astype(np.float64)).max(initial=0.0) if w.dtype.kind not in "bc" else np.abs(w).max(initial=0)
        for shard in x.addressable_shards:
            part, have = w[shard.index], np.asarray(shard.data)
            if w.dtype.kind in "biu":
                np.testing.assert_array_equal(have, part, err_msg=name)
            else:
                kind = np.complex128 if w.dtype.kind == "c" else np.float64
                error = np.abs(have.astype(kind) - part.astype(kind)).max(initial=0.0)
                assert error <= rtol * scale, f"{name}: {error:.3e} > {rtol:g} x {scale:.3e}"
            count += 1
    return count


def on(mesh: Mesh, x: Any, spec: P = REPLICATED) -> Any:
    """A value on a mesh that may be another process's."""
    layout = NamedSharding(mesh, spec)
    x = np.asarray(x)
    parts = [x[index] for d, index in layout.devices_indices_map(x.shape).items() if d in layout.addressable_devices]
    devices = [d for d in layout.devices_indices_map(x.shape) if d in layout.addressable_devices]
    arrays = [jax.device_put(part, d) for part, d in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, layout, arrays, dtype=x.dtype)


def meshes(count: int = 2, axes: tuple[str, ...] = ("data",)) -> list[Mesh]:
    """All devices in order, cut into so many."""
    return [Mesh(d, axes) for d in np.array(jax.devices()).reshape(count, -1)]


def crossed() -> list[Mesh]:
    """Two submeshes, each with devices of every process."""
    grid = np.array(jax.devices()).reshape(jax.process_count(), -1)
    half = grid.shape[1] // 2
    return [Mesh(d.reshape(-1), ("data",)) for d in (grid[:, :half], grid[:, half:])]


SPLITS: dict[str, Any] = {
    "halves": meshes,
    "quarters": lambda: meshes(4),
    "crossed": crossed,
    "one in all": lambda: [Mesh(np.array(jax.devices()), ("data",)), Mesh(np.array(jax.devices()[:1]), ("data",))],
    "two to one": lambda: [Mesh(np.array(jax.devices()[:2]), ("data",)), Mesh(np.array(jax.devices()[-1:]), ("data",))],
    "one to two": lambda: [Mesh(np.array(jax.devices()[:1]), ("data",)), Mesh(np.array(jax.devices()[-2:]), ("data",))],
    "other axes": lambda: [
        Mesh(np.array(jax.devices()[: jax.device_count() // 2]), ("data",)),
        Mesh(np.array(jax.devices()[jax.device_count() // 2 :]), ("model",)),
    ],
    "backwards": lambda: meshes()[::-1],
}
