"""Values of a trace: the arrays behind them, and their types."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend.core import primitives


def is_tracer(x: Any) -> bool:
    """Whether ``x`` is a value of an enclosing trace."""
    return isinstance(x, jax.core.Tracer)


def primal(x: Any) -> Any:
    """The value behind a differentiated one, such as the array that ``jax.grad`` was called with."""
    while is_tracer(x) and hasattr(x, "primal"):
        x = x.primal
    return x


def abstractify(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an argument, without its sharding."""
    return shape_of(jax.typeof(x))


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """An abstract value as an argument to trace with."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def stacked(aval: Any, length: int) -> Any:
    """The abstract value of ``length`` stacked rows."""
    return jax.core.ShapedArray((length, *aval.shape), aval.dtype)


def nbytes(aval: Any) -> int:
    """Size of an array of this abstract value in bytes; zero for tokens."""
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


def memory_kind(aval: Any) -> str | None:
    """The memory that an abstract value is in; None for that of the device."""
    space = getattr(aval, "memory_space", None)
    return "pinned_host" if space is not None and space.name == "Host" else None


def typed_as(x: Any, aval: Any) -> Any:
    """Give ``x`` the weak type of an abstract value of the same dtype."""
    weak = getattr(aval, "weak_type", False)
    if not hasattr(x, "dtype") or getattr(jax.typeof(x), "weak_type", False) == weak or x.dtype != aval.dtype:
        return x
    return primitives.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)


def copy(x: Any) -> Any:
    """Copy ``x``. ``jax.grad`` removes a bare identity from the forward pass, but no copy."""
    return primitives.copy_p.bind(x)
