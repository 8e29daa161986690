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
    asking: list[int] = []

    def decide(every: Sequence[bytes]) -> bytes:
        asking.extend(rank for rank, other in enumerate(every) if other != every[0])
        return json.dumps([every[0].decode(), rounds(len(asking))]).encode()

    first, count = json.loads(agree.decide_together(f"{name}/clocks", clock.encode(), decide))
    for rank in asking:
        answer(f"{questions}/{rank}", count, rank)
    ahead, error = ask(f"{questions}/{jax.process_index()}", count) if clock != first else (0.0, 0.0)
    agree.decide_together(f"{name}/clocks/read", b"")
    agree.forget(questions)
    return ahead, error


def rounds(processes: int) -> int:
    """Return how often each of so many processes compares its clock with that of process 0."""
    return max(FEWEST, min(ROUNDS, QUESTIONS // max(1, processes)))


def answer(questions: str, rounds: int, rank: int) -> None:
    """Answer the questions of process ``rank``."""
    for i in range(rounds):
        agree.wait_for({rank: f"{questions}/{i}/asked"}, "the clocks")
        agree.put(f"{questions}/{i}/time", repr(now()).encode())


def ask(questions: str, rounds: int) -> tuple[float, float]:
    """Return the seconds by which process 0's clock is ahead, and their possible error."""
    samples: list[tuple[float, float]] = []
    for i in range(rounds):
        start = now()
        agree.put(f"{questions}/{i}/asked", b"")
        (theirs,) = agree.wait_for({0: f"{questions}/{i}/time"}, "the clocks")
        end = now()
        samples.append((end - start, float(theirs) - (start + end) / 2))
    best = sorted(samples)[: rounds // 4]  # those with the fastest answers
    return statistics.median(ahead for _, ahead in best), best[-1][0] / 2
