"""How a process learns that another one is lost, and tells the others how it ends itself.

JAX's coordination service says who lives, by heartbeats that no Python code can hold up. Each process waits, in one
call, for the end of the next one. All else are values in JAX's store: the end of the job, whose first cause wins, and
the progress of each process, which it replaces.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from multimesh.core import _compat
from multimesh.errors import LostProcessError, MultiMeshError
from multimesh.processes import post
from multimesh.processes.rendezvous import Member, name_of
from multimesh.processes.step_counts import StepsOfAll, text_of
from multimesh.processes.timeouts import Timeouts

BEAT = 1.0  # seconds between two values of progress
BEATS = 800  # of these in a second that process 0 takes
TICK = 1.0  # seconds between two questions for the next process
HOLD = 0.5  # seconds in which all hear of the end, and those who know better may say how a process was lost
GRACE = 3.0  # seconds in which a process ends for a cause that came before its own
NOTICE = 10.0  # seconds after which a process says that it waits for others

GONE = "is gone: it was killed, or its machine or the network is down"
_END = "multimesh/end"  # the key of the cause for which the job ends
_FAILED = (jax.errors.JaxRuntimeError, MultiMeshError)  # of a call of the store


def beat(count: int, silence: float) -> float:
    """Return the seconds between two reports of progress, of each of ``count`` processes."""
    return max(BEAT, min(count / BEATS, silence / 3))


class Watch:
    """The end and the progress of this process, and its waits for those of others: threads that may end it."""

    def __init__(self, rank: int, members: Sequence[Member], waits: Timeouts) -> None:
        self.at = [0, 0]  # calls of plans that have ended, and that have begun
        self.partners = frozenset[int]()  # of the call; empty: all processes
        self.rank, self._members, self._count = rank, members, len(members)
        self.name, self.silence = name_of(members[rank]), waits.silence
        self.tell_at_loss: Callable[[str, int], None] = lambda text, code: None
        self._beat, self._asked = beat(self._count, waits.silence), 0.0
        self._over, self._all_done = threading.Event(), threading.Event()
        self._putting, self._ending, self._done = threading.Lock(), threading.Lock(), False
        judges = rank < 2 <= self._count  # the second one judges process 0, which may hold Python's lock
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

    def fail(self, how: str, code: int, *, echo: bool = False) -> None:
        """Tell all that this process ends, with an exit code. It returns when the process may end.

        If another cause came first it does not return. An ``echo`` is an error that the end of another process may have
        caused, and waits for the news of it.
        """
        if echo:
            self._over.wait(self.silence + 4 * HOLD)
        text = f"{self.name} {_after(how, self.at[0])}"
        if not self._tell({"rank": self.rank, "text": text, "code": code, "said": True}):
            time.sleep(GRACE)  # `_hear` ends this process, unless the cause is its own or the store is gone
        self._let_others_leave()

    def end_without_first(self) -> None:
        """End this process because process 0 is gone, and JAX's service with it."""
        self._end(self._cause(0, GONE))

    def finish(self) -> None:
        """Wait until all processes are done, however long that takes; for process 0: until they have left, too.

        If others need this process for a call, they end, and this one keeps its exit code.
        """
        with self._putting:
            self._done = True
            self._put_progress()
        begun, noticed = time.monotonic(), False
        while not self._all_done.wait(0.05 if self.rank else max(0.02, self._count / 4000)):
            if not noticed and time.monotonic() - begun > NOTICE:
                noticed = True
                sys.stderr.write(f"multimesh: {self.name} is done and waits for others\n")
            if not self.rank and sum(map(post.is_done, self._progress().values())) == self._count:
                self._tell({})
                self._all_done.wait(GRACE)
        if self._over.is_set() and self.rank:
            _alive([self.rank - 1, self.rank])  # so that `_follow` of the one before comes back
        for thread in self._threads:  # one that comes back from C++ code when Python is gone would abort this process
            thread.join(self.silence)
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
                if silent > self.silence / 2 - self._beat:  # later JAX would end this process without a word
                    self._end(self._cause(0, _out_of_reach(silent)))
                elif "UNAVAILABLE" in str(error) and self.rank:
                    self.end_without_first()
                elif "DEADLINE_EXCEEDED" not in str(error):
                    time.sleep(0.1)
                continue
            self._end(json.loads(cause))

    def _tell(self, cause: Mapping[str, Any]) -> bool:
        """Tell for which cause the job ends, or that all are done; whether that is the first."""
        try:
            post.put(_END, json.dumps(cause).encode())
        except _FAILED:
            return False
        return True

    def _cause(self, rank: int, how: str) -> dict[str, Any]:
        # process 0 is lost with its store
        steps = int((post.look(f"{post.AT}{rank}") or b"0").split()[0]) if rank else 0
        text = f"{name_of(self._members[rank])} {_after(how, steps)}"
        return {"rank": rank, "text": text, "code": LostProcessError.exit_code, "said": False}

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
        self._leave(cause["code"])

    def _let_others_leave(self) -> None:
        """At process 0, wait until others have heard of the end: with its service JAX ends those that have not."""
        if not self.rank and self._count > 1:
            time.sleep(HOLD + self._count / 2000)

    def _follow(self) -> None:
        """Wait for the end of the next process, as JAX's service knows it."""
        after = self.rank + 1
        while True:
            alive = _alive([self.rank, after])
            if self._over.is_set() or (self.rank in alive and after not in alive):
                break
            time.sleep(TICK)
        if not self._over.wait(HOLD):
            self._tell(self._cause(after, _out_of_reach(self.silence)))

    def _progress(self) -> dict[int, bytes]:
        try:
            every = _compat.key_value_store().key_value_dir_get_bytes(post.AT)
        except _FAILED:
            return {}
        return {int(key.rpartition("/")[2]): value for key, value in every}

    def _put_progress(self) -> None:
        text = text_of(self.at, self.partners, self._done)
        try:
            _compat.key_value_store().key_value_set_bytes(f"{post.AT}{self.rank}", text, allow_overwrite=True)
        except _FAILED:
            return

    def _tell_progress(self) -> None:
        """Tell how far this process is, and look who holds up the others."""
        while not self._over.wait(self._beat):
            self._asked = time.monotonic()
            with self._putting:
                self._put_progress()
            if self._steps:
                self._look_for_stalls(self._steps, time.monotonic())
            self._asked = 0.0

    def _look_for_stalls(self, steps: StepsOfAll, now: float) -> None:
        """Say which process holds up the others; end the job if that was asked for, or if it has ended."""
        for rank, progress in self._progress().items():
            steps.note(rank, progress, now)
        stall = steps.find(now)
        if not stall or (stall.rank == 0) != (self.rank == 1):
            return
        text = f"{name_of(self._members[stall.rank])} {stall.how}"
        if stall.ends:
            self._tell(self._cause(stall.rank, "") | {"text": text})
        else:
            os.write(2, f"multimesh: {text}\n".encode())


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
