"""The end of a process whose client of JAX loses its service, which is in process 0."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from typing import Any

_Handler = ctypes.CFUNCTYPE(None)
_handler: Any = None  # this process refers to it for all its life
_LEAVING = 60.0  # seconds in which another thread, which knew of the loss first, ends this process


def call_at_loss(end: Callable[[], None]) -> None:
    """Call ``end``, which ends this process, when JAX's client loses its service. Call it once.

    The client then calls the callback of `limit_start` in a thread of C++. No Python function can take its argument, an
    ``absl::Status``: the call throws ``std::bad_cast``, which nobody catches, and C++ calls its handler of such errors.
    """
    global _handler
    with contextlib.suppress(OSError, AttributeError):  # of another library of C++: then JAX ends this process
        library = ctypes.CDLL("libstdc++.so.6")
        type_of_exception, set_handler = library.__cxa_current_exception_type, library._ZSt13set_terminatePFvvE
        type_of_exception.restype = ctypes.POINTER(ctypes.c_char_p)
        set_handler.restype, set_handler.argtypes = _Handler, (_Handler,)

        def terminate() -> None:
            exception = type_of_exception()  # a `std::type_info`: the table of its methods, and its name
            if exception and exception[1] == b"St8bad_cast":
                end()
                time.sleep(_LEAVING)
            usual()

        _handler = _Handler(terminate)
        usual = set_handler(_handler)
