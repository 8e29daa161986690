"""Text of values that is the same in every process.

It has no addresses and no order of a set, and numbers values in the order in which they appear.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

LOCAL: Mapping[str, bool] = {"local": True}
"""Metadata of a field that may differ between processes, such as a path: no part of the text."""

_PLAIN: frozenset[Any] = frozenset((int, bool, float, type(None)))  # most values by far; `repr` is all that they need
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


def atoms(values: Iterable[Any], numbers: dict[Any, int]) -> str:
    """Number values, and print literals. ``numbers`` has the numbers so far, and receives the new ones."""
    return " ".join(_atom(a, numbers) for a in values)


def _atom(atom: Any, numbers: dict[Any, int]) -> str:
    """Return the number of a value or of a variable of a jaxpr. Where it first appears, it has its type."""
    if hasattr(atom, "val"):
        return f"{text(atom.val)}:{_type(atom.aval)}"
    name = f"%{numbers[atom]}" if atom in numbers else ""
    return name or f"%{numbers.setdefault(atom, len(numbers))}:{_type(atom.aval)}"


def _type(aval: Any) -> str:
    return f"{aval}{'*' if getattr(aval, 'weak_type', False) else ''}"


def _jaxpr(jaxpr: Any) -> str:
    numbers: dict[Any, int] = {}
    heads = f"{atoms(jaxpr.constvars, numbers)}; {atoms(jaxpr.invars, numbers)}"
    steps = [
        f"{atoms(eqn.outvars, numbers)} = {eqn.primitive.name} {atoms(eqn.invars, numbers)} {text(eqn.params)}"
        for eqn in jaxpr.eqns
    ]
    return f"{{{heads} | {' | '.join([*steps, atoms(jaxpr.outvars, numbers)])}}}"


@functools.singledispatch
def text(value: Any) -> str:
    """Return a value as text that is the same in every process: a function as its name, an array as a digest."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f.name for f in dataclasses.fields(value) if not f.metadata.get("local"))
        return f"{type(value).__name__}{text([getattr(value, name) for name in fields])}"
    if hasattr(value, "jaxpr"):
        return f"{_jaxpr(value.jaxpr)} with {text(list(value.consts))}"
    if hasattr(value, "eqns"):
        return _jaxpr(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))


@text.register(np.ndarray)
@text.register(np.generic)
@text.register(jax.Array)
def _(value: Any) -> str:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"array {value.dtype}{list(value.shape)} {text(value.sharding)}"
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return f"{value.dtype} {text(jax.random.key_data(value))}"
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array.dtype} {array.item()!r}"
    return f"array {array.dtype}{list(array.shape)} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


@text.register
@functools.lru_cache(maxsize=256)
def _(value: Mesh) -> str:
    devices = [] if value.empty else [(d.platform, d.id) for d in value.devices.flat]
    return f"{text(value.abstract_mesh)} {devices}"


@text.register(tuple)
@text.register(list)
def _(value: Sequence[Any]) -> str:
    named = type(value).__name__ if hasattr(value, "_fields") else ""
    return f"{named}({', '.join([repr(item) if type(item) in _PLAIN else text(item) for item in value])})"


text.register(functools.partial, lambda value: f"partial{text((value.func, value.args, value.keywords))}")
text.register(AbstractMesh, lambda value: f"mesh {text(tuple(value.shape.items()))} {text(value.axis_types)}")
text.register(NamedSharding, lambda value: f"{text(value.mesh)} {value.spec} {value.memory_kind}")
text.register(enum.Enum, lambda value: f"{type(value).__name__}.{value.name}")
for _plain in {str} | _PLAIN:
    text.register(_plain, repr)
text.register(Mapping, lambda value: f"{{{', '.join(sorted(f'{text(k)}: {text(v)}' for k, v in value.items()))}}}")
text.register(Set, lambda value: f"{{{', '.join(sorted(map(text, value)))}}}")
