"""In which dtype results are summed."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

_SMALL = 65_536  # elements: 128 KiB more for an accumulator of float32 in place of bfloat16


def accumulator(like: Any, wanted: Any) -> Any:
    """Return the dtype in which arrays with the shape and dtype of ``like`` are summed.

    ``wanted`` is a floating dtype, or None for float32 where that takes little memory. Dtypes that are no floating ones
    or have as many bits are kept.
    """
    shape, dtype = like.shape, like.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    if wanted is None:
        wanted = jnp.dtype(jnp.float32) if math.prod(shape) <= _SMALL else dtype
    return wanted if jnp.finfo(wanted).bits > jnp.finfo(dtype).bits else dtype
