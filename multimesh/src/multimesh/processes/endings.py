"""How a process leaves, without JAX's wait for all processes at exit: one that fails would wait for others."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from multimesh.errors import MultiMeshError

_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|INTERNAL|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
"""How an error of a computation begins; JAX raises some as ValueError."""

_OWN_FAULTS = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "Traceback (most recent call last)")
"""In an error of JAX: it is this process's own, and not the echo of another one's end."""

_ELSEWHERE = "Fetching value for `jax.Array` that spans non-addressable"
_Handler = ctypes.CFUNCTYPE(None)
_handler: Any = None  # this process refers to it for all its life
_LEAVING = 60.0  # seconds in which another thread, which knew of the loss first, ends this process


def may_echo(error: BaseException | None) -> bool:
    """Return whether the end of another process may have caused this error of a computation or a connection."""
    while isinstance(error, Exception) and not isinstance(error, MultiMeshError):
        text = str(error)
        broken = isinstance(error, (jax.errors.JaxRuntimeError, ConnectionError)) or _STATUS.match(text)
        if broken and not any(fault in text for fault in _OWN_FAULTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def explain(error: BaseException) -> str:
    """Return an error in one line. JAX does not know of submeshes: to some errors the remedy is added, as a note too.

    Of one with the traceback of a callback the last line has the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_callback = any("Traceback (most recent call last)" in line for line in lines)
    texts = [type(error).__name__, *(lines[-1:] if of_callback else lines[:1])]
    if _ELSEWHERE in str(error):
        texts += ["multimesh.distributed.gather(x), called in every process, brings the value of an array elsewhere"]
        error.add_note(f"multimesh: {texts[-1]}")
    return ": ".join(texts)[:1000]


def leave(code: int) -> NoReturn:
    """Leave without the handlers at exit. Output is written and children of this process are ended first."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if "multiprocessing" in sys.modules:
        with contextlib.suppress(Exception):
            for child in sys.modules["multiprocessing"].active_children():
                child.terminate()
    os._exit(code)


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
