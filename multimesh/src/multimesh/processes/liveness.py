"""How a process learns that another one is lost, and tells the others how it ends itself.

JAX's coordination service says who lives, by heartbeats that no Python code can hold up. Each process waits, in one
call, for the end of the next one. All else are values in JAX's store: the end of the job, whose first cause wins, and
the progress of each process, which it replaces.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import jax

from multimesh.core import _compat
from multimesh.errors import LostProcessError, MultiMeshError, UsageError
from multimesh.processes.agree import DONE, PROGRESS, look, put, seconds_of
from multimesh.processes.step_counts import StepsOfAll, text_of

BEAT = 1.0  # seconds between two values of progress
BEATS = 800  # of these in a second that process 0 takes
TICK = 1.0  # seconds between two questions for the next process
HOLD = 0.5  # seconds in which all hear of the end, and those who know better may say how a process was lost
GRACE = 3.0  # seconds in which a process ends for a cause that came before its own
NOTICE = 10.0  # seconds after which a process says that it waits for others

_END = "multimesh/end"  # the key of the cause for which the job ends
_FAILED = (jax.errors.JaxRuntimeError, MultiMeshError)  # of a call of the store
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|INTERNAL|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
"""How an error of a computation begins; JAX raises some as ValueError."""

_OWN_FAULTS = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "Traceback (most recent call last)")
"""In an error of JAX: it is this process's own, and not the echo of another one's end."""

_ELSEWHERE = "Fetching value for `jax.Array` that spans non-addressable"
_Handler = ctypes.CFUNCTYPE(None)
_handler: Any = None  # this process refers to it for all its life
_LEAVING = 60.0  # seconds in which another thread, which knew of the loss first, ends this process


class Watch:
    """The end and the progress of this process, and its waits for those of others: threads that may end it."""

    def __init__(self) -> None:
        self.starting, self.rank, self.name, self.pid = False, 0, "", 0
        self.names: Sequence[str] = ()  # of all processes; empty until they have met
        self.tell_at_loss: Callable[[str, int], None] = lambda text, code: None
        self._at, self._partners = [0, 0], frozenset[int]()  # calls of plans that have ended, and begun; by whom
        self._asked, self._done = 0.0, False
        self._steps: StepsOfAll | None = None
        self._over, self._all_done = threading.Event(), threading.Event()
        self._putting, self._ending = threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, names: Sequence[str]) -> None:
        """Start the threads, and see how this process ends."""
        self.names, self._count, self.pid = names, len(names), os.getpid()
        self._silence = seconds_of("silence")
        self._beat = max(BEAT, min(self._count / BEATS, self._silence / 3))
        if self.rank < 2 <= self._count:  # the second one judges process 0, which may hold Python's lock
            self._steps = StepsOfAll(self._count, seconds_of("stall"), time.monotonic())
        works = [self._hear, self._tell_progress] + [self._follow] * (self.rank + 1 < self._count)
        self._threads = [threading.Thread(target=work, name=f"multimesh{work.__name__}", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        atexit.register(self.finish)  # runs before JAX's handler, which was registered first, and need not wait then

    def begin_step(self, partners: Collection[int] = ()) -> None:
        """Note that a call of a plan begins, of some processes or of all."""
        self._partners = frozenset(partners) if len(partners) < len(self.names) else frozenset()
        self._at[1] = self._at[0] + 1

    def count_step(self) -> None:
        """Count a call of a plan. Messages about this process say how many it made."""
        self._at[:] = [self._at[0] + 1] * 2

    def fail(self, how: str, code: int, *, echo: bool = False) -> None:
        """Tell all that this process ends, with an exit code. It returns when the process may end.

        If another cause came first it does not return. An ``echo`` is an error that the end of another process may have
        caused, and waits for the news of it.
        """
        if echo:
            self._over.wait(self._silence + 4 * HOLD)
        text = f"{self.name} {_after(f'failed: {how}', self._at[0])}"
        if not self._tell({"rank": self.rank, "text": text, "code": code, "said": True}):
            time.sleep(GRACE)  # `_hear` ends this process, unless the cause is its own or the store is gone
        self._let_others_leave()

    def end_without_first(self) -> None:
        """End this process because process 0 is gone, and JAX's service with it."""
        self._end(self._lose(0, "is gone: it was killed, or its machine or the network is down"))

    def finish(self) -> None:
        """Wait until all processes are done, however long that takes; for process 0: until they have left, too.

        If others need this process for a call, they end, and this one keeps its exit code.
        """
        if os.getpid() != self.pid:
            return
        with self._putting:
            self._done = True
            self._put_progress()
        start, noticed = time.monotonic(), False
        while not self._all_done.wait(0.05 if self.rank else max(0.02, self._count / 4000)):
            if not noticed and time.monotonic() - start > NOTICE:
                noticed = True
                sys.stderr.write(f"multimesh: {self.name} is done and waits for others\n")
            if not self.rank and sum(text.endswith(DONE) for text in self._progress().values()) == self._count:
                self._tell({})
                self._all_done.wait(GRACE)
        if self._over.is_set() and self.rank:
            _alive([self.rank - 1, self.rank])  # so that `_follow` of the one before comes back
        for thread in self._threads:  # one that comes back from C++ code when Python is gone would abort this process
            thread.join(self._silence)
        if not self.rank and self._count > 1:
            _alive(range(self._count))  # with its service JAX in this process ends whoever is still there

    def _hear(self) -> None:
        """Wait for the end of the job, and see whether process 0 answers."""
        while not self._over.is_set():
            try:
                cause = _compat.key_value_store().blocking_key_value_get_bytes(_END, int(250 * self._beat))
            except MultiMeshError:  # the caller has shut JAX down
                return
            except jax.errors.JaxRuntimeError as error:
                silent = time.monotonic() - since if (since := self._asked) and self.rank else 0.0
                if silent > self._silence / 2 - self._beat:  # later JAX would end this process without a word
                    self._end(self._lose(0, _out_of_reach(silent)))
                elif "UNAVAILABLE" in str(error) and self.rank:
                    self.end_without_first()
                elif "DEADLINE_EXCEEDED" not in str(error):
                    time.sleep(0.1)
                continue
            self._end(json.loads(cause))

    def _tell(self, cause: Mapping[str, Any]) -> bool:
        """Tell for which cause the job ends, or that all are done; whether that is the first."""
        with contextlib.suppress(*_FAILED):
            put(_END, json.dumps(cause).encode())
            return True
        return False

    def _lose(self, rank: int, how: str) -> dict[str, Any]:
        """Return the loss of a process as a cause."""
        steps = int((look(f"{PROGRESS}{rank}") or b"0").split()[0]) if rank else 0  # process 0 is lost with its store
        name = self.names[rank] if self.names else "process 0"
        return {"rank": rank, "text": f"{name} {_after(how, steps)}", "code": LostProcessError.exit_code, "said": False}

    def _end(self, cause: Mapping[str, Any]) -> None:
        """End this process because of what happened to one, or let it end because all are done."""
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
        if not cause:
            self._all_done.set()
            return
        is_self = cause["rank"] == self.rank
        if is_self and cause["said"]:  # the process says more itself
            return
        text = cause["text"] if is_self else f"{self.name} ends because {cause['text']}"
        os.write(2, f"multimesh: {text}\n".encode())
        if self._done and cause["code"] == LostProcessError.exit_code:  # that of its own end stands
            self._all_done.set()
            return
        if is_self:  # where it hangs
            faulthandler.dump_traceback(2)
        self.tell_at_loss(text, cause["code"])
        self._let_others_leave()
        leave(cause["code"])

    def _let_others_leave(self) -> None:
        """At process 0, wait until others have heard of the end: with its service JAX ends those that have not."""
        if not self.rank and len(self.names) > 1:
            time.sleep(HOLD + len(self.names) / 2000)

    def _follow(self) -> None:
        """Wait for the end of the next process, as JAX's service knows it."""
        after = self.rank + 1
        while True:
            alive = _alive([self.rank, after])
            if self._over.is_set() or (self.rank in alive and after not in alive):
                break
            time.sleep(TICK)
        if not self._over.wait(HOLD):
            self._tell(self._lose(after, _out_of_reach(self._silence)))

    def _progress(self) -> dict[int, bytes]:
        with contextlib.suppress(*_FAILED):
            every = _compat.key_value_store().key_value_dir_get_bytes(PROGRESS)
            return {int(key.rpartition("/")[2]): value for key, value in every}
        return {}

    def _put_progress(self) -> None:
        text = text_of(self._at, self._partners, self._done)
        with contextlib.suppress(*_FAILED):
            _compat.key_value_store().key_value_set_bytes(f"{PROGRESS}{self.rank}", text, allow_overwrite=True)

    def _tell_progress(self) -> None:
        """Tell how far this process is, and who holds up others, which may end the job."""
        while not self._over.wait(self._beat):
            self._asked = time.monotonic()
            with self._putting:
                self._put_progress()
            stall = self._steps.find(self._progress(), time.monotonic()) if self._steps else None
            if stall and (stall[0] == 0) == (self.rank == 1):
                rank, how, ends = stall
                if ends:
                    self._tell(self._lose(rank, how))
                else:
                    os.write(2, f"multimesh: {self.names[rank]} {how}\n".encode())
            self._asked = 0.0


watch = Watch()
"""That of this process."""


def see_uncaught_errors() -> None:
    """Let an error that nobody catches end a process of a job at once, and one of its start with one line."""
    default_hook = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        code = 130 if kind is KeyboardInterrupt else getattr(error, "exit_code", 1)
        if watch.starting and not watch.names and isinstance(error, UsageError):
            if not getattr(error, "told", False):  # by process 0
                sys.stderr.write(f"multimesh: {error}\n")
                time.sleep(HOLD)  # with its service process 0 would end who has not heard yet
            leave(code)
        of_job = os.getpid() == watch.pid  # else it has not started, or this process was forked from it
        if of_job:
            with contextlib.suppress(ValueError):  # where this is not the main thread
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would end this hook, and not the process
            watch.fail(explain(error), code, echo=may_echo(error))
        default_hook(kind, error, traceback)
        if of_job:
            leave(code)

    sys.excepthook = end


def name_process(rank: int) -> str:
    """Name a process, as `initialize` has found it."""
    return watch.names[rank] if watch.names else f"process {rank} of {jax.process_count()}"


def _after(how: str, steps: int) -> str:
    """Say how a process ended, and how far it came."""
    verb, colon, why = how.partition(": ")
    return f"{verb}{f' after {steps} step' + 's' * (steps != 1) if steps and ' step' not in verb else ''}{colon}{why}"


def _out_of_reach(seconds: float) -> str:
    return f"has been out of reach for {seconds:.0f} s: it was killed or stopped, or its machine or network is down"


def _alive(ranks: Sequence[int]) -> set[int]:
    """Wait until each of these processes waits here too, has ended or has left; return those that wait.

    No process asks what another one does, so this is a wait for the end of all others.
    """
    while True:
        try:
            return set(_compat.key_value_store().get_live_nodes([*ranks]))
        except MultiMeshError:
            return set()
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                return set()


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
            default()

        _handler = _Handler(terminate)
        default = set_handler(_handler)
