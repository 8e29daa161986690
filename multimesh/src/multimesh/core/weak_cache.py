"""A cache that belongs to functions. Its entries live as long as their function."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_kept: weakref.WeakKeyDictionary[Callable[..., Any], dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def keep_with(fn: Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
    """Return the cached value for ``key`` of a function; ``make`` it the first time.

    It is cached as long as the function lives. If the function or the key is no dictionary key, it is made each time.
    The value must not refer to the function, or neither is ever freed: see `weak`.
    """
    try:
        with _lock:
            values = _kept.setdefault(fn, {})
            if key not in values:
                values[key] = make()
            return values[key]
    except TypeError:
        return make()


def weak(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``fn`` and does not keep it alive."""
    try:
        reference = weakref.ref(fn)
    except TypeError:
        return fn
    return lambda *args, **kwargs: reference()(*args, **kwargs)  # type: ignore[misc]
