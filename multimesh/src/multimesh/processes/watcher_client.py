"""The connection of a process to its watcher. With an error the process leaves at once, and so do all others.

JAX alone waits for all processes at exit: a process that fails would wait for others, which wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from multimesh.errors import LostProcessError, UsageError
from multimesh.processes import secret, watcher
from multimesh.processes.members import Member, named, unfolded
from multimesh.processes.notes import Notes
from multimesh.processes.timeouts import Timeouts
from multimesh.processes.wire import GRACE, Line, allow_files

DEAF = 5.0  # seconds in which Python code must have noticed Ctrl-C, which C++ code that waits never does
NOTICE = 10.0  # seconds after which a process says that it waits for others
_ASK = (
    signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
)  # with which the watcher asks for the Python stack
_TOOL = 4  # of `sys.monitoring`; debuggers, coverage and profilers have others


class RefusedError(UsageError):
    """The processes do not become a job. ``told``: process 0 has the same error, and says so."""

    def __init__(self, message: str, *, told: bool) -> None:
        super().__init__(message)
        self.told = told


class WatcherClient:
    """The connection to a watcher that has met all others; made by `start`."""

    def __init__(self, line: Line, steps: mmap.mmap, name: str, process: subprocess.Popen[bytes]) -> None:
        self._line, self._name, self._watcher = line, name, process
        self._steps = memoryview(steps).cast("q")
        self._pid = os.getpid()
        self.notes = Notes(line)
        self._told, self._all_done = threading.Event(), threading.Event()
        self._exit_status: Any = None
        self._print = sys.excepthook
        line.link.settimeout(None)
        sys.excepthook = self._uncaught
        sys.exit = self._sys_exit
        atexit.register(self._finish)  # runs before JAX's handler, which was registered first
        self._see_exits()
        self._see_interrupts()
        threading.Thread(target=self._listen, name="multimesh-watcher-client", daemon=True).start()

    def begin_step(self) -> None:
        """Count a call of a plan that begins."""
        self._steps[1] = self._steps[0] + 1

    def count_step(self) -> None:
        """Count a call of a plan that has ended. Messages say how far a process came."""
        self._steps[0] += 1
        self._steps[1] = self._steps[0]

    def _leave(self, text: str, code: int) -> None:
        """Tell the watcher why this process fails.

        It returns when this process may end. If the cause is the end of another process, it never returns.
        """
        self._line.send(failed=text[:1000], code=code)
        self._told.wait(watcher.HOLD + GRACE)

    def _listen(self) -> None:
        while (messages := self._line.receive()) is not None:
            self.notes.add(messages)
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
        with contextlib.suppress(ValueError):  # where this is not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would end this hook, and not the process
        code = 130 if kind is KeyboardInterrupt else getattr(error, "exit_code", 1)
        self._leave(": ".join([kind.__name__, *_reason(error)]), code)
        self._print(kind, error, traceback)
        _exit(code)

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

    def _see_interrupts(self) -> None:
        """Let Ctrl-C end this process also while C++ code waits for others: there Python's own handler never runs."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        noticed = threading.Event()

        def interrupted(number: int, frame: FrameType | None) -> None:
            noticed.set()
            signal.default_int_handler(number, frame)

        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            signal.signal(signal.SIGINT, interrupted)
        except ValueError:  # this thread is not the main one
            return

        def wait() -> None:
            while numbers := os.read(reader, 64):
                ours = signal.getsignal(signal.SIGINT) is interrupted  # not a handler that the script has set since
                if signal.SIGINT in numbers and ours and not noticed.wait(DEAF):
                    os.write(2, f"multimesh: {self._name} was interrupted in code that does not notice it\n".encode())
                    self._leave("KeyboardInterrupt", 130)
                    _exit(130)
                noticed.clear()

        threading.Thread(target=wait, name="multimesh-interrupts", daemon=True).start()

    def _finish(self) -> None:
        """Wait until all processes are done, however long that takes. JAX's own barrier at exit then need not wait."""
        if os.getpid() != self._pid:
            return
        if self._exit_status:  # neither None nor 0
            code = self._exit_status & 255 if isinstance(self._exit_status, int) else 1
            self._leave(f"SystemExit: {self._exit_status}", code)
            _exit(code)
        self._line.send(done=True)
        if not self._all_done.wait(NOTICE):
            sys.stderr.write(f"multimesh: {self._name} is done and waits for others\n")
            self._all_done.wait()
        self._watcher.wait()


def start(own: Member, address: str, bind: str, timeouts: Timeouts) -> tuple[WatcherClient, list[str]]:
    """Start a watcher, let it meet the others at ``address``, and return its client and the hosts of all processes.

    Raises
    ------
    UsageError
        If the processes cannot be one job, or do not find each other; if the job's secret is none.
    """
    word = secret.found()
    if own["rank"] == 0:
        allow_files(own["count"])  # also JAX's coordinator has a connection to every process
    ours, theirs = socket.socketpair()
    stack = tempfile.TemporaryFile("ab")  # noqa: SIM115 - open as long as this process
    with tempfile.TemporaryFile() as file, theirs:
        file.truncate(16)
        steps = mmap.mmap(file.fileno(), 16)
        who = f"process {own['rank']} of {own['count']}"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, str(theirs.fileno()), address, who],  # the rest is for ps
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a reader of this process's output need not wait for the watcher
            pass_fds=(theirs.fileno(), file.fileno(), stack.fileno()),
            start_new_session=True,
        )
        line = Line(ours)
        line.send(
            own=own,
            address=address,
            bind=bind,
            secret=word,
            timeout=timeouts.start,
            silence=timeouts.silence,
            stop=timeouts.stop,
            stall=timeouts.stall,
            steps=file.fileno(),
            stack=stack.fileno(),
            ask=_ASK,
            lost=LostProcessError.exit_code,
        )
    faulthandler.register(_ASK, file=stack, all_threads=False)  # works also where code in C++ holds Python's lock
    try:
        answer = _answer(line)
    except BaseException:
        ours.close()
        process.wait()
        raise
    if "hosts" not in answer:
        process.wait()
        raise RefusedError(
            answer.get("refused", f"the watcher of {named(own)} ended while it started"),
            told=answer.get("told", False),
        )
    if not (word or own["rank"] or own["count"] == 1):
        print(
            f"multimesh: warning: this job has no secret: whoever reaches {address} can join, stop or mislead it; give "
            f"all processes the same {secret.VARIABLE} (openssl rand -hex 32 makes one)",
            file=sys.stderr,
            flush=True,
        )
    return WatcherClient(line, steps, named(own), process), unfolded(answer["hosts"])


def _answer(line: Line) -> Mapping[str, Any]:
    line.link.settimeout(None)
    while (messages := line.receive()) is not None:
        if messages:
            answer, *line.kept = messages
            return answer
    return {}


def _reason(error: BaseException) -> list[str]:
    """The first line of an error; of one with the traceback of a callback its last line, which has the cause."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    of_callback = any("Traceback (most recent call last)" in line for line in lines)
    return [lines[-1].strip() if of_callback else lines[0]] if lines else []


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
