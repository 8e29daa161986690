"""How the processes of a job meet, before JAX starts.

JAX's own service can't do this: where a process does not come, comes twice or finds nobody, it ends the others by
SIGABRT, and says neither who nor why. So process 0 first listens at the coordinator's port itself, until every process
has said in a line of JSON who it is and what it runs. It answers all, with an error or with the hosts of all processes,
and leaves the port to JAX.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import resource
import selectors
import socket
import time
import zlib
from collections.abc import Sequence
from typing import Any

from multimesh.errors import UsageError
from multimesh.processes.watching.members import Member, alike, difference, is_member, name_of, neighbors

TICK = 0.25  # seconds between two looks at the clock
UNKNOWN = 10.0  # seconds in which one who connects must say who it is
GRACE = 3.0  # seconds that a guest waits longer than process 0
TWIN = 2.0  # seconds that process 0 waits for what has its port: if that is another process 0 of this job, it answers
LONGEST = 1 << 20  # bytes that a process says
SPARE = 64  # open files besides one for each process
FULL = (errno.EMFILE, errno.ENFILE)


class RefusedError(UsageError):
    """The processes do not become a job. ``told``: process 0 has the same error, and says so."""

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


class _StrangerError(OSError):
    """Another program, or one that ended, listens at the address of process 0."""


def meet(own: Member, address: str, bind: str, timeout: float) -> tuple[list[str], dict[int, Member]]:
    """Meet the other processes, for process 0 at ``bind``.

    Returns
    -------
    The hosts of all processes; and the members, by rank, of which this process may have to speak: itself, process 0,
    the next one and the next one on this machine. Process 0 has all.

    Raises
    ------
    RefusedError
        If the processes cannot be one job, or do not find each other within ``timeout`` seconds.
    """
    if own["rank"]:
        answer = _visit(own, address, timeout)
        if "refused" in answer:
            raise RefusedError(answer["refused"], told=answer.get("told", False))
        return _unpack(answer["hosts"]), {member["rank"]: member for member in answer["known"]}
    members = _Hub(own, address, bind, timeout).meet()
    return [member["host"] for member in members], {member["rank"]: member for member in members}


class _Hub:
    """Process 0 while it waits for the others."""

    def __init__(self, own: Member, address: str, bind: str, timeout: float) -> None:
        self._own, self._address, self._bind, self._timeout = own, address, bind, timeout
        self._deadline = time.monotonic() + timeout
        self._ready = selectors.DefaultSelector()
        self._members = {own["rank"]: own}
        self._ranks: dict[socket.socket, int] = {}
        self._unknown: dict[socket.socket, tuple[float, bytearray]] = {}  # when they came, and what they said

    def meet(self) -> list[Member]:
        count = self._own["count"]
        if (allowed := allow_files(count)) < count + SPARE // 2:
            raise RefusedError(
                f"process 0 needs {count + SPARE:,} open files, one for each of {count:,} processes, and may have "
                f"{allowed:,}: raise the hard limit (ulimit -Hn, LimitNOFILE of slurmd or of the container)"
            )
        try:
            server = self._listen()
        except OSError as error:
            raise RefusedError(self._taken(error)) from None
        with server, self._ready, contextlib.ExitStack() as ends:
            ends.callback(self._close)
            server.setblocking(False)
            self._ready.register(server, selectors.EVENT_READ)
            try:
                while len(self._members) < count:
                    for key, _ in self._ready.select(TICK):
                        if key.fileobj is server:
                            self._accept(server)
                        elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:
                            self._read(key.fileobj)
                    while self._unknown and time.monotonic() - next(iter(self._unknown.values()))[0] > UNKNOWN:
                        self._turn_away(next(iter(self._unknown)))
                    if time.monotonic() > self._deadline:
                        raise RefusedError(self._missing())
                members = [self._members[rank] for rank in range(count)]
                if differs := difference(members):
                    raise RefusedError(f"the processes do not run the same; {differs}. Start all of them alike")
            except RefusedError as error:
                for link in (*self._ranks, *self._unknown):
                    _answer(link, {"refused": str(error), "told": True})
                raise
            members = [_drop_facts(member) for member in members]
            hosts, beside = _pack([member["host"] for member in members]), neighbors(members)
            for link, rank in self._ranks.items():
                ranks = {0, rank, min(rank + 1, count - 1), beside.get(rank, rank)}
                _answer(link, {"hosts": hosts, "known": [members[each] for each in sorted(ranks)]})
        return members

    def _close(self) -> None:
        for link in (*self._ranks, *self._unknown):
            link.close()

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
            with contextlib.suppress(OSError, KeyError):
                return str(_ask(self._own, self._address, TWIN)["refused"])
        why = str(error.strerror or error).partition(" (while attempting")[0]  # Python says the address again
        return (
            f"{name_of(self._own)} cannot listen at {self._bind}: {why}; if another job has that "
            "port, choose another coordinator_address"
        )

    def _accept(self, server: socket.socket) -> None:
        """Take those who wait. If there is no room for more, those who have said nothing leave."""
        try:
            for _ in range(64):
                link = server.accept()[0]
                link.setblocking(False)
                self._unknown[link] = time.monotonic(), bytearray()
                self._ready.register(link, selectors.EVENT_READ)
        except OSError as error:
            for link in [*self._unknown][: SPARE if error.errno in FULL else 0]:
                self._turn_away(link)

    def _turn_away(self, link: socket.socket) -> None:
        self._ready.unregister(link)
        self._unknown.pop(link, None)
        link.close()

    def _read(self, link: socket.socket) -> None:
        """Read what a newcomer says. Raises an error if a known process is gone."""
        try:
            data = link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if link in self._ranks:
            if data:  # more than it should say
                return
            gone = self._members[self._ranks[link]]
            raise RefusedError(f"{name_of(gone)} ended while others were starting; see its output")
        text = self._unknown[link][1]
        text += data
        if not data or len(text) > LONGEST:
            self._turn_away(link)
        elif text.endswith(b"\n"):
            self._introduce(link, _message(bytes(text)).get("hello"))

    def _introduce(self, link: socket.socket, new: Any) -> None:
        if not is_member(new):
            self._turn_away(link)
            return
        if new["rank"] in self._members or new["count"] != self._own["count"]:
            raise RefusedError(
                f"{name_of(self._members.get(new['rank'], self._own))} and {name_of(new)} cannot be of one job; give "
                "each process a process_id of its own, and all the same num_processes"
            )
        if alike(self._own, new):
            del new["facts"]  # thousands of the same need much memory
        self._members[new["rank"]] = new
        self._ranks[link] = new["rank"]
        del self._unknown[link]

    def _missing(self) -> str:
        count = self._own["count"]
        missing = [rank for rank in range(count) if rank not in self._members]
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return (
            f"process {shown} of {count} did not start within {self._timeout:.0f} s; see what the launcher says, or "
            "give a longer initialization_timeout"
        )


def _visit(own: Member, address: str, timeout: float) -> dict[str, Any]:
    """Say to process 0 who this process is, as soon as it listens; returns its answer."""
    why, deadline = OSError("no answer"), time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            return _ask(own, address, deadline + GRACE - time.monotonic())
        except OSError as error:
            why = why if isinstance(why, _StrangerError) else error
        time.sleep(0.2)
    host, port = _split(address)
    raise RefusedError(
        f"process {own['rank']} of {own['count']} cannot meet process 0 at {host}:{port} within {timeout:.0f} s: "
        f"{why.strerror or why}; does process 0 run, and is that its address?"
    )


def _ask(own: Member, address: str, patience: float) -> dict[str, Any]:
    """Return the answer of process 0. Raises `_StrangerError` if another program listens there, whatever that does."""
    said: dict[str, Any] = {}
    broken = contextlib.suppress(ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
    with broken, socket.create_connection(_split(address), 2) as link:
        try:
            link.settimeout(patience)
            link.sendall(json.dumps({"hello": own}).encode() + b"\n")
            with link.makefile("rb") as answer:
                said = _message(answer.readline(64 * LONGEST))
        except TimeoutError:
            raise _StrangerError("what listens there does not answer") from None
    if "refused" in said or {"hosts", "known"} <= said.keys():
        return said
    raise _StrangerError("what listens there is no process of this job, or ended")


def _answer(link: socket.socket, said: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        link.settimeout(GRACE)
        link.sendall(json.dumps(said).encode() + b"\n")


def _message(text: bytes) -> dict[str, Any]:
    """Parse a message; empty if it is not one of a process of a job."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _drop_facts(member: Member) -> Member:
    """Return a member without its facts."""
    return {key: value for key, value in member.items() if key != "facts"}


def _pack(hosts: Sequence[str]) -> str:
    return base64.b64encode(zlib.compress("\n".join(hosts).encode(), 9)).decode()


def _unpack(text: str) -> list[str]:
    return zlib.decompress(base64.b64decode(text)).decode().split("\n")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def allow_files(count: int) -> int:
    """Let this process have a connection to each of ``count`` processes; returns how many open files it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE
    for limits in ((wanted, max(wanted, hard)), (min(wanted, hard), hard)):  # the first needs a privilege
        if soft < limits[0]:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                return limits[0]
    return soft
