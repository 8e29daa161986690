"""What functions leave for later calls, kept as long as the functions live, without keeping them alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_kept: weakref.WeakKeyDictionary[Callable[..., Any], dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def kept(fn: Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
    """What was made for ``key`` of a function, as long as that lives; made anew where either can't be a key.

    What is made must not refer to the function, or neither is ever freed: see `weak`.
    """
    try:
        with _lock:
            mine = _kept.setdefault(fn, {})
            if key not in mine:
                mine[key] = make()
            found: T = mine[key]
            return found
    except TypeError:
        return make()


def weak(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` for as long as somebody else refers to it."""
    try:
        reference = weakref.ref(fn)
    except TypeError:
        return fn
    return lambda *args, **kwargs: reference()(*args, **kwargs)  # type: ignore[misc]
