"""Clocks of several processes, compared with that of process 0."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from multimesh.processes import agree

ROUNDS = 40  # questions of a clock to process 0
QUESTIONS = 8_000  # of all processes
FEWEST = 4


def now() -> float:
    """Return the seconds on the clock of this process."""
    return time.perf_counter()


def identity() -> str:
    """Return a text that processes of one clock share: the boot of their system, and their time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{Path('/proc/self/ns/time').stat().st_ino}"
    except OSError:
        return f"process {jax.process_index()}"


def offset(name: str) -> tuple[float, float]:
    """Return the seconds to add to `now` for the time of process 0, and their possible error.

    All processes call it, with a name that is used once.

    Each process of another clock asks process 0 for its time through JAX's key-value store. It assumes that process 0
    read its clock in the middle between question and answer; the error is at most half of the time between them. Of
    many processes each asks less often.
    """
    clock, questions = identity(), f"multimesh/clock/{name}"
    asking: list[int] = []  # in process 0, which answers

    def decide(every: Sequence[bytes]) -> bytes:
        asking.extend(rank for rank, other in enumerate(every) if other != every[0])
        rounds = max(FEWEST, min(ROUNDS, QUESTIONS // max(1, len(asking))))
        return json.dumps([every[0].decode(), rounds]).encode()

    first, rounds = json.loads(agree.decide_together(f"{name}/clocks", clock.encode(), decide))
    for question, rank in ((f"{questions}/{rank}/{i}", rank) for rank in asking for i in range(rounds)):
        agree.wait_for({rank: f"{question}/asked"}, "the clocks")
        agree.put(f"{question}/time", repr(now()).encode())
    samples: list[tuple[float, float]] = []
    for i in range(rounds if clock != first else 0):
        question, start = f"{questions}/{jax.process_index()}/{i}", now()
        agree.put(f"{question}/asked", b"")
        (answer,) = agree.wait_for({0: f"{question}/time"}, "the clocks")
        end = now()
        samples.append((end - start, float(answer) - (start + end) / 2))
    agree.decide_together(f"{name}/clocks/read", b"")
    agree.forget(questions)
    fastest = sorted(samples)[: rounds // 4] or [(0.0, 0.0)]
    return statistics.median(ahead for _, ahead in fastest), fastest[-1][0] / 2
