"""How processes leave each other values, in JAX's key-value store."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import jax

from multimesh.core import _compat
from multimesh.errors import LostProcessError
from multimesh.processes import timeouts

NOTICE = 60.0
"""Seconds after which process 0 says for whom it waits."""

AT = "multimesh/at/"
"""Before the number of a process: the key of its progress."""

DONE = " done"
"""At the end of the progress of a process that has ended well."""


def put(key: str, value: bytes) -> None:
    """Leave a value for all processes; use each ``key`` once: JAX refuses a second value."""
    _compat.key_value_store().key_value_set_bytes(key, value)


def look(key: str) -> bytes | None:
    """Return the value under a key; None if there is none."""
    try:
        value: bytes = _compat.key_value_store().key_value_try_get_bytes(key)
    except jax.errors.JaxRuntimeError:
        return None
    return value


def forget(folder: str) -> None:
    """Let process 0 delete all values whose keys begin with ``folder``."""
    if _compat.process_index() == 0:
        _compat.key_value_store().key_value_delete(folder)


def get(key: str, label: str, rank: int, timeout: float | None = None) -> bytes:
    """Wait for the value that process ``rank`` leaves under ``key``, and return it.

    Raises ``LostProcessError``, which begins with ``label``, if it does not come in time.
    """
    wait = _Wait(label, timeout)
    while (value := wait.within_slice(key, [rank])) is None:
        pass
    return value


def collect(folder: str, data: bytes, label: str, timeout: float | None = None) -> list[bytes]:
    """Wait at process 0 for the value of each other process, under ``folder`` and its number; return all by rank.

    ``data`` is that of process 0. All are then deleted. Raises ``LostProcessError``, which names all that have not come
    in time.
    """
    wait, values = _Wait(label, timeout), {0: data}
    while missing := [rank for rank in range(_compat.process_count()) if rank not in values]:
        wait.within_slice(f"{folder}{missing[0]}", missing)  # then all are read again
        every = _compat.key_value_store().key_value_dir_get_bytes(folder)
        values |= {int(key[len(folder) :]): value for key, value in every}
    forget(folder)
    return [values[rank] for rank in sorted(values)]


def is_done(progress: bytes) -> bool:
    """Return whether a value of progress is the last one of a process."""
    return progress.endswith(DONE.encode())


class _Wait:
    """A wait for other processes."""

    def __init__(self, label: str, timeout: float | None) -> None:
        self._label, self._begun = label, time.monotonic()
        self._seconds = timeouts.current().compile if timeout is None else timeout
        self._noticed = _compat.process_index() != 0
        self._longest = min(5.0, max(1.0, _compat.process_count() / 1000))  # seconds in which Ctrl-C may have to wait

    def within_slice(self, key: str, missing: Sequence[int]) -> bytes | None:
        """Wait some seconds for the value of the first of these processes. After a minute process 0 names all.

        Raises ``LostProcessError`` if the time is over, or the first has ended without it.
        """
        waited = time.monotonic() - self._begun
        if waited > self._seconds:
            raise LostProcessError(
                f"{self._name(missing)} has not come here within {self._seconds:.0f} s; do all processes call the same "
                f"functions in the same order? A longer compile_timeout ({timeouts.variable('compile')}) waits longer"
            )
        if waited > NOTICE and not self._noticed:
            self._noticed = True
            text = f"{self._name(missing)} has not come here for {NOTICE:.0f} s; is it compiling?"
            print(f"multimesh: {text}", file=sys.stderr, flush=True)
        has_ended = is_done(look(f"{AT}{missing[0]}") or b"")
        seconds = min(max(self._seconds - waited, 0.001), self._longest)
        try:
            value: bytes = _compat.key_value_store().blocking_key_value_get_bytes(key, int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if has_ended:
                raise LostProcessError(
                    f"{self._name(missing[:1])} has ended and does not come here; do all processes call the same "
                    "functions, as often as each other?"
                ) from None
            return None
        return value

    def _name(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"{self._label}: process {', '.join(map(str, ranks[:8]))}{more} of {_compat.process_count()}"
