"""``gather``: copy small arrays from any devices to every process."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

from multimesh.errors import UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import bounds

SMALL = 64 * 2**20
"""The most bytes that `gather` copies."""

_gathers = itertools.count(1)


def gather(tree: Any, timeout: float | None = None) -> Any:
    """Copy a small tree to every process. All processes call it, in the same order.

    Parameters
    ----------
    tree
        A pytree. Committed arrays may lie on any devices, also without a shard in this process. All other leaves, such
        as NumPy arrays and numbers, must be the same in all processes.
    timeout
        Seconds to wait for the other processes; by default the ``compile_timeout`` of `initialize`.

    Returns
    -------
    The tree with NumPy arrays in the place of arrays; keys of ``jax.random.key`` stay keys.

    Raises
    ------
    UsageError
        If the arrays have more than 64 MiB together.
    LostProcessError
        If another process has not called it in time.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = {i: x for i, x in enumerate(leaves) if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)}
    plain = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
    arrays = _gather(plain, timeout)
    for i, x in keys.items():
        arrays[i] = jax.random.wrap_key_data(arrays[i], impl=jax.random.key_impl(x))
    return jax.tree.unflatten(structure, arrays)


def _gather(leaves: list[Any], timeout: float | None) -> list[Any]:
    far = {i: x for i, x in enumerate(leaves) if agree.several() and isinstance(x, jax.Array) and x.committed}
    size = sum(x.nbytes for x in far.values())
    if size > SMALL:
        largest = max(far.values(), key=lambda x: x.nbytes)
        raise UsageError(
            f"mm.distributed.gather is for small trees: {size:,} bytes in all, of which {largest.nbytes:,} in a "
            f"{largest.dtype} array of shape {largest.shape}; reduce arrays on their devices first, or save them"
        )
    me = jax.process_index()
    arrays = [np.asarray(x) if isinstance(x, jax.Array) and i not in far else x for i, x in enumerate(leaves)]
    places: list[tuple[int, int, Any]] = []  # of every part, in an order that all know: its owner, its array, where
    parts: list[bytes] = []
    for i, x in far.items():
        owners: dict[Any, int] = {}
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            corner = bounds(index, x.shape)
            owners[corner] = min(owners.get(corner, device.process_index), device.process_index)
        shards = {bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        arrays[i] = np.empty(x.shape, x.dtype)
        for corner, owner in sorted(owners.items()):
            places.append((owner, i, tuple(slice(*ends) for ends in corner)))
            if owner == me:  # an error of its computation, or Ctrl-C, is raised as it is
                parts.append(np.asarray(shards[corner]).tobytes())
    if not far:
        return arrays
    every = agree.decide_together(f"mm.distributed.gather {next(_gathers)}", b"".join(parts), b"".join, timeout)
    start = 0
    for _, i, index in sorted(places, key=lambda place: place[0]):  # stable: as each owner gave them
        part = arrays[i][index]
        arrays[i][index] = np.frombuffer(every[start : start + part.nbytes], part.dtype).reshape(part.shape)
        start += part.nbytes
    return arrays
