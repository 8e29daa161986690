"""What the control plane of a job costs process 0, for 8 to 8,192 processes: real watcher of process 0, light guests.

``processes_scale.py [COUNTS ...] [--seconds S] [--json]``. The guests are connections of one other process that speak
the watchers' protocol: they meet the hub, say that they are there as often as watchers do, and end together. ``meet``
is the time from the first guest's arrival to the last answer, with the hub's CPU time; ``core`` the share of a core
that the hub needs after that; ``agreement`` the time in which each leaves a note and reads what process 0 decided, with
the CPU time of process 0 and its watcher; ``death`` the time until all have heard of one that is gone.

The second table is what a save has of agreements, and a run or a call of a profile. In this all processes of eight read
one clock, which asks that of process 0 by JAX's key-value store: one process takes the part of all others.
"""

from __future__ import annotations

import base64
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import SimpleQueue, get_context
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import report
from multimesh.core import _compat
from multimesh.observe import clocks
from multimesh.processes import agree, notes, post, watcher, wire
from multimesh.processes.initialize import _facts

SECRET = b"a secret of a benchmark's job"
SILENCE = 30.0
SAVE, PROFILE = 1, 4  # agreements in a save after a job's first, and in a run of a profile besides its clocks
NODE = 8  # processes that read one clock
HOST = "a-node-of-a-large-cluster-{:05d}.compute.example.org"


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("counts", type=int, nargs="*", default=[8, 64, 512, 1024, 2048, 4096, 8192])
    options.add_argument("--seconds", type=float, default=30.0, help="for which the hub is watched after the meeting")
    args = options.parse_args()
    facts = _facts()
    rows = [watched(count, args.seconds, facts) for count in args.counts]
    calls = [
        {"processes": row["processes"], "save s": SAVE * row["agreement s"]}
        | {"profile's run s": PROFILE * row["agreement s"] + clock["clocks s"]}
        for row, clock in zip(rows, compared(args.counts), strict=True)
    ]
    report.show({"watchers": rows, "calls": calls}, args.json)


def watched(count: int, seconds: float, facts: dict[str, list[str]]) -> report.Row:
    """One job of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with Hub(count, address, facts) as hub:
        context = get_context("spawn")
        said: Any = context.SimpleQueue()
        go: Any = context.SimpleQueue()
        guests = context.Process(target=be_guests, args=(count, address, facts, said, go), daemon=True)
        guests.start()
        begun, received = said.get()
        hub.met()
        meeting, cpu = time.time() - begun, hub.cpu()
        since = time.monotonic()
        time.sleep(seconds)
        share = (hub.cpu() - cpu) / (time.monotonic() - since)
        seconds, used = agreement(count, hub, said, go)
        go.put("one dies")
        death = said.get()
        guests.join()
        return {
            "processes": count,
            "meet s": meeting,
            "hub's CPU s": cpu,
            "KB a guest": received / 1e3 / max(1, count - 1),
            "beat s": watcher.beat(count, SILENCE),
            "core %": 100 * share,
            "hub's MB": hub.megabytes,
            "agreement s": seconds,
            "agreement's CPU s": used,
            "death s": death,
        }


def agreement(count: int, hub: Hub, said: SimpleQueue[Any], go: SimpleQueue[Any]) -> tuple[float, float]:
    """The third agreement: seconds until all know of it, and seconds of CPU time of process 0 and of its watcher."""
    mine = bytes(32)
    with mock.patch("jax.process_count", return_value=count):
        for name in ("first", "second", "third"):
            go.put(name)
            said.get()
            start, cpu = time.monotonic(), time.process_time() + hub.cpu()
            agree.decided(name, mine, lambda every: every[-1])
            said.get()
            seconds, used = time.monotonic() - start, time.process_time() + hub.cpu() - cpu
    return seconds, used


def compared(counts: Sequence[int]) -> list[report.Row]:
    """Comparisons of the clocks of so many processes each, in two processes that JAX made one job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = get_context("spawn")
    ends: list[Any] = [context.SimpleQueue() for _ in range(3)]
    both = [context.Process(target=comparing, args=(rank, address, counts, *ends), daemon=True) for rank in range(2)]
    for each in both:
        each.start()
    rows: list[report.Row] = ends[2].get()
    for each in both:
        each.join()
    return rows


def comparing(
    rank: int,
    address: str,
    counts: Sequence[int],
    said: SimpleQueue[Any],
    go: SimpleQueue[Any],
    found: SimpleQueue[Any],
) -> None:
    """Be process 0, or all others in turn."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.distributed.initialize(address, 2, rank)
    rows = []
    for count in counts:
        seconds = asked(count, rank, said)
        if rank == 0:
            left = len(_compat.key_value_store().key_value_dir_get("multimesh/"))
            rows.append({"processes": count, "clocks s": seconds, "keys left": left})
            go.put(True)
        else:
            go.get()
    if rank == 0:
        found.put(rows)


def asked(count: int, rank: int, said: SimpleQueue[Any]) -> float:
    """Seconds in which one process of each node compares its clock with that of process 0."""
    others = max(1, count // NODE - 1)
    rounds = clocks.rounds(others)
    start = time.monotonic()
    for key in (f"multimesh/questions/{count}/{other}" for other in range(others)):
        if rank == 0:
            clocks.answer(key, rounds, 1)
        else:
            clocks.ask(key, rounds)
    if rank == 0:
        said.get()
        post.forget(f"multimesh/questions/{count}/")
    else:
        said.put(True)
    return time.monotonic() - start


class Hub:
    """The watcher of process 0, started as a process starts it; this process takes the part of process 0."""

    def __init__(self, count: int, address: str, facts: dict[str, list[str]]) -> None:
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as steps, tempfile.TemporaryFile() as stack, theirs:
            steps.truncate(16)
            wire.allow_files(count)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", watcher.__file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), steps.fileno(), stack.fileno()),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._line = wire.Line(ours)
            own = {"rank": 0, "count": count, "host": HOST.format(0), "pid": os.getpid(), "facts": facts}
            self._line.send(
                own=own, address=address, bind=address, secret=SECRET.decode(), timeout=300, silence=SILENCE, stop=30,
                stall=0, steps=steps.fileno(), stack=stack.fileno(), ask=0, lost=17,
            )  # fmt: skip
        self.megabytes = 0.0

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._line.link.close()

    def met(self) -> None:
        """Wait until all have met."""
        self._line.link.settimeout(None)
        while not (said := self._line.receive()):
            pass
        if "hosts" not in said[0]:
            raise SystemExit(f"the hub says: {said[0]}")
        found = notes.Notes(self._line)
        notes.use(found)
        threading.Thread(target=self._listen, args=(found,), daemon=True).start()

    def _listen(self, found: notes.Notes) -> None:
        while (messages := self._line.receive()) is not None:
            found.add(messages)

    def cpu(self) -> float:
        """Seconds of CPU time that the hub has needed so far; also notes how much memory it has."""
        folder = Path(f"/proc/{self._process.pid}")
        fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
        pages = int(folder.joinpath("statm").read_text().split()[1])
        self.megabytes = max(self.megabytes, pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Guest(wire.Line):
    """A light guest: a connection."""

    answered = 0  # bytes of the hub's answer
    noted = ""  # name of the last note that it heard
    at = 0.0  # when it says next that it is there


def be_guests(
    count: int, address: str, facts: dict[str, list[str]], said: SimpleQueue[Any], go: SimpleQueue[Any]
) -> None:
    """Be all the guests: meet, beat, end one, and hear of it."""
    wire.allow_files(count)
    host, port = address.split(":")
    ready, guests = selectors.DefaultSelector(), list[Guest]()
    begun, left = 0.0, count - 1
    for rank in range(1, count):
        guest = Guest(connected(host, int(port)), SECRET)
        begun = begun or time.time()
        own = {"rank": rank, "count": count, "host": HOST.format(rank), "pid": rank, "facts": facts}
        guest.send(hello=own)
        ready.register(guest, selectors.EVENT_READ, guest)
        guests.append(guest)
        left -= answered(ready, 0)
    while left:
        left -= answered(ready, 1)
    said.put((begun, sum(guest.answered for guest in guests)))
    beats = watcher.beat(count, SILENCE)
    now = time.monotonic()
    for rank, guest in enumerate(guests, 1):
        guest.at = now + beats * rank / count  # at moments of their own, as watchers do
    while (name := go.get() if not go.empty() else "") != "one dies":
        if name:
            said.put(True)
            for guest in guests:
                guest.send(note=[name, base64.b64encode(bytes(33)).decode()])
            while not all(guest.noted == f"{name}/decided" for guest in guests):
                answered(ready, 1)
            said.put(True)
        now = time.monotonic()
        for guest in guests:
            if now > guest.at:
                guest.send(at=[3, 4])
                guest.at = now + beats
        answered(ready, 0.05)
    dead, *rest = guests
    ready.unregister(dead)
    start = time.monotonic()
    dead.link.close()
    alive = set(rest)
    while alive:
        for key, _ in ready.select(1):
            messages = key.data.receive()
            if messages is None or any("cause" in message for message in messages):
                ready.unregister(key.data)
                key.data.link.close()
                alive.discard(key.data)
    said.put(time.monotonic() - start)


def answered(ready: selectors.BaseSelector, seconds: float) -> int:
    """Read what the hub says; how many guests it answered."""
    found = 0
    for key, _ in ready.select(seconds):
        messages = key.data.receive()
        if messages is None:
            raise SystemExit("the hub is gone")
        key.data.noted = next((said["note"][0] for said in messages if "note" in said), key.data.noted)
        if not key.data.answered and messages:
            key.data.answered = len(wire.encoded(**messages[0]))
            found += 1
    return found


def connected(host: str, port: int) -> socket.socket:
    """A connection to the hub as soon as it listens."""
    while True:
        try:
            return socket.create_connection((host, port), 2)
        except OSError:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
