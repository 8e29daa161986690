"""Arrays of which this process holds some shards, all, or none; `gather` copies small ones to every process."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from multimesh.errors import UsageError
from multimesh.processes import agree


def bounds(index: Iterable[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the start and the end of the part ``index`` of an array of this shape, along each axis."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def is_here(devices: Iterable[jax.Device]) -> bool:
    """Return whether one of these devices belongs to this process."""
    return any(device.process_index == jax.process_index() for device in devices)


def is_key(x: Any) -> bool:
    """Return whether this is an array of ``jax.random.key``."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def absent(aval: Any, layout: Any) -> Any:
    """Return an array of which this process holds no shard."""
    return jax.make_array_from_single_device_arrays(tuple(aval.shape), layout, [], dtype=aval.dtype)


def place(x: Any, layout: NamedSharding) -> Any:
    """Place a value that every process has in a layout. The processes do not communicate."""
    if not is_here(layout.device_set):
        return absent(jax.typeof(x), layout)
    if layout.is_fully_addressable:
        return jax.device_put(x, layout)
    if jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.extended):
        data = place(jax.random.key_data(x), NamedSharding(layout.mesh, layout.spec))
        wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
        return jax.jit(wrap, out_shardings=layout)(data)
    host = np.asarray(x, dtype=jax.typeof(x).dtype)
    return jax.make_array_from_callback(host.shape, layout, lambda index: host[index], dtype=host.dtype)


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
    arrays = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
    far = {i: x for i, x in enumerate(arrays) if agree.several() and isinstance(x, jax.Array) and x.committed}
    if (size := sum(x.nbytes for x in far.values())) > SMALL:
        largest = max(far.values(), key=lambda x: x.nbytes)
        raise UsageError(
            f"mm.distributed.gather is for small trees: {size:,} bytes in all, of which {largest.nbytes:,} in a "
            f"{largest.dtype} array of shape {largest.shape}; reduce arrays on their devices first, or save them"
        )
    arrays = [np.empty(x.shape, x.dtype) if i in far else x for i, x in enumerate(arrays)]
    shares: list[list[Any]] = [[] for _ in range(jax.process_count())]  # of each process: the parts that it sends
    parts: list[bytes] = []
    for i, x in far.items():
        owners: dict[Any, int] = {}
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            corner = bounds(index, x.shape)
            owners[corner] = min(owners.get(corner, device.process_index), device.process_index)
        shards = {bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        for corner, owner in sorted(owners.items()):
            shares[owner].append(arrays[i][(*(slice(*ends) for ends in corner), ...)])
            if owner == jax.process_index():  # an error of its computation, or Ctrl-C, is raised as it is
                parts.append(np.asarray(shards[corner]).tobytes())
    if far:
        every = agree.decide_together(f"mm.distributed.gather {next(_gathers)}", b"".join(parts), b"".join, timeout)
        data = io.BytesIO(every)
        for part in itertools.chain(*shares):
            part[...] = np.frombuffer(data.read(part.nbytes), part.dtype).reshape(part.shape)
    for i, x in enumerate(leaves):
        if is_key(x):
            arrays[i] = jax.random.wrap_key_data(np.asarray(arrays[i]), impl=jax.random.key_impl(x))
        elif isinstance(x, jax.Array):
            arrays[i] = np.asarray(arrays[i])
    return jax.tree.unflatten(structure, arrays)
