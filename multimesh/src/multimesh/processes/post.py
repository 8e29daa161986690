"""How processes leave each other values, in JAX's key-value store.

Process 0 deletes what it has read in the store, and what it has left there when it hears from all again: by then they
have read it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import jax

from multimesh.core import _compat
from multimesh.errors import LostProcessError
from multimesh.processes import timeouts

NOTICE = 60.0
"""Seconds after which process 0 says for whom it waits."""

_here = threading.local()  # at process 0: `read`, the keys that all have read when they come to this thread again


def patience(timeout: float | None = None) -> float:
    """Return the seconds to wait for others: those given, else those set for the job."""
    return timeouts.current().compile if timeout is None else timeout


def to_first(name: str, value: bytes) -> None:
    """Leave a value for process 0; use each ``name`` once."""
    put(f"{_broadcast_key(name)}{_compat.process_index()}", value)


def from_all(name: str, mine: bytes, timeout: float | None = None) -> list[bytes]:
    """At process 0, wait for what all others leave `to_first`. Returns it by rank, with ``mine`` as that of process 0.

    Raises ``LostProcessError`` if one has not come here in time; names all that have not.
    """
    folder, count, wait, found = _broadcast_key(name), _compat.process_count(), _Wait(name, timeout), {0: mine}
    while missing := [rank for rank in range(count) if rank not in found]:
        _within(f"{folder}{missing[len(missing) // 2]}", wait.slice(missing))  # then all are read again
        every = _compat.key_value_store().key_value_dir_get_bytes(folder)
        found |= {int(key[len(folder) :]): value for key, value in every}
    for key in [folder, *getattr(_here, "read", ())]:
        forget(key)
    _here.read = []
    return [found[rank] for rank in range(count)]


def to_all(name: str, value: bytes) -> None:
    """At process 0, leave a value for all others; use each ``name`` once."""
    put(_said(name), value)
    _here.read = [*getattr(_here, "read", ()), _said(name)]


def from_first(name: str, timeout: float | None = None) -> bytes:
    """Wait for what process 0 leaves `to_all`, and return it."""
    return get(_said(name), name, 0, timeout)


def _broadcast_key(name: str) -> str:
    return f"multimesh/given/{name}/"


def _said(name: str) -> str:
    return f"multimesh/said/{name}"


def put(key: str, value: bytes) -> None:
    """Leave a value for all processes; use each ``key`` once."""
    _compat.key_value_store().key_value_set_bytes(key, value)


def put_first(key: str, value: bytes) -> bool:
    """Leave a value unless another process has left one under this ``key``; returns whether this one has."""
    try:
        put(key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def forget(folder: str) -> None:
    """Let process 0 delete all values whose keys begin with ``folder``."""
    if _compat.process_index() == 0:
        _compat.key_value_store().key_value_delete(folder)


def get(key: str, what: str, rank: int, timeout: float | None = None) -> bytes:
    """Wait for the value that process ``rank`` leaves under ``key``, and return it."""
    wait = _Wait(what, timeout)
    while (found := _within(key, wait.slice([rank]))) is None:
        pass
    return found


def _within(key: str, seconds: float) -> bytes | None:
    """The value under this key; None if it is not there in this time."""
    try:
        found: bytes = _compat.key_value_store().blocking_key_value_get_bytes(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None
    return found


class _Wait:
    """A wait for other processes."""

    def __init__(self, what: str, timeout: float | None) -> None:
        self._what, self._seconds, self._begun = what.rpartition("/")[0] or what, patience(timeout), time.monotonic()
        self._told = _compat.process_index() != 0
        self._longest = min(5.0, max(1.0, _compat.process_count() / 1000))  # seconds in which Ctrl-C may have to wait

    def slice(self, missing: Sequence[int]) -> float:
        """Return the seconds to wait now. After a minute process 0 names those who are ``missing``.

        Raises ``LostProcessError`` if the time is over.
        """
        waited = time.monotonic() - self._begun
        many = len(missing) - 8
        shown = ", ".join(map(str, missing[:8])) + (f" and {many} more" if many > 0 else "")
        what = self._what.rpartition("/")[0] or self._what
        who = f"{what}: process {shown} of {_compat.process_count()} has not come here"
        if waited > self._seconds:
            raise LostProcessError(
                f"{who} within {self._seconds:.0f} s; do all processes call the same functions in the same order? "
                f"A longer compile_timeout ({timeouts.variable('compile')}) waits longer"
            )
        if waited > NOTICE and not self._told:
            self._told = True
            print(f"multimesh: {who} for {NOTICE:.0f} s; is it compiling?", file=sys.stderr, flush=True)
        return min(max(self._seconds - waited, 0.001), self._longest)
