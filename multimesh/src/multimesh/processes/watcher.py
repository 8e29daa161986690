"""The watcher: a small process beside each process of a job. It tells all of them when one fails, dies or stops.

It is a process of its own because a thread cannot do this: a thread dies with its process, stops with it, and waits
while C++ code holds Python's lock. It needs the standard library only, so it starts in some 30 ms: `watcher_client`
runs this file by its path. A watcher talks to its process over a socket pair, and to the watcher of process 0, the hub,
over TCP. A message is a JSON object on a line of its own.

First all watchers meet. The hub listens at the coordinator's port, before JAX does, until every process has said who it
is and what it runs. Then it answers all at once, with an error or with the list of all processes. These connections
stay open, and the hub takes no other, so no stranger can speak. Each end says every second that it is there. The hub
decides what happened first and tells all. Each watcher prints that line and ends its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

TICK = 0.25  # seconds between two looks at the clock
BEAT = 1.0  # seconds between two signs of life
STOPPED = 3.0  # seconds that a process may be stopped; JAX aborts all others after 5 to 10 s
HOLD = 1.0  # seconds in which the death of another process may turn out to be the cause of an error
GRACE = 3.0  # seconds in which a process may end by itself
EXIT_INFO = 8  # mask of the exit code, in PIDFD_GET_INFO
FOREIGN = 1 << 20  # bytes without an end of line; only a stranger sends so many

Message = dict[str, Any]
Member = dict[str, Any]  # rank, count, host, pid; facts must be alike: name to a list of words


class RefusedError(Exception):
    """The processes cannot be one job, or do not find each other."""


class Line:
    """A connection. Each line on it is a message."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._rest = b""
        link.settimeout(GRACE)

    def fileno(self) -> int:
        """The file descriptor, for a selector."""
        return self.link.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. If the other end is gone, reading will tell."""
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived; None at the end. Call it when something has arrived."""
        try:
            data = self.link.recv(1 << 16)
            *lines, self._rest = (self._rest + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        strange = len(self._rest) > FOREIGN or not all(isinstance(m, dict) for m in messages)
        return None if not data or strange else messages

    def finish(self) -> None:
        """Say that no more messages follow."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_WR)


def named(member: Mapping[str, Any]) -> str:
    """Name a process, as in all messages."""
    return f"process {member['rank']} of {member['count']} ({member['host']}, pid {member['pid']})"


def difference(members: Sequence[Member]) -> str:
    """Say in which facts processes differ, and which processes; empty if they do not.

    A word may differ if it holds the process's own number or host, as in ``train.py 3`` and ``--log=/tmp/3.log``.
    """
    first, *others = members
    said = []
    for fact, mine in first["facts"].items():
        odd = [other for other in others if not _alike(first, other, fact)]
        if odd:
            theirs = odd[0]["facts"].get(fact, [])
            a, b = _without(mine, first, theirs, odd[0]), _without(theirs, odd[0], mine, first)
            if not a and not b:  # another order
                a, b = mine, theirs
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            said.append(f"{fact}: {named(first)} has {_quoted(a)} where {named(odd[0])}{more} has {_quoted(b)}")
    return "; ".join(said)


def _alike(a: Member, b: Member, fact: str) -> bool:
    mine, theirs = a["facts"][fact], b["facts"].get(fact, [])
    same_length = len(mine) == len(theirs)
    return same_length and all(x == y or _neutral(x, a) == _neutral(y, b) for x, y in zip(mine, theirs, strict=True))


def _neutral(word: str, member: Member) -> str:
    return re.sub(rf"(?<!\d){member['rank']}(?!\d)", "<rank>", word).replace(member["host"], "<host>")


def _without(words: Sequence[str], of: Member, others: Sequence[str], other: Member) -> list[str]:
    """The words that one process has and another lacks."""
    neutral = {_neutral(word, other) for word in others}
    return [word for word in words if word not in others and _neutral(word, of) not in neutral]


def _quoted(words: Sequence[str]) -> str:
    text = " ".join(words)
    return repr(text if len(text) <= 300 else text[:300] + "...") if words else "nothing"


class Meeting:
    """How the watchers find each other. `hub` and `guest` return connections, or raise `RefusedError`."""

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
            raise RefusedError(self._taken(error)) from None
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
                        raise RefusedError(self._missing())
                members = [self._members[rank] for rank in sorted(self._members)]
                if differs := difference(members):
                    raise RefusedError(f"the processes do not run the same; {differs}. Start all of them alike")
            except RefusedError as error:
                for line in (*self._links.values(), *self._unknown):
                    line.send(refused=str(error))
                    line.finish()
                raise
        for line in self._unknown:
            line.link.close()
        found = [{key: value for key, value in member.items() if key != "facts"} for member in members]
        for line in self._links.values():
            line.send(members=found)
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
                    raise RefusedError(answer["refused"])
                if "members" in answer:
                    return {0: line}, answer["members"]
                why = "what listens there is no process of this job, or ended"
                line.link.close()
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                self._come()
        raise RefusedError(
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
            raise RefusedError(f"{named(self._members[known])} ended while others were starting; see its output")
        if messages is None or not all({"rank", "count"} <= m.get("hello", {}).keys() for m in messages):
            self._ready.unregister(line)
            self._unknown.remove(line)
            line.link.close()
            return
        for message in messages:
            new = message["hello"]
            if new["rank"] in self._members or new["count"] != self._own["count"]:
                raise RefusedError(
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
    """The work of a watcher after the meeting.

    Parameters
    ----------
    links
        Connections to other watchers, by the number of their process.
    steps
        Eight bytes in which the process counts its calls.
    silence
        Seconds after which a silent watcher is out of reach.
    lost
        Exit code of the others, if a process is lost without one.
    """

    def __init__(
        self,
        own: Member,
        process: Line,
        links: Mapping[int, Line],
        members: Sequence[Member],
        *,
        steps: mmap.mmap,
        silence: float,
        lost: int,
    ) -> None:
        self._own, self._members, self._process, self._links = own, members, process, dict(links)
        self._parent, self._steps, self._silence, self._lost = own["pid"], steps, silence, lost
        self._parent_handle = _handle(own["pid"])
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
            for line in self._links.values():
                line.send()
            if self._alive and os.getppid() != self._parent:  # a process that it forked holds its socket open
                self._dead()
            if self._alive and state(self._parent) != "T":
                stopped = now
            elif self._alive and now - stopped > STOPPED:
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
                how = "is gone with its watcher: all its processes were killed, or its machine is down"
                self._report(rank, how, near=False)
            return
        if rank is not None:
            self._heard[rank] = time.monotonic()
        for message in messages:
            if "failed" in message:
                self._report(self._own["rank"], "failed", why=message["failed"], code=message["code"], said=True)
            elif "cause" in message:
                self._hear(message["cause"])
            elif "done" in message:
                self._finished(self._own["rank"] if rank is None else rank)
            elif "all_done" in message:
                self._all_done()

    def _dead(self) -> None:
        self._alive = False
        how, code = death(self._parent, self._parent_handle)
        self._report(self._own["rank"], how, code=code)

    def _report(
        self, rank: int, how: str, *, why: str = "", code: int | None = None, said: bool = False, near: bool = True
    ) -> None:
        """Tell the hub what happened to a process (``said``: by itself). Unless ``near``, decide without the hub."""
        steps = struct.unpack("<q", self._steps[:8])[0] if rank == self._own["rank"] else 0
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


def state(pid: int) -> str:
    """State of a process in one letter (T: stopped); empty if the system does not tell."""
    return (_stat(pid) or [""])[0]


def death(pid: int, handle: int | None) -> tuple[str, int | None]:
    """Say how a process ended, as far as the system still knows. Also returns its exit code, or None."""
    fields = _stat(pid)
    code = int(fields[-1]) if fields else _code_after(handle)
    if not code:
        return "ended without a word: it was killed (perhaps for lack of memory), crashed, or left by os._exit", None
    if code & 127:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(code & 127, f'signal {code & 127}')}", None
    return f"ended with exit code {code >> 8}", code >> 8


def _handle(pid: int) -> int | None:
    """A handle that keeps the exit code of a process, even if its parent asked for the code before us."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def _code_after(handle: int | None) -> int | None:
    """The exit code of a process whose parent has asked for it; Linux tells since 6.15 (PIDFD_GET_INFO)."""
    info = bytearray(struct.pack("<Q56x", EXIT_INFO))
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(-1 if handle is None else handle, 0xC0 << 24 | len(info) << 16 | 0xFF << 8 | 11, info)
    known, code = struct.unpack("<Q52xi", info)
    return code if known & EXIT_INFO else None


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def main(given: Mapping[str, Any]) -> None:
    """Meet the others, tell the process the result, and watch."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the process
        signal.signal(number, signal.SIG_IGN)
    process, own = Line(socket.socket(fileno=given["socket"])), given["own"]
    meeting = Meeting(own, given["address"], given["bind"], given["timeout"], process)
    try:
        links, members = meeting.guest() if own["rank"] else meeting.hub()
    except RefusedError as error:
        process.send(refused=str(error))
        return
    process.send(members=members)
    steps = mmap.mmap(given["steps"], 8)
    Watch(own, process, links, members, steps=steps, silence=given["silence"], lost=given["lost"]).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
