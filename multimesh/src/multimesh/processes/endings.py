"""How a process leaves: with an error at once, and so do all others.

JAX alone waits for all processes at exit: a process that fails would wait for others, which wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import jax

from multimesh.errors import MultiMeshError
from multimesh.processes.liveness import Watch

_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|INTERNAL|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
"""How an error of a computation begins; JAX raises some as ValueError."""

_OWN_FAULTS = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "Traceback (most recent call last)")
"""In an error of JAX: it is this process's own, and not the echo of another one's end."""

_Handler = ctypes.CFUNCTYPE(None)
_handler: Any = None  # this process refers to it for all its life
_LEAVING = 60.0  # seconds in which another thread, which knew of the loss first, ends this process


def see_end(watch: Watch) -> None:
    """Let `Watch` tell the others how this process ends: by an error that nobody catches, or at its end."""
    pid, usual = os.getpid(), sys.excepthook

    def fail(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """End this process for an error that nobody catches, without JAX's barrier at exit."""
        if os.getpid() != pid:  # forked from it
            usual(kind, error, traceback)
            return
        with contextlib.suppress(ValueError):  # where this is not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would end this hook, and not the process
        code = 130 if kind is KeyboardInterrupt else getattr(error, "exit_code", 1)
        remedy = _remedy(error)
        for line in remedy:
            error.add_note(f"multimesh: {line}")
        text = ": ".join(["failed", kind.__name__, *_reason(error), *remedy])
        watch.fail(text[:1000], code, echo=_may_echo(error))
        usual(kind, error, traceback)
        leave(code)

    def finish() -> None:
        """Wait until all processes are done, however long that takes. JAX's own end then need not wait."""
        if os.getpid() == pid:
            watch.finish()

    sys.excepthook = fail
    atexit.register(finish)  # runs before JAX's handler, which was registered first


def _may_echo(error: BaseException | None) -> bool:
    """Whether the end of another process may have caused this error of a computation or a connection."""
    while isinstance(error, Exception) and not isinstance(error, MultiMeshError):
        text = str(error)
        broken = isinstance(error, (jax.errors.JaxRuntimeError, ConnectionError)) or _STATUS.match(text)
        if broken and not any(fault in text for fault in _OWN_FAULTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> list[str]:
    """The first line of an error; of one with the traceback of a callback its last line, which has the cause."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    of_callback = any("Traceback (most recent call last)" in line for line in lines)
    return [lines[-1].strip() if of_callback else lines[0]] if lines else []


def _remedy(error: BaseException) -> list[str]:
    """Return the remedy for an error of JAX that does not know of submeshes, or nothing."""
    if "Fetching value for `jax.Array` that spans non-addressable" not in str(error):
        return []
    return ["multimesh.distributed.gather(x), called in every process, brings the value of an array elsewhere"]


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
