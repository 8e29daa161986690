"""How processes agree, by JAX's key-value store: barriers, compared lines, exchanged bytes."""

from __future__ import annotations

import functools
import itertools
import json
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import jax

from multimesh.core import _compat
from multimesh.errors import DamagedError, LostProcessError, MultiMeshError, UsageError
from multimesh.processes import timeouts

SLICE = 5.0
"""Seconds of a wait that nothing interrupts; Ctrl-C works between two of them."""

NOTICE = 60.0
"""Seconds after which process 0 says for whom it waits."""

T = TypeVar("T")

_plans = itertools.count(1)
_read_next: list[str] = []  # at process 0: keys that all have read when they come together again


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.process_count() > 1


def patience(timeout: float | None = None) -> float:
    """Seconds to wait for others: those given, else those set for the job."""
    return timeouts.current().compile if timeout is None else timeout


def barrier(name: str, timeout: float | None = None) -> None:
    """Wait until every process is here; use each ``name`` once. Ctrl-C ends the wait.

    After a minute process 0 says who has not come.
    """
    store, seconds = _compat.key_value_store(), patience(timeout)
    here = f"multimesh/here/{name}/"
    store.key_value_set(f"{here}{jax.process_index()}", "")
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            store.wait_at_barrier(f"multimesh/{name}", int(1000 * seconds))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for this one
            failed.append(error)

    waiting = threading.Thread(target=wait, name="multimesh-barrier", daemon=True)
    waiting.start()
    begun, told = time.monotonic(), False
    while waiting.is_alive():
        waiting.join(SLICE)
        if jax.process_index() == 0 and not told and time.monotonic() - begun > NOTICE:
            told = True
            there = {int(key.rpartition("/")[2]) for key, _ in store.key_value_dir_get(here)}
            say_missing(name, [rank for rank in range(jax.process_count()) if rank not in there])
    if failed:
        raise failed[0]
    if jax.process_index() == 0:
        store.key_value_delete(here)


def say_missing(name: str, missing: Sequence[int]) -> None:
    """Say for which processes this one waits."""
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        who = f"process {shown} of {jax.process_count()}"
        text = f"multimesh: {name}: {who} has not come here for {NOTICE:.0f} s; is it compiling?"
        print(text, file=sys.stderr, flush=True)


def agree_on(name: str, lines: Iterable[str], timeout: float | None = None) -> None:
    """Compare lines with all other processes; use each ``name`` once.

    Raises
    ------
    UsageError
        In every process, if the lines are not the same: names the process that differs, and its first other line.
    LostProcessError
        If a process has not come here in time.
    """
    me, count, timeout = jax.process_index(), jax.process_count(), patience(timeout)
    lines = list(lines)
    text = "\n".join(lines).encode()
    key = functools.partial("multimesh/agree/{}/{}".format, name)
    put(key(me), sha256(text).digest())
    if me == 0:
        said = [get(key(rank), name, rank, timeout) for rank in range(count)]
        usual = max(said, key=said.count)  # if two are as frequent, the first
        odd = [rank for rank in range(count) if said[rank] != usual]
        put(key("verdict"), f"{said.index(usual)} {' '.join(map(str, odd))}".encode())
    usually, *odd = map(int, get(key("verdict"), name, 0, timeout + 10).split())
    if not odd:
        return
    if me == usually:
        put(key("text"), zlib.compress(text))
    if me == odd[0]:
        theirs = zlib.decompress(get(key("text"), name, usually, timeout)).decode().split("\n")
        odd_ones = f"process {', '.join(map(str, odd))} of {count}"
        put(key("message"), f"{odd_ones} differs from process {usually}, {_parting(lines, theirs)}".encode())
    message = get(key("message"), name, odd[0], timeout).decode()
    raise UsageError(f"{name}: {message}; start all processes with the same code, data and flags")


def _parting(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Where the lines of a process first differ from the usual ones."""
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing more")
    where, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    from_ = max(0, same - 60)
    a, b = (f"{'...' * (from_ > 0)}{line[from_ : from_ + 160]}" for line in (a, b))
    return f"first in line {where + 1}, which is {a!r} in place of {b!r}"


def agree_on_plan(name: str, lines: Iterable[str]) -> int:
    """Compare a plan's fingerprint with all other processes. Returns the number of the plan, alike in all."""
    number = next(_plans)
    agree_on(f"plan {number} ({name})", lines)
    return number


def exchanged(name: str, mine: bytes, timeout: float | None = None) -> list[bytes]:
    """Send bytes to all processes, and return those of every process; use each ``name`` once."""
    key = f"exchanged/{name}"
    put(f"multimesh/{key}/{jax.process_index()}", zlib.compress(mine))
    said = (get(f"multimesh/{key}/{rank}", name, rank, timeout) for rank in range(jax.process_count()))
    every = [zlib.decompress(text) for text in said]
    forget(key, timeout)
    return every


def forget(name: str, timeout: float | None = None) -> None:
    """Wait until every process has read the values under ``multimesh/name/``, then delete them."""
    barrier(f"{name}/read", timeout)
    if jax.process_index() == 0:
        _compat.key_value_store().key_value_delete(f"multimesh/{name}/")


def first_says(name: str, value: T, timeout: float | None = None) -> T:
    """What process 0 gives as ``value``, something that JSON holds, in every process; use each ``name`` once."""
    if not several():
        return value
    key = f"multimesh/says/{name}"
    if jax.process_index() == 0:
        put(key, json.dumps(value).encode())
        _read_next.append(key)
        return value
    said: T = json.loads(get(key, name, 0, timeout))
    return said


def first_hears(name: str, mine: bytes, timeout: float | None = None) -> list[bytes]:
    """At process 0, what each process gives; nothing at others. Use each ``name`` once."""
    if not several():
        return [mine]
    key, store = functools.partial("multimesh/hears/{}/{}".format, name), _compat.key_value_store()
    if jax.process_index():
        put(key(jax.process_index()), zlib.compress(mine))
        return []
    others = [get(key(rank), name, rank, timeout) for rank in range(1, jax.process_count())]
    for rank in range(1, jax.process_count()):
        store.key_value_delete(key(rank))
    while _read_next:  # who comes here has read what process 0 said before
        store.key_value_delete(_read_next.pop())
    return [mine, *map(zlib.decompress, others)]


def settle(name: str, error: MultiMeshError | None, timeout: float | None = None) -> None:
    """Wait for all processes. If one has an error, all raise it, with that process's name. Use each ``name`` once."""
    if several():
        own = error and [type(error).__name__, str(error), socket.gethostname()]
        said = [json.loads(each) for each in first_hears(f"{name}/errors", json.dumps(own).encode(), timeout)]
        error = _first_of(first_says(f"{name}/verdict", _verdict(said), patience(timeout) + 10))
    if error:
        raise error


def _verdict(said: Sequence[Any]) -> list[str]:
    """The kind and the text of the first of several processes' errors; nothing if there is none."""
    wrong = [(rank, each) for rank, each in enumerate(said) if each]
    if not wrong:
        return []
    rank, (kind, text, host) = wrong[0]
    whose = "" if said.count(said[rank]) == len(said) else f"process {rank} of {len(said)} ({host}): "
    return [kind, f"{whose}{text}"]


def _first_of(verdict: Sequence[str]) -> MultiMeshError | None:
    kinds = {kind.__name__: kind for kind in (UsageError, DamagedError)}
    return kinds.get(verdict[0], MultiMeshError)(verdict[1]) if verdict else None


def put(key: str, value: bytes) -> None:
    """Leave a value for all processes; use each ``key`` once."""
    _compat.key_value_store().key_value_set_bytes(key, value)


def get(key: str, what: str, rank: int, timeout: float | None = None) -> bytes:
    """Wait for the value that process ``rank`` leaves under ``key``, and return it."""
    store, seconds, begun = _compat.key_value_store(), patience(timeout), time.monotonic()
    told = jax.process_index() != 0
    while True:
        waited = time.monotonic() - begun
        if waited > NOTICE and not told:
            told = True
            say_missing(what, [rank])
        try:
            left = min(max(seconds - waited, 0.001), SLICE)  # not all at once, so that Ctrl-C works
            found: bytes = store.blocking_key_value_get_bytes(key, int(1000 * left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() - begun > seconds:
                raise LostProcessError(
                    f"{what}: process {rank} of {jax.process_count()} has not come here within {seconds:.0f} s; do all "
                    f"processes call the same functions in the same order? A longer compile_timeout "
                    f"({timeouts.variable('compile')}) waits longer"
                ) from None
        else:
            return found
