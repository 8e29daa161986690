"""The connection of a process to its watcher. With an error the process leaves at once, and so do all others.

JAX alone waits for all processes at exit: a process that fails would wait for others, which wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

from multimesh.errors import LostProcessError, UsageError
from multimesh.processes import watcher

NOTICE = 10.0  # seconds after which a process says that it waits for others


class WatcherClient:
    """The connection to a watcher that has met all others; made by `start`."""

    def __init__(self, line: watcher.Line, steps: mmap.mmap, name: str, process: subprocess.Popen[bytes]) -> None:
        self._line, self._name, self._watcher = line, name, process
        self._steps = memoryview(steps).cast("q")
        self._pid = os.getpid()
        self._told, self._all_done = threading.Event(), threading.Event()
        self._exit_status: Any = None
        self._print = sys.excepthook
        line.link.settimeout(None)
        sys.excepthook = self._uncaught
        sys.exit = self._sys_exit
        atexit.register(self._finish)  # runs before JAX's handler, which was registered first
        threading.Thread(target=self._listen, name="multimesh-watcher-client", daemon=True).start()

    def count_step(self) -> None:
        """Count a call of a plan. Messages say how far a process came."""
        self._steps[0] += 1

    def _leave(self, text: str, code: int) -> None:
        """Tell the watcher why this process fails.

        It returns when this process may end. If the cause is the end of another process, it never returns.
        """
        self._line.send(failed=text[:1000], code=code)
        self._told.wait(watcher.HOLD + watcher.GRACE)

    def _listen(self) -> None:
        while (messages := self._line.receive()) is not None:
            for message in messages:
                if message.get("own"):
                    self._told.set()
                elif "end" in message:
                    _exit(message["end"])
                elif "all_done" in message:
                    self._all_done.set()
        if not self._all_done.is_set():
            with contextlib.suppress(OSError):
                os.write(2, f"multimesh: {self._name} ends because its watcher was killed\n".encode())
            _exit(LostProcessError.exit_code)

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """End this process for an error that nobody catches, without JAX's barrier at exit."""
        if os.getpid() != self._pid:  # forked from it
            self._print(kind, error, traceback)
            return
        code = 130 if kind is KeyboardInterrupt else getattr(error, "exit_code", 1)
        self._leave(": ".join([kind.__name__, *str(error).strip().splitlines()[:1]]), code)
        self._print(kind, error, traceback)
        _exit(code)

    def _sys_exit(self, status: Any = None) -> NoReturn:
        """``sys.exit``, which also keeps its status for `_finish`."""
        self._exit_status = status
        raise SystemExit(status)

    def _finish(self) -> None:
        """Wait until all processes are done, however long that takes. JAX's own barrier at exit then need not wait."""
        if os.getpid() != self._pid:
            return
        if self._exit_status:  # neither None nor 0
            code = self._exit_status & 255 if isinstance(self._exit_status, int) else 1
            self._leave(f"sys.exit({self._exit_status!r})", code)
            _exit(code)
        self._line.send(done=True)
        if not self._all_done.wait(NOTICE):
            sys.stderr.write(f"multimesh: {self._name} is done and waits for others\n")
            self._all_done.wait()
        self._watcher.wait()


def start(
    own: watcher.Member, address: str, bind: str, timeout: float, heartbeat: float
) -> tuple[WatcherClient, list[Any]]:
    """Start a watcher, let it meet the others at ``address``, and return its client and the members of the job.

    Raises
    ------
    UsageError
        If the processes cannot be one job, or do not find each other.
    """
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as file, theirs:
        file.truncate(8)
        steps = mmap.mmap(file.fileno(), 8)
        given = {"own": own, "address": address, "bind": bind, "timeout": timeout, "silence": heartbeat / 2}
        given |= {"socket": theirs.fileno(), "steps": file.fileno(), "lost": LostProcessError.exit_code}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, json.dumps(given)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a reader of this process's output need not wait for the watcher
            pass_fds=(theirs.fileno(), file.fileno()),
            start_new_session=True,
        )
    line = watcher.Line(ours)
    try:
        answer = _answer(line)
    except BaseException:
        ours.close()
        process.wait()
        raise
    if "members" not in answer:
        process.wait()
        raise UsageError(answer.get("refused", f"the watcher of {watcher.named(own)} ended while it started"))
    return WatcherClient(line, steps, watcher.named(own), process), answer["members"]


def _answer(line: watcher.Line) -> Mapping[str, Any]:
    line.link.settimeout(None)
    while (messages := line.receive()) is not None:
        for message in messages:
            return message
    return {}


def _exit(code: int) -> NoReturn:
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
