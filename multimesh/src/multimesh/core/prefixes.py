"""Pytree prefixes: one entry for a whole part of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def spread(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the entry of a prefix for each leaf of a tree, without building any container of the user.

    Raises ``ValueError`` if the prefix does not fit the tree.
    """
    entries, above = jax.tree.flatten(prefix, is_leaf=is_leaf)
    parts = above.flatten_up_to(tree)
    return [entry for entry, part in zip(entries, parts, strict=True) for _ in jax.tree.leaves(part)]
