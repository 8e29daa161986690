"""How processes agree, by JAX's key-value store: barriers, compared lines, exchanged bytes."""

from __future__ import annotations

import functools
import itertools
import json
import time
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256

import jax

from multimesh.core import _compat
from multimesh.errors import LostProcessError, MultiMeshError, UsageError

WAIT = 600.0
"""Seconds that a process waits until the others come to the same place."""


_plans = itertools.count(1)


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.process_count() > 1


def barrier(name: str, timeout: float = WAIT) -> None:
    """Wait until every process is here; use each ``name`` once."""
    _compat.key_value_store().wait_at_barrier(f"multimesh/{name}", int(1000 * timeout))


def agree_on(name: str, lines: Iterable[str], timeout: float = WAIT) -> None:
    """Compare lines with all other processes; use each ``name`` once.

    Raises
    ------
    UsageError
        In every process, if the lines are not the same: names the process that differs, and its first other line.
    LostProcessError
        If a process has not come here in time.
    """
    me, count = jax.process_index(), jax.process_count()
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


def exchanged(name: str, mine: bytes, timeout: float = WAIT) -> list[bytes]:
    """Send bytes to all processes, and return those of every process; use each ``name`` once."""
    key = f"exchanged/{name}"
    put(f"multimesh/{key}/{jax.process_index()}", zlib.compress(mine))
    said = (get(f"multimesh/{key}/{rank}", name, rank, timeout) for rank in range(jax.process_count()))
    every = [zlib.decompress(text) for text in said]
    forget(key, timeout)
    return every


def forget(name: str, timeout: float = WAIT) -> None:
    """Wait until every process has read the values under ``multimesh/name/``, then delete them."""
    barrier(f"{name}/read", timeout)
    if jax.process_index() == 0:
        _compat.key_value_store().key_value_delete(f"multimesh/{name}/")


def settle(name: str, error: MultiMeshError | None, timeout: float = WAIT) -> None:
    """Wait for all processes. If one has an error, all raise it. Use each ``name`` once."""
    if several():
        me, count = jax.process_index(), jax.process_count()
        key = functools.partial("multimesh/settle/{}/{}".format, name)
        put(key(me), json.dumps(error and [type(error).__name__, str(error)]).encode())
        if me == 0:
            said = [json.loads(get(key(rank), name, rank, timeout)) for rank in range(count)]
            put(key("verdict"), json.dumps(next(filter(None, said), None)).encode())
        wrong = json.loads(get(key("verdict"), name, 0, timeout + 10))
        error = wrong and (UsageError if wrong[0] == "UsageError" else MultiMeshError)(wrong[1])
    if error:
        raise error


def put(key: str, value: bytes) -> None:
    """Leave a value for all processes; use each ``key`` once."""
    _compat.key_value_store().key_value_set_bytes(key, value)


def get(key: str, what: str, rank: int, timeout: float) -> bytes:
    """Wait for the value that process ``rank`` leaves under ``key``, and return it."""
    store, deadline = _compat.key_value_store(), time.monotonic() + timeout
    while True:
        left = min(max(deadline - time.monotonic(), 0.001), 5)  # not all at once, so that Ctrl-C works
        try:
            found: bytes = store.blocking_key_value_get_bytes(key, int(1000 * left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise LostProcessError(
                    f"{what}: process {rank} of {jax.process_count()} has not come here within {timeout:.0f} s; do all "
                    "processes call the same functions in the same order?"
                ) from None
        else:
            return found
