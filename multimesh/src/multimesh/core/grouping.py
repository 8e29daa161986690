"""Grouping of values by a key."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def group(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in order; no values for any other key."""
    groups: dict[K, list[V]] = collections.defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups
