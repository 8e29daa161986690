"""How the watchers of a job meet. It needs the standard library only, as `watcher` does.

The hub, the watcher of process 0, listens at the coordinator's port until every process has said who it is and what it
runs. Then it answers all at once, with an error or with the hosts of all processes.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from typing import Any

from multimesh.processes.members import Member, alike, difference, folded, is_member, named
from multimesh.processes.wire import GRACE, SPARE, Line, Message, allow_files, drain, encoded

TICK = 0.25  # seconds between two looks at the clock
UNKNOWN = 10.0  # seconds in which one who connects must prove that it is of the job
FULL = (errno.EMFILE, errno.ENFILE)


class TurnedAwayError(Exception):
    """The processes cannot be one job, or do not find each other. ``told``: process 0 says it to the user."""

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


class Meeting:
    """How the watchers find each other.

    `hub` and `guest` return connections by process number, the members that this watcher speaks of, and the hosts of
    all processes as `folded` gives them; or they raise `TurnedAwayError`.
    """

    def __init__(self, own: Member, address: str, bind: str, timeout: float, process: Line, secret: bytes) -> None:
        self._own, self._bind, self._timeout, self._process, self._secret = own, bind, timeout, process, secret
        self._host, self._port = _split(address)
        self._deadline = time.monotonic() + timeout
        self._ready = selectors.DefaultSelector()
        self._ready.register(process, selectors.EVENT_READ)
        self._members = {own["rank"]: own}
        self._ranks: dict[Line, int] = {}
        self._unknown: dict[Line, float] = {}  # and when they came, the first first
        self._without = 0  # who came without the secret

    def hub(self) -> tuple[dict[int, Line], dict[int, Member], str]:
        """Wait at the coordinator's port for all others."""
        count = self._own["count"]
        if (allowed := allow_files(count)) < count + SPARE // 2:
            raise TurnedAwayError(
                f"process 0 needs {count + SPARE:,} open files, one for each of {count:,} processes, and may have "
                f"{allowed:,}: raise the hard limit (ulimit -Hn, LimitNOFILE of slurmd or of the container)"
            )
        try:
            server = self._listen()
        except OSError as error:
            raise TurnedAwayError(self._taken(error)) from None
        with server:
            server.setblocking(False)
            self._ready.register(server, selectors.EVENT_READ)
            try:
                while len(self._members) < count:
                    for come in self._come():
                        if come is server:
                            self._accept(server)
                        elif come in self._unknown or come in self._ranks:
                            self._introduce(come)
                    self._forget_silent()
                    if time.monotonic() > self._deadline:
                        raise TurnedAwayError(self._missing())
                members = [self._members[rank] for rank in range(count)]
                if differs := difference(members):
                    raise TurnedAwayError(f"the processes do not run the same; {differs}. Start all of them alike")
            except TurnedAwayError as error:
                refused = encoded(refused=str(error), told=True)
                for line in (*self._ranks, *self._unknown):
                    line.send_encoded(refused)
                drain((*self._ranks, *self._unknown), GRACE / 3)
                raise
        for line in self._unknown:
            line.link.close()
        hosts = folded([member["host"] for member in members])
        answer = encoded(hosts=hosts, first=_known(self._own))  # once, not for each of thousands
        for line in self._ranks:
            line.send_encoded(answer)
        found = {rank: _known(member) for rank, member in enumerate(members)}
        return {rank: line for line, rank in self._ranks.items()}, found, hosts

    def guest(self) -> tuple[dict[int, Line], dict[int, Member], str]:
        """Meet the hub."""
        why, strange = "no answer", ""
        while time.monotonic() < self._deadline:
            try:
                line = Line(socket.create_connection((self._host, self._port), 2), self._secret)
            except OSError as error:
                why = strange or error.strerror or str(error)
            else:
                answer = self._answer(line, self._deadline + GRACE)
                if "refused" in answer:
                    raise TurnedAwayError(answer["refused"], told=answer.get("told", False))
                if "hosts" in answer and is_member(answer.get("first", {}) | {"facts": {}}):
                    return {0: line}, {0: answer["first"], self._own["rank"]: _known(self._own)}, answer["hosts"]
                why = strange = (
                    "what listens there is no process of this job, or has another MULTIMESH_JOB_SECRET, or ended"
                )
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
                line = Line(socket.create_connection((self._host, self._port), 2), self._secret)
                told = self._answer(line, time.monotonic() + 5).get("refused")
                if told:
                    return str(told)
        return (
            f"{named(self._own)} cannot listen at {self._bind}: {error.strerror or error}; if another job has that "
            "port, choose another coordinator_address"
        )

    def _accept(self, server: socket.socket) -> None:
        """Take those who wait. If there is no room for more, those who have proved nothing leave."""
        try:
            for _ in range(64):
                line = Line(server.accept()[0], self._secret, hub=True)
                self._unknown[line] = time.monotonic()
                self._ready.register(line, selectors.EVENT_READ)
        except OSError as error:
            for line in [*self._unknown][: SPARE if error.errno in FULL else 0]:
                self._turn_away(line)

    def _forget_silent(self) -> None:
        """Turn away those who came long ago and have proved nothing."""
        now = time.monotonic()
        while self._unknown and now - self._unknown[line := next(iter(self._unknown))] > UNKNOWN:
            self._turn_away(line)

    def _turn_away(self, line: Line) -> None:
        self._without += not line.proven
        self._ready.unregister(line)
        self._ranks.pop(line, None)
        self._unknown.pop(line, None)
        line.link.close()

    def _introduce(self, line: Line) -> None:
        """Read what a newcomer says. Raises an error if a known process is gone."""
        messages, rank = line.receive(), self._ranks.get(line)
        if messages is None and rank is not None:
            raise TurnedAwayError(f"{named(self._members[rank])} ended while others were starting; see its output")
        if messages is None or not all(is_member(m.get("hello")) for m in messages):
            self._turn_away(line)
            return
        for new in (message["hello"] for message in messages):
            if new["rank"] in self._members or new["count"] != self._own["count"]:
                raise TurnedAwayError(
                    f"{named(self._members.get(new['rank'], self._own))} and {named(new)} cannot be of one job; give "
                    "each process a process_id of its own, and all the same num_processes"
                )
            if alike(self._own, new):
                del new["facts"]  # thousands of the same need much memory
            self._members[new["rank"]] = new
            self._ranks[line] = new["rank"]
            self._unknown.pop(line, None)

    def _missing(self) -> str:
        count = self._own["count"]
        missing = [rank for rank in range(count) if rank not in self._members]
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        strange = f" ({self._without} came without the job's secret)" if self._without else ""
        return (
            f"process {shown} of {count} did not start within {self._timeout:.0f} s{strange}; see what the launcher "
            "says, or give a longer initialization_timeout"
        )

    def _answer(self, line: Line, deadline: float) -> Message:
        line.send(hello=self._own)
        self._ready.register(line, selectors.EVENT_READ)
        try:
            while time.monotonic() < deadline:
                if line in self._come():
                    if answer := line.receive():
                        line.kept = answer[1:]
                        return answer[0]
                    if answer is None:
                        break
                line.flush()
            return {}
        finally:
            self._ready.unregister(line)

    def _come(self) -> list[Any]:
        found = [key.fileobj for key, _ in self._ready.select(TICK)]
        if self._process in found:  # it is gone: a process says nothing before the meeting
            raise SystemExit
        return found


def _known(member: Member) -> Member:
    """A member without what it runs."""
    return {key: value for key, value in member.items() if key != "facts"}


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
