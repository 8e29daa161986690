"""Clocks of several processes, compared with that of process 0."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from multimesh.processes import agree, post

ROUNDS = 40  # questions of a clock to process 0
QUESTIONS = 8_000  # of all clocks
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

    One process of each clock asks process 0 for its time through JAX's key-value store. It assumes that process 0 read
    its clock in the middle between question and answer; the error is at most half of the time between them. Of many
    clocks each asks less often.
    """
    me, clock, key = jax.process_index(), identity(), f"multimesh/clock/{name}"
    another = agree.first_says(f"clock/{name}", clock) != clock
    asks = another and post.put_first(f"{key}/{clock}/asks", b"")
    asking: list[int] = []

    def noted(every: Sequence[bytes]) -> bytes:
        asking.extend(rank for rank, each in enumerate(every) if each)
        return str(rounds(len(asking))).encode()

    each = int(agree.decide_together(f"{name}/clocks", b"asks" if asks else b"", noted))
    for rank in asking:
        answer(f"{key}/questions/{rank}", each, rank)
    if asks:
        post.put(f"{key}/{clock}/offset", json.dumps(ask(f"{key}/questions/{me}", each)).encode())
    found = json.loads(post.get(f"{key}/{clock}/offset", "the clocks", 0)) if another else [0.0, 0.0]
    agree.decide_together(f"{name}/clocks/read", b"")
    post.forget(f"{key}/")
    return found[0], found[1]


def rounds(clocks: int) -> int:
    """Return how often each of so many clocks is compared with that of process 0."""
    return max(FEWEST, min(ROUNDS, QUESTIONS // max(1, clocks)))


def answer(questions: str, rounds: int, rank: int) -> None:
    """Answer the questions of process ``rank``."""
    for i in range(rounds):
        post.get(f"{questions}/{i}/asked", "the clocks", rank)
        post.put(f"{questions}/{i}/time", repr(now()).encode())


def ask(questions: str, rounds: int) -> list[float]:
    """Return the seconds by which process 0's clock is ahead, and their possible error."""
    found: list[tuple[float, float]] = []
    for i in range(rounds):
        start = now()
        post.put(f"{questions}/{i}/asked", b"")
        theirs = float(post.get(f"{questions}/{i}/time", "the clocks", 0))
        end = now()
        found.append((end - start, theirs - (start + end) / 2))
    best = sorted(found)[: rounds // 4]  # those with the fastest answers
    return [statistics.median(ahead for _, ahead in best), best[-1][0] / 2]
