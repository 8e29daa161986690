"""``gather``: copy small arrays from any devices to every process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from multimesh.errors import UsageError
from multimesh.processes.agree import forget, get, put, several

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
    whole = _gathered(plain, timeout)
    for i, x in keys.items():
        whole[i] = jax.random.wrap_key_data(whole[i], impl=jax.random.key_impl(x))
    return jax.tree.unflatten(structure, whole)


def _gathered(leaves: list[Any], timeout: float | None) -> list[Any]:
    far = {i: x for i, x in enumerate(leaves) if several() and isinstance(x, jax.Array) and x.committed}
    size = sum(x.nbytes for x in far.values())
    if size > SMALL:
        largest = max(far.values(), key=lambda x: x.nbytes)
        raise UsageError(
            f"mm.distributed.gather is for small trees: {size:,} bytes in all, of which {largest.nbytes:,} in a "
            f"{largest.dtype} array of shape {largest.shape}; reduce arrays on their devices first, or save them"
        )
    me, number = jax.process_index(), next(_gathers) if far else 0
    whole = [np.asarray(x) if isinstance(x, jax.Array) and i not in far else x for i, x in enumerate(leaves)]
    wanted: list[tuple[int, Any, str, int]] = []
    for i, x in far.items():
        bounds = functools.partial(_bounds, shape=x.shape)
        owners: dict[Any, int] = {}
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            owners[bounds(index)] = min(owners.get(bounds(index), device.process_index), device.process_index)
        held = {bounds(shard.index): shard.data for shard in x.addressable_shards}
        whole[i] = np.empty(x.shape, x.dtype)
        for n, (corner, owner) in enumerate(sorted(owners.items())):
            index, key = tuple(slice(*ends) for ends in corner), f"multimesh/gather/{number}/{i}/{n}"
            if corner in held:
                whole[i][index] = np.asarray(held[corner])  # an error of its computation, or Ctrl-C, is raised as it is
                if owner == me:
                    put(key, whole[i][index].tobytes())
            else:
                wanted.append((i, index, key, owner))
    for i, index, key, owner in wanted:
        part, found = whole[i][index], get(key, "mm.distributed.gather", owner, timeout)
        whole[i][index] = np.frombuffer(found, part.dtype).reshape(part.shape)
    if far:
        forget(f"gather/{number}", timeout)
    return whole


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where a shard starts and ends along each axis."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
