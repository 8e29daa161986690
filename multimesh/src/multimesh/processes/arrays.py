"""Arrays of which this process holds some shards, all, or none."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Bounds = tuple[tuple[int, int], ...]


def bounds(index: Iterable[slice], shape: Sequence[int]) -> Bounds:
    """Return the start and the end of the part ``index`` of an array of this shape, along each axis."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def here(devices: Iterable[jax.Device]) -> bool:
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
    if not here(layout.device_set):
        return absent(jax.typeof(x), layout)
    if layout.is_fully_addressable:
        return jax.device_put(x, layout)
    if jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.extended):
        data = place(jax.random.key_data(x), NamedSharding(layout.mesh, layout.spec))
        wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
        return jax.jit(wrap, out_shardings=layout)(data)
    host = np.asarray(x, dtype=jax.typeof(x).dtype)
    return jax.make_array_from_callback(host.shape, layout, lambda index: host[index], dtype=host.dtype)
