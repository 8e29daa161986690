"""The leaves of a tree that is saved: their names, and types in words that are alike in all processes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from multimesh.errors import UsageError


def name_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by their names, such as ``params/0/w``."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "tree"
        if name in (".", ".."):
            raise UsageError(f"the tree has a leaf that is called {name!r}: rename a key")
        if name in leaves:
            raise UsageError(f"the tree has two leaves that are called {name!r}: rename a key")
        leaves[name] = leaf
    folders = {name.replace("/", "."): name for name in leaves}  # in which Orbax writes them
    for name in leaves:
        above = itertools.accumulate(name.split("/"), "{}/{}".format)
        other = next((parent for parent in above if parent in leaves and parent != name), None)
        other = other or folders[name.replace("/", ".")]
        if other != name:
            raise UsageError(f"the tree has leaves that are called {name!r} and {other!r}: rename a key")
    return leaves


def kind_of(x: Any) -> str:
    """Return the type of a leaf in words, such as ``float32[8,4]``."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__


def has_sharding(x: Any) -> bool:
    """Return whether a leaf has a sharding. Otherwise every process has it."""
    if isinstance(x, jax.Array):
        return bool(x.committed)
    return getattr(x, "sharding", None) is not None


def compare(path: Path, targets: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    """Refuse a tree that is not like the saved one."""
    for name in [*targets, *kinds]:
        stored, wanted = kinds.get(name), targets.get(name)
        if stored == wanted:
            continue
        if stored is None:
            difference = f"no {name} ({wanted}), which `like` has"
        elif wanted is None:
            difference = f"{name} ({stored}), which `like` lacks"
        else:
            difference = f"{name} as {stored}, `like` as {wanted}"
        raise UsageError(f"{path} has {difference}; give a tree like the one saved")
