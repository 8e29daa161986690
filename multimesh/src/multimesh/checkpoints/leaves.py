"""The leaves of a tree that is saved: their names, types and places in words that are alike in all processes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from multimesh.core import _compat
from multimesh.errors import UsageError

NUMBERS = (bool, int, float, complex)


def name_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by their names, such as ``params/0/w``."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "tree"
        if name in leaves:
            raise UsageError(f"the tree has two leaves that are called {name!r}: rename a key")
        leaves[name] = leaf
    return leaves


def kind_of(name: str, x: Any) -> str:
    """Return the type of a leaf in words, such as ``float32[8,4]``."""
    if isinstance(x, NUMBERS) and not isinstance(x, np.generic):
        if isinstance(x, int) and not -(2**63) <= x < 2**63:
            raise UsageError(f"{name} is an int of more than 64 bits, which can't be saved")
        return type(x).__name__
    if _compat.is_tracer(x):
        raise UsageError(f"{name} has no value yet: call this outside of jax.jit and other transformations")
    foreign = isinstance(x, np.ndarray) and (x.dtype.kind in "OSUMm" or issubclass(x.dtype.type, np.void))
    if not hasattr(x, "dtype") or not hasattr(x, "shape") or foreign:
        kind = f"{type(x).__name__} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
        raise UsageError(f"{name} is a {kind}; arrays, numbers and None can be saved")
    if isinstance(x, jax.Array) and x.is_deleted():
        raise UsageError(f"{name} was donated or deleted; use what the call it was given to returned")
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def has_sharding(x: Any) -> bool:
    """Return whether a leaf has a sharding. Otherwise every process has it."""
    if isinstance(x, jax.Array):
        return bool(x.committed)
    return getattr(x, "sharding", None) is not None


def describe(x: Any) -> str:
    """Return the devices of a leaf as text, alike in all processes."""
    return _parts(x.sharding, x.shape) if has_sharding(x) else ""


@functools.lru_cache(maxsize=4096)
def _parts(layout: Sharding, shape: tuple[int, ...]) -> str:
    parts = layout.devices_indices_map(shape).items()
    return f" on {', '.join(f'{device.id}: {index}' for device, index in parts)}"


def compare(path: Path, wanted: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    """Refuse a tree that is not like the saved one."""
    for name, kind in wanted.items():
        if name not in kinds:
            raise UsageError(f"{path} has no {name} ({kind}), which `like` has; give a tree like the one saved")
        if kinds[name] != kind:
            raise UsageError(f"{path} has {name} as {kinds[name]}, `like` as {kind}; give a tree like the one saved")
    for name, kind in kinds.items():
        if name not in wanted:
            raise UsageError(f"{path} has {name} ({kind}), which `like` lacks; give a tree like the one saved")
