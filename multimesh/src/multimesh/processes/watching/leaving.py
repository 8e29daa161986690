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
import threading
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

import jax

from multimesh.errors import LostProcessError, MultiMeshError
from multimesh.processes.watching.watch import Watch

DEAF = 5.0  # seconds in which Python code must have noticed Ctrl-C, which C++ code that waits never does
_TOOL = 4  # of `sys.monitoring`; debuggers, coverage and profilers have others
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|INTERNAL|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
"""How an error of a computation begins; JAX raises some as ValueError."""

_OWN_FAULTS = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "Traceback (most recent call last)")
"""In an error of JAX: it is this process's own, and not the echo of another one's end."""


class Leaving:
    """Sees every way in which this process may end, and lets its `Watch` tell the others."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pid = os.getpid()
        self._exit_status: Any = None
        self._print = sys.excepthook
        sys.excepthook = self._uncaught
        sys.exit = self._sys_exit
        atexit.register(self._finish)  # runs before JAX's handler, which was registered first
        self._see_exits()
        self._see_signals()

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """End this process for an error that nobody catches, without JAX's barrier at exit."""
        if os.getpid() != self._pid:  # forked from it
            self._print(kind, error, traceback)
            return
        with contextlib.suppress(ValueError):  # where this is not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would end this hook, and not the process
        code = 130 if kind is KeyboardInterrupt else getattr(error, "exit_code", 1)
        remedy = _remedy(error)
        for line in remedy:
            error.add_note(f"multimesh: {line}")
        text = ": ".join(["failed", kind.__name__, *_reason(error), *remedy])
        self._watch.fail(text[:1000], code, echo=_may_echo(error))
        self._print(kind, error, traceback)
        leave(code)

    def _sys_exit(self, status: Any = None) -> NoReturn:
        """``sys.exit``, which also keeps its status for `_finish`."""
        self._exit_status = status
        raise SystemExit(status)

    def _see_exits(self) -> None:
        """Let a ``raise SystemExit(3)`` that leaves the script be seen as ``sys.exit(3)`` is; from Python 3.12."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        outermost, monitoring = frame.f_code, getattr(sys, "monitoring", None)
        if monitoring is None or monitoring.get_tool(_TOOL) is not None:
            return

        def unwound(code: CodeType, _: int, error: BaseException) -> None:
            if code is outermost and isinstance(error, SystemExit):
                self._exit_status = error.code

        monitoring.use_tool_id(_TOOL, "multimesh")
        monitoring.register_callback(_TOOL, monitoring.events.PY_UNWIND, unwound)
        monitoring.set_events(_TOOL, monitoring.events.PY_UNWIND)

    def _see_signals(self) -> None:
        """Let Ctrl-C and SIGTERM end this process also while C++ code waits for others: Python's handlers never run.

        Handlers of the script are left alone, those that it sets later too, and so is JAX's preemption service, which
        takes SIGTERM.
        """
        noticed = threading.Event()

        def interrupted(number: int, frame: FrameType | None) -> None:
            noticed.set()
            signal.default_int_handler(number, frame)

        def terminated(number: int, frame: FrameType | None) -> None:
            """Let `wait` do it: this one runs late, or never."""

        usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        ours: dict[int, Any] = {signal.SIGINT: interrupted, signal.SIGTERM: terminated}
        if jax.config.values.get("jax_enable_preemption_service"):
            del ours[signal.SIGTERM]
        seen = [number for number in ours if signal.getsignal(number) is usual[number]]
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            for number in seen:
                signal.signal(number, ours[number])
        except ValueError:  # this thread is not the main one
            return

        def forget() -> None:
            """In a forked process: its signals are not ours."""
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
                for number in seen:
                    if signal.getsignal(number) is ours[number]:
                        signal.signal(number, usual[number])

        def wait() -> None:
            while numbers := os.read(reader, 64):
                caught = [number for number in seen if number in numbers and signal.getsignal(number) is ours[number]]
                if signal.SIGTERM in caught:
                    self._terminate()
                if signal.SIGINT in caught and not noticed.wait(DEAF):
                    said = f"multimesh: {self._watch.name} was interrupted in code that does not notice it\n"
                    os.write(2, said.encode())
                    self._watch.fail("failed: KeyboardInterrupt", 130)
                    leave(130)
                noticed.clear()

        os.register_at_fork(after_in_child=forget)
        threading.Thread(target=wait, name="multimesh-signals", daemon=True).start()

    def _terminate(self) -> None:
        """Die by SIGTERM, as without us, and tell the others before."""
        text = self._watch.fail("was killed by SIGTERM", LostProcessError.exit_code)
        os.write(2, f"multimesh: {text}\n".encode())
        flush()
        ctypes.CDLL(None).signal(signal.SIGTERM, 0)  # SIG_DFL; Python sets handlers in the main thread only
        os.kill(os.getpid(), signal.SIGTERM)

    def _finish(self) -> None:
        """Wait until all processes are done, however long that takes. JAX's own end then need not wait."""
        if os.getpid() != self._pid:
            return
        if self._exit_status:  # neither None nor 0
            code = self._exit_status & 255 if isinstance(self._exit_status, int) else 1
            self._watch.fail(f"failed: SystemExit: {self._exit_status}"[:1000], code)
            leave(code)
        self._watch.finish()


def _may_echo(error: BaseException | None) -> bool:
    """Whether the end of another process may have caused this error of a computation or a connection."""
    while isinstance(error, Exception) and not isinstance(error, MultiMeshError):
        text = str(error)
        broken = isinstance(error, (jax.errors.JaxRuntimeError, ConnectionError)) or _STATUS.match(text)
        if broken and not any(own in text for own in _OWN_FAULTS):
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


def flush() -> None:
    """Write what is still to be written."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def leave(code: int) -> NoReturn:
    """Leave without the handlers at exit. Output is written and children of this process are ended first."""
    flush()
    if "multiprocessing" in sys.modules:
        with contextlib.suppress(Exception):
            for child in sys.modules["multiprocessing"].active_children():
                child.terminate()
    os._exit(code)
