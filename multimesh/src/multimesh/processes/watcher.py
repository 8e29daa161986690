"""The watcher: a small process beside each process of a job. It tells all of them when one fails, dies or stops.

It is a process of its own because a thread cannot do this: a thread dies with its process, stops with it, and waits
while C++ code holds Python's lock. It needs the standard library and five modules beside it only, so it starts in some
50 ms: `watcher_client` runs this file by its path. A watcher talks to its process over a socket pair, and to the
watcher of process 0, the hub, over TCP.

First all watchers meet at the coordinator's port, before JAX listens there. These connections stay open, and the hub
takes no other. Each end says every second that it is there; among thousands less often, so that the hub needs little of
a core. The hub decides what happened first and tells all. Each watcher prints that line and ends its process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by its path, isolated from the environment: it finds the modules beside it
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from multimesh.processes.endings import death, handle_of, state
from multimesh.processes.meeting import TICK, Meeting, TurnedAwayError
from multimesh.processes.members import Member, named
from multimesh.processes.stalls import StepsOfAll
from multimesh.processes.wire import GRACE, Line, Message, drain, encoded

BEAT = 1.0  # seconds between two signs of life
BEATS = 800  # signs of life in a second that the hub takes
HOLD = 1.0  # seconds in which the death of another process may turn out to be the cause of an error
STACK = 1.0  # seconds in which a process must have written its stack


def beat(count: int, silence: float) -> float:
    """Seconds between two signs of life, of each of ``count`` processes."""
    return max(BEAT, min(count / BEATS, silence / 3))


class Watch:
    """The work of a watcher after the meeting."""

    def __init__(
        self,
        own: Member,
        process: Line,
        links: Mapping[int, Line],  # to other watchers, by the number of their process
        members: Mapping[int, Member],  # those that it speaks of; the hub: all
        *,
        steps: mmap.mmap,  # sixteen bytes in which the process counts its calls: those that ended, those that began
        stack: int,  # file into which the process writes its stack when it gets the signal `ask`
        ask: int,
        silence: float,  # seconds after which a silent watcher is out of reach
        stop: float,  # seconds that a process may be stopped
        stall: float,  # seconds without progress after which the job ends; 0: never
        lost: int,  # exit code of the others, if a process is lost without one
    ) -> None:
        self._own, self._members, self._process, self._links = own, members, process, dict(links)
        self._parent, self._steps, self._silence, self._lost = own["pid"], steps, silence, lost
        self._stack, self._ask, self._stop = stack, ask, stop
        self._progress = StepsOfAll([*members.values()], stall, time.monotonic()) if not own["rank"] else None
        self._beat = beat(own["count"], silence)
        self._parent_handle = handle_of(own["pid"])
        self._heard = dict.fromkeys(links, time.monotonic())
        self._ready = selectors.DefaultSelector()
        self._ready.register(process, selectors.EVENT_READ)
        for rank, line in links.items():
            self._ready.register(line, selectors.EVENT_READ, rank)
        self._full = set(self._links.values())  # lines that may have more to send than the system takes
        self._done: set[int] = set()
        self._notes: list[list[Any]] = []  # for the own process, each with the number of the process that left it
        self._alive, self._over = True, False
        self._failed: list[tuple[float, Message]] = []  # at the hub: errors, and when to decide by them

    def run(self) -> None:
        """Watch until all processes are done or one is lost."""
        now = beaten = looked = stopped = time.monotonic()
        for rank in [rank for rank, line in self._links.items() if line.kept]:
            self._read(rank)
        while not self._over:
            for key, _ in self._ready.select(TICK):
                if not self._over:
                    self._read(key.data)
            self._hand_over()
            self._full = {line for line in self._full if not line.flush()}
            before, now = now, time.monotonic()
            if self._failed and now > self._failed[0][0]:
                self._decide(self._failed[0][1])
            if now - before > BEAT + TICK:  # this watcher was stopped too: the whole job was suspended
                self._heard, stopped = dict.fromkeys(self._links, now), now
            if now - looked < BEAT or self._over:
                continue
            looked, at = now, self._steps_now()
            if now - beaten >= self._beat:
                beaten = now
                self._tell(**({"at": at} if self._own["rank"] else {}))
                self._look_for_stalls(at, now)
            if self._alive and os.getppid() != self._parent:  # a process that it forked holds its socket open
                self._dead()
            if self._alive and state(self._parent) != "T":
                stopped = now
            elif self._alive and now - stopped > self._stop:
                self._report(self._own["rank"], f"has been stopped (SIGSTOP) for {now - stopped:.0f} s")
            for rank, heard in self._heard.items():
                if now - heard > self._silence and not self._over:
                    self._report(rank, f"has been out of reach for {now - heard:.0f} s", near=False)

    def _tell(self, **message: Any) -> None:
        """Tell the hub; the hub tells all others."""
        said = encoded(**message)  # once, not for each of thousands
        for line in self._links.values():
            if not line.send_encoded(said):
                self._full.add(line)

    def _read(self, rank: int | None) -> None:
        """Read from another watcher (``rank``), or from the own process (None)."""
        line = self._process if rank is None else self._links[rank]
        messages = line.receive()
        if messages is None:
            self._full.discard(line)
            self._ready.unregister(line)
            if rank is None:
                self._dead()
            else:
                del self._links[rank], self._heard[rank]
                how = "is gone with its watcher: all its processes were killed, or its machine ended them"
                if line.reset:
                    how = "is gone with the connection to its watcher: that was killed, or the network cut it"
                self._report(rank, how, near=False)
            return
        if rank is not None:
            self._heard[rank] = time.monotonic()
        for message in messages:
            if "failed" in message:
                self._report(self._own["rank"], "failed", why=message["failed"], code=message.get("code", 1), said=True)
            elif "cause" in message:
                self._hear(message["cause"])
            elif "note" in message:
                self._pass_on(rank, message["note"])
            elif "at" in message and self._progress and rank is not None:
                self._progress.note(rank, message["at"], time.monotonic())
            elif "stack" in message:
                self._tell_stall(self._own["rank"] if rank is None else rank, message["stack"])
            elif "show" in message and self._own["rank"]:
                self._tell(stack=self._own_stack())
            elif "done" in message:
                self._finished(self._own["rank"] if rank is None else rank)
            elif "all_done" in message:
                self._all_done()

    def _pass_on(self, rank: int | None, note: list[str]) -> None:
        """A note of the own process goes to process 0, and one of process 0 to all; others are for the own process."""
        if rank is None:
            self._tell(note=note)
        else:
            self._notes.append([rank, *note])

    def _hand_over(self) -> None:
        """Give the own process the notes for it, those of thousands in few messages."""
        if self._notes and not self._process.send(notes=self._notes):
            self._full.add(self._process)
        self._notes = []

    def _steps_now(self) -> list[int]:
        """Calls of plans that the process has ended and begun."""
        return list(struct.unpack("<qq", self._steps[:16]))

    def _look_for_stalls(self, at: list[int], now: float) -> None:
        """At the hub: if a process holds up the others for long, ask it for its stack; `_tell_stall` then tells it."""
        if self._progress is None or self._over or not self._alive:
            return
        self._progress.note(0, at, now)
        odd = self._progress.held_up_by(now)
        if odd == 0:
            self._tell_stall(0, self._own_stack())
        elif odd in self._links:
            self._links[odd].send(show=True)

    def _tell_stall(self, rank: int, stack: str) -> None:
        """Say which process holds up the others; end the job if that was asked for."""
        if self._progress is None or self._over:
            return
        how, ends = self._progress.said(rank, time.monotonic())
        with contextlib.suppress(OSError):
            os.write(2, f"multimesh: {named(self._members[rank])} {how}\n{stack}".encode())
        if ends:
            self._report(rank, how, near=False)

    def _own_stack(self) -> str:
        """The Python stack of this watcher's process, as far as it gives one."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._stack, 0)
            os.kill(self._parent, self._ask)
            until, size, before = time.monotonic() + STACK, 0, -1
            while time.monotonic() < until and (size == 0 or size != before):
                time.sleep(0.05)
                before, size = size, os.fstat(self._stack).st_size
            return os.pread(self._stack, 1 << 14, 0).decode(errors="replace")
        return ""

    def _dead(self) -> None:
        self._alive = False
        how, code = death(self._parent, self._parent_handle)
        self._report(self._own["rank"], how, code=code)

    def _report(
        self, rank: int, how: str, *, why: str = "", code: int | None = None, said: bool = False, near: bool = True
    ) -> None:
        """Tell the hub what happened to a process (``said``: by itself). Unless ``near``, decide without the hub."""
        steps = self._steps_now()[0] if rank == self._own["rank"] else 0
        count = f" after {steps} step{'s' * (steps != 1)}" if steps else ""
        text = f"{named(self._members[rank])} {how}{count}{f': {why}' if why else ''}"
        cause = {"rank": rank, "text": text, "code": code or self._lost, "said": said}
        if near and self._own["rank"]:
            self._tell(cause=cause)
        else:
            self._hear(cause)

    def _hear(self, cause: Message) -> None:
        """Take the hub's decision. The hub holds an error for a while: another process's death may be its cause."""
        if self._own["rank"] or not cause["said"]:
            self._decide(cause)
        else:
            self._failed.append((time.monotonic() + HOLD, cause))

    def _decide(self, cause: Message) -> None:
        """End this process because of what happened to one; the hub ends all others too."""
        if self._over:
            return
        self._over = True
        if not self._own["rank"]:
            self._tell(cause=cause)
        own = cause["rank"] == self._own["rank"]
        if not own or not cause["said"]:  # otherwise the process has said more itself
            text = cause["text"] if own else f"{named(self._own)} ends because {cause['text']}"
            with contextlib.suppress(OSError):
                os.write(2, f"multimesh: {text}\n".encode())
        self._others_leave(GRACE / 3)  # before process 0 ends, and JAX's service in it, which would abort them
        self._end(end=cause["code"], own=own)
        until = time.monotonic() + GRACE
        while os.getppid() == self._parent and time.monotonic() < until:
            time.sleep(0.02)
        if os.getppid() == self._parent:
            with contextlib.suppress(OSError):
                os.kill(self._parent, signal.SIGKILL)

    def _end(self, **message: Any) -> None:
        """Say the last thing to the own process, after all that it has not taken yet."""
        until, gone = time.monotonic() + GRACE, self._process.send(**message)
        while not gone and time.monotonic() < until:
            time.sleep(0.02)
            gone = self._process.flush()

    def _finished(self, rank: int) -> None:
        if self._own["rank"]:
            self._tell(done=True)
            return
        self._done.add(rank)
        if self._progress:
            self._progress.done(rank)
        if len(self._done) == self._own["count"]:
            self._tell(all_done=True)
            self._all_done()

    def _all_done(self) -> None:
        self._over = True
        self._end(all_done=True)
        self._others_leave(GRACE)

    def _others_leave(self, seconds: float) -> None:
        """At the hub, wait a short time until the other watchers have gone."""
        if self._own["rank"]:
            return
        drain(self._links.values(), seconds)


def main(descriptor: int) -> None:
    """Meet the others, tell the process the result, and watch. The process says how on the socket that it gave."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the process
        signal.signal(number, signal.SIG_IGN)
    process = Line(socket.socket(fileno=descriptor))
    messages: list[Message] | None = []
    while messages == []:
        messages = process.receive()
    if messages is None:
        return
    given, own = messages[0], messages[0]["own"]
    meeting = Meeting(own, given["address"], given["bind"], given["timeout"], process, given["secret"].encode())
    try:
        links, members, hosts = meeting.guest() if own["rank"] else meeting.hub()
    except TurnedAwayError as error:
        process.send(refused=str(error), told=error.told)
        return
    process.send(hosts=hosts)
    process.link.setblocking(False)  # from here on nobody's silence holds up this watcher
    steps = mmap.mmap(given["steps"], 16)
    settings = {name: given[name] for name in ("stack", "ask", "silence", "stop", "stall", "lost")}
    Watch(own, process, links, members, steps=steps, **settings).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
