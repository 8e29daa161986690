"""How a process learns that another one is lost, and tells the others how it ends itself.

Liveness is that of JAX's coordination service, whose heartbeats no Python code can hold up. Each process waits, in one
call, for the end of the next one. All else are values in JAX's store. The *news* of a job are numbered, anyone may add
one, and every process reads them in the same order: the first cause of an end wins. Progress is a value of each process
that it replaces when it has made some. Where processes share a machine each one also sees how the next one there ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from multimesh.core import _compat
from multimesh.errors import LostProcessError, MultiMeshError
from multimesh.processes import post
from multimesh.processes.timeouts import Timeouts
from multimesh.processes.watching.endings import Neighbor
from multimesh.processes.watching.members import Member, name_of, neighbors
from multimesh.processes.watching.stalls import StepsOfAll

BEAT = 1.0  # seconds between two values of progress
BEATS = 800  # of these in a second that process 0 takes
TICK = 1.0  # seconds between two looks at the next process on this machine
HOLD = 0.5  # seconds in which all hear news, and those who know better may say how a process was lost
STACK = 2.0  # seconds in which a process must have told its stack
GRACE = 3.0  # seconds in which a process learns that all have heard its news
NOTICE = 10.0  # seconds after which a process says that it waits for others
DONE = b"done"

_NEWS, _AT = "multimesh/news/", "multimesh/at/"
_FAILED = (jax.errors.JaxRuntimeError, MultiMeshError)  # of a call of the store


def beat(count: int, silence: float) -> float:
    """Return the seconds between two reports of progress, of each of ``count`` processes."""
    return max(BEAT, min(count / BEATS, silence / 3))


class Watch:
    """The news and the progress of this process, and its waits for those of others: threads that may end it."""

    def __init__(self, own: Member, known: Mapping[int, Member], waits: Timeouts) -> None:
        self.at = [0, 0]  # calls of plans that have ended, and that have begun
        self.name = name_of(own)
        self.silence = waits.silence
        self.rank, self._count, self._known = own["rank"], own["count"], known
        self.tell_at_loss: Callable[[str, int], None] = lambda text, code: None
        self._beat, self._heard = beat(self._count, waits.silence), 0
        self._told, self._over, self._all_done = threading.Event(), threading.Event(), threading.Event()
        beside = neighbors([*known.values()]).get(self.rank)
        seen = set() if beside is None else {beside}
        if seen and self.rank and known[0]["machine"] == own["machine"]:
            seen.add(0)  # JAX ends those that have not said by then that process 0 is lost
        self._beside = [Neighbor(rank, known[rank]["pid"]) for rank in seen]
        self._neighbor = next((each for each in self._beside if each.rank == beside), None)
        self._putting, self._ending, self._done = threading.Lock(), threading.Lock(), False
        judges = self.rank < 2 <= self._count  # the second one judges process 0, which may hold Python's lock
        self._steps = StepsOfAll(self._count, waits.stall, time.monotonic()) if judges else None
        self._leave: Callable[[int], Any] = os._exit
        self._threads: list[threading.Thread] = []

    def start(self, leave: Callable[[int], Any]) -> None:
        """Start the threads; ``leave`` ends this process with an exit code."""
        self._leave = leave
        works = [self._hear, self._tell_progress] + [self._follow] * (self.rank + 1 < self._count)
        self._threads = [threading.Thread(target=work, name=f"multimesh{work.__name__}", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        for each in self._beside:
            threading.Thread(target=self._look_beside, args=[each], name="multimesh_look_beside", daemon=True).start()

    def fail(self, how: str, code: int, *, echo: bool = False) -> str:
        """Tell all that this process ends, with an exit code; returns the line that they print.

        It returns when the process may end. If the end of another process is the cause, it never returns; an ``echo``
        is an error that such an end may have caused, and waits for the news of it.
        """
        if echo:
            self._over.wait(self.silence + 4 * HOLD)
        text = f"{self.name} {_after(how, self.at[0])}"
        self._tell(cause={"rank": self.rank, "text": text, "code": code, "said": True})
        while not self._told.wait(GRACE) and self._over.is_set():
            pass  # another cause came first, and `_end` leaves
        self._let_others_leave()
        return text

    def finish(self) -> None:
        """Wait until all processes are done, however long that takes; for process 0: until they have left, too."""
        with self._putting:
            self._done = True
            self._put_progress(DONE)
        begun, noticed = time.monotonic(), False
        while not self._all_done.wait(0.05 if self.rank else max(0.02, self._count / 4000)):
            if not noticed and time.monotonic() - begun > NOTICE:
                noticed = True
                sys.stderr.write(f"multimesh: {self.name} is done and waits for others\n")
            if not self.rank and [*self._progress().values()].count(DONE) == self._count and self._tell(done=True):
                self._all_done.wait()
        if self.rank:
            _alive([self.rank - 1, self.rank])  # so that `_follow` of the one before comes back
        for thread in self._threads:  # one that comes back from C++ code when Python is gone would abort this process
            thread.join()
        if not self.rank and self._count > 1:
            _alive(range(self._count))  # with its service JAX in this process ends whoever is still there

    def _hear(self) -> None:
        """Read the news, one after the other."""
        while not self._over.is_set():
            try:
                news = _compat.key_value_store().blocking_key_value_get_bytes(f"{_NEWS}{self._heard}", 3_600_000)
            except MultiMeshError:  # the caller has shut JAX down
                return
            except jax.errors.JaxRuntimeError as error:
                unseen = all(each.rank for each in self._beside)  # else `_look_beside` says more, an instant later
                if "UNAVAILABLE" in str(error) and self.rank and (unseen or not self._over.wait(HOLD)):
                    self._end(self._cause(0, "is gone: it was killed, or its machine or the network is down"))
                time.sleep(0.1)
                continue
            self._heard += 1
            self._take(json.loads(news))

    def _take(self, news: Mapping[str, Any]) -> None:
        if "cause" in news:
            self._end(news["cause"])
        elif "missing" in news and self._neighbor and self._neighbor.rank == news["missing"]:
            if seconds := self._neighbor.stopped():
                cause = self._cause(news["missing"], f"has been stopped (SIGSTOP) for {seconds:.0f} s")
                self._tell(cause=cause)
                self._neighbor.kill(cause["text"])
        elif news.get("show") == self.rank:
            stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
            post.put(news["under"], "".join(stack).encode())
        elif "done" in news:
            self._over.set()
            self._all_done.set()

    def _tell(self, **news: Any) -> bool:
        """Add to the news; whether that was possible."""
        number = self._heard
        try:
            while not post.put_first(f"{_NEWS}{number}", json.dumps(news).encode()):
                number += 1
        except _FAILED:
            return False
        return True

    def _cause(self, rank: int, how: str, code: int | None = None) -> dict[str, Any]:
        steps = 0
        if rank:  # process 0 is lost with its store
            try:
                steps = int(_compat.key_value_store().key_value_try_get_bytes(f"{_AT}{rank}").split()[0])
            except (*_FAILED, ValueError, IndexError):
                steps = 0
        text = f"{name_of(self._known[rank])} {_after(how, steps)}"
        return {"rank": rank, "text": text, "code": code or LostProcessError.exit_code, "said": False}

    def _lose(self, rank: int, how: str, code: int | None = None) -> None:
        """Tell all that a process is lost. The end of process 0 is known without a word, and there is no store."""
        cause = self._cause(rank, how, code)
        if rank == 0 and self.rank:
            self._end(cause)
        self._tell(cause=cause)

    def _end(self, cause: Mapping[str, Any]) -> None:
        """End this process because of what happened to one."""
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
        own = cause["rank"] == self.rank
        if own and cause["said"]:  # the process says more itself
            self._told.set()
            return
        text = cause["text"] if own else f"{self.name} ends because {cause['text']}"
        os.write(2, f"multimesh: {text}\n".encode())
        self.tell_at_loss(text, cause["code"])
        self._let_others_leave()
        self._leave(cause["code"])

    def _let_others_leave(self) -> None:
        """At process 0, wait until others have heard the news: with its service JAX ends those that have not."""
        if not self.rank and self._count > 1:
            time.sleep(HOLD + self._count / 2000)

    def _look_beside(self, neighbor: Neighbor) -> None:
        """See how another process on this machine does, which its heartbeats do not tell."""
        while not self._over.is_set():
            if neighbor.ended(TICK):
                if not self._over.is_set():
                    self._lose(neighbor.rank, *neighbor.death())
                return
            stopped = neighbor.stopped() > self.silence / 2
            if stopped and neighbor is self._neighbor and not neighbor.rank:  # who else would say so?
                how = f"has been stopped (SIGSTOP) for {neighbor.stopped():.0f} s"
                neighbor.kill(self._cause(0, how)["text"])
                self._lose(0, how)

    def _follow(self) -> None:
        """Wait for the end of the next process, as JAX's service knows it."""
        after = self.rank + 1
        while True:
            alive = _alive([self.rank, after])
            if self._over.is_set() or (self.rank in alive and after not in alive):
                break
            time.sleep(TICK)
        if not self._over.is_set():
            self._tell(missing=after)
        if not self._over.wait(HOLD):
            how = f"has been out of reach for {self.silence:.0f} s: stopped, or its machine or network is down"
            self._lose(after, how)

    def _progress(self) -> dict[int, bytes]:
        try:
            every = _compat.key_value_store().key_value_dir_get_bytes(_AT)
        except _FAILED:
            return {}
        return {int(key.rpartition("/")[2]): value for key, value in every}

    def _put_progress(self, value: bytes) -> None:
        try:
            _compat.key_value_store().key_value_set_bytes(f"{_AT}{self.rank}", value, allow_overwrite=True)
        except _FAILED:
            return

    def _tell_progress(self) -> None:
        """Tell how far this process is, and look who holds up the others."""
        told = [0, 0]
        while not self._over.wait(self._beat):
            with self._putting:
                if told != self.at and not self._done:
                    told = [*self.at]
                    self._put_progress(f"{told[0]} {told[1]}".encode())
            if self._steps:
                self._look_for_stalls(self._steps, time.monotonic())

    def _look_for_stalls(self, steps: StepsOfAll, now: float) -> None:
        """Say which process holds up the others, with its stack; end the job if that was asked for."""
        for rank, at in self._progress().items():
            if at == DONE:
                steps.done(rank)
            else:
                steps.note(rank, [int(number) for number in at.split()], now)
        odd = steps.held_up_by(now)
        if odd is None or (odd == 0) != (self.rank == 1):
            return
        stack = self._stack(odd)
        how, ends = steps.said(odd, time.monotonic())
        os.write(2, f"multimesh: {name_of(self._known[odd])} {how}\n{stack}".encode())
        if ends:
            self._tell(cause=self._cause(odd, how) | {"text": f"{name_of(self._known[odd])} {how}"})

    def _stack(self, rank: int) -> str:
        """The Python stack of a process, as far as it gives one."""
        under = f"multimesh/stack/{rank}/{time.monotonic_ns()}"
        self._tell(show=rank, under=under)
        try:
            found = _compat.key_value_store().blocking_key_value_get_bytes(under, int(1000 * STACK))
        except _FAILED:
            return ""
        return str(found, errors="replace")


def _after(how: str, steps: int) -> str:
    """Say how a process ended, and how far it came."""
    verb, colon, why = how.partition(": ")
    return f"{verb}{f' after {steps} step' + 's' * (steps != 1) if steps else ''}{colon}{why}"


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
