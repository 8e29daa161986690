"""Reductions of blocks over devices, in `jax.shard_map`: devices combine in groups, and groups in groups.

Every device ends with the same result and has computed it itself, so nothing is sent back. The groups are the prime
factors of the number of devices: 8 devices combine pairs three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from multimesh.core.specs import Axes, permute


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1


def reduce(x: Any, combine: Callable[[Any, Array], Any], axes: Axes) -> Any:
    """Combine the blocks ``x``, a tree of arrays, of all devices.

    ``combine`` gets the blocks of one group, stacked in the order of devices, and my place among them.
    """
    p, me = lax.axis_size(axes), lax.axis_index(axes)
    stride = 1
    for group in _prime_factors(p):
        place = me // stride % group
        received = []
        for shift in range(group):  # from the device that is `shift` places behind, in a ring of the group
            to = [(d, d - d // stride % group * stride + (d // stride + shift) % group * stride) for d in range(p)]
            received.append(jax.tree.map(lambda x, to=to: permute(x, axes, to), x))
        order = (place - jnp.arange(group)) % group
        stacked = jax.tree.map(lambda *parts, order=order: jnp.stack(parts)[order], *received)
        x = combine(stacked, place)
        stride *= group
    return x
