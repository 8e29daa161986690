"""The watcher: a small process beside each process of a job. It tells all of them when one fails, dies or stops.

It is a process of its own because a thread cannot do this: a thread dies with its process, stops with it, and waits
while C++ code holds Python's lock. It needs the standard library and three modules beside it only, so it starts in some
40 ms: `watcher_client` runs this file by its path. A watcher talks to its process over a socket pair, and to the
watcher of process 0, the hub, over TCP. A message is a JSON object on a line of its own.

First all watchers meet. The hub listens at the coordinator's port, before JAX does, until every process has said who it
is and what it runs. Then it answers all at once, with an error or with the list of all processes. These connections
stay open, and the hub takes no other, so no stranger can speak. Each end says every second that it is there. The hub
decides what happened first and tells all. Each watcher prints that line and ends its process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by its path, isolated from the environment: it finds the modules beside it
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from multimesh.processes.endings import death, handle_of, state
from multimesh.processes.members import Member, difference, is_member, named
from multimesh.processes.stalls import StepsOfAll

TICK = 0.25  # seconds between two looks at the clock
BEAT = 1.0  # seconds between two signs of life
HOLD = 1.0  # seconds in which the death of another process may turn out to be the cause of an error
GRACE = 3.0  # seconds in which a process may end by itself
STACK = 1.0  # seconds in which a process must have written its stack
FOREIGN = 1 << 20  # bytes without an end of line; only a stranger sends so many

Message = dict[str, Any]


class TurnedAwayError(Exception):
    """The processes cannot be one job, or do not find each other. ``told``: process 0 says it to the user."""

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


class Line:
    """A connection. Each line on it is a message."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._rest = b""
        self.reset = False  # whether the connection was cut, not ended
        link.settimeout(GRACE)

    def fileno(self) -> int:
        """The file descriptor, for a selector."""
        return self.link.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. If the other end is gone, reading will tell."""
        self.send_encoded(encoded(**message))

    def send_encoded(self, message: bytes) -> None:
        """Send what `encoded` made."""
        with contextlib.suppress(OSError):
            self.link.sendall(message)

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived; None at the end. Call it when something has arrived."""
        try:
            data = self.link.recv(1 << 16)
            *lines, self._rest = (self._rest + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            self.reset = isinstance(error, ConnectionResetError)
            return None
        strange = len(self._rest) > FOREIGN or not all(isinstance(m, dict) for m in messages)
        return None if not data or strange else messages

    def finish(self) -> None:
        """Say that no more messages follow."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_WR)


def encoded(**message: Any) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


class Meeting:
    """How the watchers find each other. `hub` and `guest` return connections, or raise `TurnedAwayError`."""

    def __init__(self, own: Member, address: str, bind: str, timeout: float, process: Line) -> None:
        self._own, self._bind, self._timeout, self._process = own, bind, timeout, process
        self._host, self._port = _split(address)
        self._deadline = time.monotonic() + timeout
        self._ready = selectors.DefaultSelector()
        self._ready.register(process, selectors.EVENT_READ)
        self._members = {own["rank"]: own}
        self._links: dict[int, Line] = {}
        self._unknown: list[Line] = []

    def hub(self) -> tuple[dict[int, Line], list[Member]]:
        """Wait at the coordinator's port for all others. Returns connections by process number, and all members."""
        try:
            server = self._listen()
        except OSError as error:
            raise TurnedAwayError(self._taken(error)) from None
        with server:
            self._ready.register(server, selectors.EVENT_READ)
            try:
                while len(self._members) < self._own["count"]:
                    for come in self._come():
                        if come is server:
                            self._unknown.append(Line(server.accept()[0]))
                            self._ready.register(self._unknown[-1], selectors.EVENT_READ)
                        else:
                            self._introduce(come)
                    if time.monotonic() > self._deadline:
                        raise TurnedAwayError(self._missing())
                members = [self._members[rank] for rank in sorted(self._members)]
                if differs := difference(members):
                    raise TurnedAwayError(f"the processes do not run the same; {differs}. Start all of them alike")
            except TurnedAwayError as error:
                for line in (*self._links.values(), *self._unknown):
                    line.send(refused=str(error), told=True)
                    line.finish()
                raise
        for line in self._unknown:
            line.link.close()
        found = [{key: value for key, value in member.items() if key != "facts"} for member in members]
        answer = encoded(members=found)  # once, not for each of thousands
        for line in self._links.values():
            line.send_encoded(answer)
        return self._links, found

    def guest(self) -> tuple[dict[int, Line], list[Member]]:
        """Meet the hub. Returns the connection to it, and all members."""
        why = "no answer"
        while time.monotonic() < self._deadline:
            try:
                line = Line(socket.create_connection((self._host, self._port), 2))
            except OSError as error:
                why = error.strerror or str(error)
            else:
                answer = self._answer(line, self._deadline + GRACE)
                if "refused" in answer:
                    raise TurnedAwayError(answer["refused"], told=answer.get("told", False))
                if "members" in answer:
                    return {0: line}, answer["members"]
                why = "what listens there is no process of this job, or ended"
                line.link.close()
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                self._come()
        raise TurnedAwayError(
            f"process {self._own['rank']} of {self._own['count']} cannot meet process 0 at {self._host}:{self._port} "
            f"within {self._timeout:.0f} s: {why}; does process 0 run, and is that its address?"
        )

    def _listen(self) -> socket.socket:
        host, port = _split(self._bind)
        backlog = self._own["count"] + 8
        if host == "::" and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        family = socket.AF_INET6 if ":" in host.strip(":") else socket.AF_INET
        return socket.create_server((host.strip(":"), port), family=family, backlog=backlog)

    def _taken(self, error: OSError) -> str:
        """Say why process 0 cannot listen. If another process 0 of this job has the port, tell it too."""
        if error.errno == errno.EADDRINUSE:
            with contextlib.suppress(OSError):
                line = Line(socket.create_connection((self._host, self._port), 2))
                told = self._answer(line, time.monotonic() + 5).get("refused")
                if told:
                    return str(told)
        return (
            f"{named(self._own)} cannot listen at {self._bind}: {error.strerror or error}; if another job has that "
            "port, choose another coordinator_address"
        )

    def _introduce(self, line: Line) -> None:
        """Read what a newcomer says. Raises an error if a known process is gone."""
        messages = line.receive()
        known = next((rank for rank, other in self._links.items() if other is line), None)
        if messages is None and known is not None:
            raise TurnedAwayError(f"{named(self._members[known])} ended while others were starting; see its output")
        if messages is None or not all(is_member(m.get("hello")) for m in messages):
            self._ready.unregister(line)
            self._unknown.remove(line)
            line.link.close()
            return
        for message in messages:
            new = message["hello"]
            if new["rank"] in self._members or new["count"] != self._own["count"]:
                raise TurnedAwayError(
                    f"{named(self._members.get(new['rank'], self._own))} and {named(new)} cannot be of one job; give "
                    "each process a process_id of its own, and all the same num_processes"
                )
            self._members[new["rank"]] = new
            self._links[new["rank"]] = line
            self._unknown.remove(line)

    def _missing(self) -> str:
        count = self._own["count"]
        missing = [rank for rank in range(count) if rank not in self._members]
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return (
            f"process {shown} of {count} did not start within {self._timeout:.0f} s; see what the launcher says, or "
            "give a longer initialization_timeout"
        )

    def _answer(self, line: Line, deadline: float) -> Message:
        line.send(hello=self._own)
        self._ready.register(line, selectors.EVENT_READ)
        try:
            while time.monotonic() < deadline:
                if line in self._come():
                    for message in (answer := line.receive()) or ():
                        return message
                    if answer is None:
                        break
            return {}
        finally:
            self._ready.unregister(line)

    def _come(self) -> list[Any]:
        found = [key.fileobj for key, _ in self._ready.select(TICK)]
        if self._process in found:  # it is gone: a process says nothing before the meeting
            raise SystemExit
        return found


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Watch:
    """The work of a watcher after the meeting."""

    def __init__(
        self,
        own: Member,
        process: Line,
        links: Mapping[int, Line],  # to other watchers, by the number of their process
        members: Sequence[Member],
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
        self._progress = StepsOfAll(members, stall, time.monotonic()) if not own["rank"] else None
        self._parent_handle = handle_of(own["pid"])
        self._heard = dict.fromkeys(links, time.monotonic())
        self._ready = selectors.DefaultSelector()
        self._ready.register(process, selectors.EVENT_READ)
        for rank, line in links.items():
            self._ready.register(line, selectors.EVENT_READ, rank)
        self._done: set[int] = set()
        self._alive, self._over = True, False
        self._failed: list[tuple[float, Message]] = []  # at the hub: errors, and when to decide by them

    def run(self) -> None:
        """Watch until all processes are done or one is lost."""
        now = beaten = stopped = time.monotonic()
        while not self._over:
            for key, _ in self._ready.select(TICK):
                if not self._over:
                    self._read(key.data)
            before, now = now, time.monotonic()
            if self._failed and now > self._failed[0][0]:
                self._decide(self._failed[0][1])
            if now - before > BEAT + TICK:  # this watcher was stopped too: the whole job was suspended
                self._heard, stopped = dict.fromkeys(self._links, now), now
            if now - beaten < BEAT or self._over:
                continue
            beaten = now
            at = self._steps_now()
            for line in self._links.values():
                line.send(**({"at": at} if self._own["rank"] else {}))
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

    def _read(self, rank: int | None) -> None:
        """Read from another watcher (``rank``), or from the own process (None)."""
        line = self._process if rank is None else self._links[rank]
        messages = line.receive()
        if messages is None:
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
                self._report(self._own["rank"], "failed", why=message["failed"], code=message["code"], said=True)
            elif "cause" in message:
                self._hear(message["cause"])
            elif "at" in message and self._progress and rank is not None:
                self._progress.note(rank, message["at"], time.monotonic())
            elif "stack" in message:
                self._tell_stall(self._own["rank"] if rank is None else rank, message["stack"])
            elif "show" in message:
                self._links[0].send(stack=self._own_stack())
            elif "done" in message:
                self._finished(self._own["rank"] if rank is None else rank)
            elif "all_done" in message:
                self._all_done()

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
            self._links[0].send(cause=cause)
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
        for rank, line in self._links.items():
            if rank:
                line.send(cause=cause)
        own = cause["rank"] == self._own["rank"]
        if not own or not cause["said"]:  # otherwise the process has said more itself
            text = cause["text"] if own else f"{named(self._own)} ends because {cause['text']}"
            with contextlib.suppress(OSError):
                os.write(2, f"multimesh: {text}\n".encode())
        self._others_leave(GRACE / 3)  # before process 0 ends, and JAX's service in it, which would abort them
        self._process.send(end=cause["code"], own=own)
        until = time.monotonic() + GRACE
        while os.getppid() == self._parent and time.monotonic() < until:
            time.sleep(0.02)
        if os.getppid() == self._parent:
            with contextlib.suppress(OSError):
                os.kill(self._parent, signal.SIGKILL)

    def _finished(self, rank: int) -> None:
        if self._own["rank"]:
            self._links[0].send(done=True)
            return
        self._done.add(rank)
        if self._progress:
            self._progress.done(rank)
        if len(self._done) == self._own["count"]:
            for line in self._links.values():
                line.send(all_done=True)
            self._all_done()

    def _all_done(self) -> None:
        self._over = True
        self._process.send(all_done=True)
        self._others_leave(GRACE)

    def _others_leave(self, seconds: float) -> None:
        """At the hub, wait a short time until the other watchers have gone."""
        if self._own["rank"]:
            return
        for line in self._links.values():
            line.finish()
        until = time.monotonic() + seconds
        while self._links and time.monotonic() < until:
            for key, _ in self._ready.select(0.02):
                line = self._process if key.data is None else self._links[key.data]
                if line.receive() is None:
                    self._ready.unregister(line)
                    self._links.pop(key.data, None)


def main(descriptor: int) -> None:
    """Meet the others, tell the process the result, and watch. The process says how on the socket that it gave."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the process
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # a hub has a connection to every watcher
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    process = Line(socket.socket(fileno=descriptor))
    messages: list[Message] | None = []
    while messages == []:
        messages = process.receive()
    if messages is None:
        return
    given, own = messages[0], messages[0]["own"]
    meeting = Meeting(own, given["address"], given["bind"], given["timeout"], process)
    try:
        links, members = meeting.guest() if own["rank"] else meeting.hub()
    except TurnedAwayError as error:
        process.send(refused=str(error), told=error.told)
        return
    process.send(members=members)
    steps = mmap.mmap(given["steps"], 16)
    settings = {name: given[name] for name in ("stack", "ask", "silence", "stop", "stall", "lost")}
    Watch(own, process, links, members, steps=steps, **settings).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
