"""What the control plane of a job costs process 0, for 8 to 1,024 processes: a real process 0, light guests.

``processes_scale.py [COUNTS ...] [--seconds S] [--json]``. Process 0 is a process of the library, with JAX's service.
The guests are clients of that service in one other process: they meet process 0, have heartbeats, wait for news and for
the end of the next one, and tell their progress, as processes do; the last one is a process that is killed. ``meet`` is
the time from the first guest's arrival until JAX has all, with the CPU time of process 0; ``core`` the share of a core
that it needs after that, while every process makes steps; ``agreement`` the time in which each leaves a value and reads
what process 0 decided; ``news`` the time until all have heard of an end, ``death`` that from the death itself.

The second table is what a save has of agreements, and a run or a call of a profile. In this all processes of eight read
one clock, which asks that of process 0 by JAX's key-value store: one process takes the part of all others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import SimpleQueue, get_context
from typing import Any

import jax
import report
from jaxlib import _jax
from multimesh.core import _compat
from multimesh.observe import clocks
from multimesh.processes import agree, post
from multimesh.processes.initialize import _facts
from multimesh.processes.watching import meeting, watch

import multimesh as mm

SILENCE = 8
START = 300
SAVE, PROFILE = 1, 4  # agreements in a save after a job's first, and in a run of a profile besides its clocks
NODE = 8  # processes that read one clock
HOST = "a-node-of-a-large-cluster-{:05d}.compute.example.org"


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("counts", type=int, nargs="*", default=[8, 64, 256, 512, 1024])
    options.add_argument("--seconds", type=float, default=30.0, help="for which process 0 is measured after the start")
    args = options.parse_args()
    rows = [watched(count, args.seconds) for count in args.counts]
    calls = [
        {"processes": row["processes"], "save s": SAVE * row["agreement s"]}
        | {"profile's run s": PROFILE * row["agreement s"] + clock["clocks s"]}
        for row, clock in zip(rows, compared(args.counts), strict=True)
    ]
    report.show({"control plane": rows, "calls": calls}, args.json)


def watched(count: int, seconds: float) -> report.Row:
    """One job of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = get_context("spawn")
    to_first, of_first, to_guests, of_guests, of_last = [context.SimpleQueue() for _ in range(5)]
    works = [(first, to_first, of_first), (guests, to_guests, of_guests), (last, to_guests, of_last)]
    started = [context.Process(target=work, args=(count, address, *ends), daemon=True) for work, *ends in works]
    for each in started:
        each.start()
    begun = min(of_guests.get(), of_last.get())
    met, cpu = of_first.get()
    of_guests.get(), of_last.get()
    to_first.put(seconds)
    share = of_first.get()
    for _ in range(3):
        to_first.put("agree")
        to_guests.put("agree")
        agreed, used = of_first.get()
        of_guests.get()
    os.kill(started[2].pid or 0, signal.SIGKILL)
    died = time.time()
    told, heard = of_guests.get()
    code = of_first.get()
    for each in started:
        each.kill()
        each.join()
    return {
        "processes": count,
        "meet s": met - begun,
        "its CPU s": cpu,
        "beat s": watch.beat(count, SILENCE),
        "core %": 100 * share,
        "agreement s": agreed,
        "agreement's CPU s": used,
        "news s": heard - told,
        "death s": heard - died,
        "process 0 says": code,
    }


def first(count: int, address: str, go: SimpleQueue[Any], said: SimpleQueue[Any]) -> None:
    """Be process 0."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    cpu = time.process_time()
    mm.distributed.initialize(
        address, count, 0, initialization_timeout=START, silence_timeout=SILENCE, same_command=False
    )
    said.put((time.time(), time.process_time() - cpu))
    seconds, cpu = go.get(), time.process_time()
    time.sleep(seconds)
    said.put((time.process_time() - cpu) / seconds)
    for number in range(3):
        go.get()
        start, cpu = time.monotonic(), time.process_time()
        agree.decide_together(f"{number}", bytes(32), lambda every: every[-1])
        said.put((time.monotonic() - start, time.process_time() - cpu))
    said.put(os.read(reader, 1 << 16).decode().partition(" ends because ")[2].strip())


def joined(rank: int, count: int, address: str, facts: dict[str, list[str]]) -> Any:
    """Return a client of JAX's service that has met process 0 and all others."""
    own = {"rank": rank, "count": count, "host": HOST.format(rank), "pid": rank, "machine": "", "facts": facts}
    meeting.meet(own, address, address, START)
    client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=START, heartbeat_timeout=SILENCE, use_compression=True
    )
    client.connect()
    return client


def last(count: int, address: str, _: SimpleQueue[Any], said: SimpleQueue[Any]) -> None:
    """Be the process that is killed."""
    said.put(time.time())
    client = joined(count - 1, count, address, facts())
    said.put(True)
    for number in range(3):
        client.key_value_set_bytes(f"{post._broadcast_key(str(number))}{count - 1}", bytes(32))
        client.blocking_key_value_get_bytes(post._said(f"{number}/decided"), 10_000_000)
    time.sleep(10_000)


def guests(count: int, address: str, go: SimpleQueue[Any], said: SimpleQueue[Any]) -> None:
    """Be all others."""
    meeting.allow_files(8 * count)
    ranks, own, told = range(1, count - 1), facts(), list[float]()
    with ThreadPoolExecutor(3 * count) as pool:
        said.put(time.time())
        clients = dict(zip(ranks, pool.map(lambda rank: joined(rank, count, address, own), ranks), strict=True))
        said.put(True)
        for rank, client in clients.items():
            pool.submit(follow, client, rank, count, told)
        heard = [pool.submit(hear, client) for client in clients.values()]
        threading.Thread(target=progress, args=(clients, watch.beat(count, SILENCE)), daemon=True).start()
        for number in range(3):
            go.get()
            for wait in [pool.submit(agreed, client, rank, str(number)) for rank, client in clients.items()]:
                wait.result()
            said.put(True)
        ends = [each.result() for each in heard]
        said.put((told[0], max(ends)))
        time.sleep(10_000)


def follow(client: Any, rank: int, count: int, told: list[float]) -> None:
    """Wait for the end of the next one, and tell all of it, as `multimesh.processes.watching.watch` does."""
    alive = client.get_live_nodes([rank, rank + 1])
    if rank == count - 2 and rank + 1 not in alive:
        told.append(time.time())
        cause = {"rank": rank + 1, "text": f"process {rank + 1} of {count} is out of reach", "code": 17, "said": False}
        for number, news in enumerate(({"missing": rank + 1}, {"cause": cause})):
            client.key_value_set_bytes(f"{watch._NEWS}{number}", json.dumps(news).encode())
            time.sleep(watch.HOLD)


def hear(client: Any) -> float:
    """Return the time at which one has heard of an end."""
    for number in range(2):
        client.blocking_key_value_get_bytes(f"{watch._NEWS}{number}", 10_000_000)
    return time.time()


def progress(clients: dict[int, Any], beat: float) -> None:
    """Tell the progress of each at a moment of its own."""
    step = 0
    while True:
        step += 1
        for rank, client in clients.items():
            client.key_value_set_bytes(f"{watch._AT}{rank}", f"{step} {step}".encode(), allow_overwrite=True)
            time.sleep(0.9 * beat / len(clients))


def agreed(client: Any, rank: int, name: str) -> None:
    """Take part in an agreement."""
    client.key_value_set_bytes(f"{post._broadcast_key(name)}{rank}", bytes(32))
    client.blocking_key_value_get_bytes(post._said(f"{name}/decided"), 10_000_000)


def facts() -> dict[str, list[str]]:
    """Return the facts of a process of this job, which does not compare command lines."""
    return {name: words for name, words in _facts().items() if name != "command line"}


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


if __name__ == "__main__":
    main()
