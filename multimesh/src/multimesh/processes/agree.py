"""How processes agree, by JAX's key-value store: each gives something, process 0 decides, and all learn the decision.

That is one value that each process leaves and one that it reads. Process 0 reads all at once. It deletes what it has
read, and its decision when it hears from all again: by then they have read it.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import jax

from multimesh.core import _compat
from multimesh.errors import DamagedError, LostProcessError, MultiMeshError, NoRecordError, UsageError
from multimesh.processes import timeouts

NOTICE = 60.0
"""Seconds after which process 0 says for whom it waits."""

T = TypeVar("T")

_plans = itertools.count(1)
_here = threading.local()  # at process 0: `read`, the keys that all have read when they come to this thread again


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.process_count() > 1


def patience(timeout: float | None = None) -> float:
    """Seconds to wait for others: those given, else those set for the job."""
    return timeouts.current().compile if timeout is None else timeout


def decided(
    name: str, mine: bytes, decide: Callable[[Sequence[bytes]], bytes] = lambda _: b"", timeout: float | None = None
) -> bytes:
    """What process 0 makes of what all give; use each ``name`` once. All wait for all, and Ctrl-C ends the wait.

    After a minute process 0 says who has not come.

    Raises
    ------
    LostProcessError
        In every process, if one has not come here in time; names all that have not.
    """
    if not several():
        return decide([mine])
    if jax.process_index():
        first_hears(name, mine)
        said = get(f"multimesh/{name}/decided", name, 0, patience(timeout) + 10)
        if said[:1] == b"-":
            raise LostProcessError(said[1:].decode())
        return said[1:]
    try:
        said = decide(first_hears(name, mine, timeout))
    except LostProcessError as error:
        _say(f"multimesh/{name}/decided", f"-{error}".encode())
        raise
    _say(f"multimesh/{name}/decided", b"+" + said)
    return said


def barrier(name: str, timeout: float | None = None) -> None:
    """Wait until every process is here; use each ``name`` once. Ctrl-C ends the wait.

    After a minute process 0 says who has not come.
    """
    decided(f"{name}/barrier", b"", timeout=timeout)


def agree_on(name: str, lines: Iterable[str], timeout: float | None = None) -> None:
    """Compare lines with all other processes; use each ``name`` once.

    Raises
    ------
    UsageError
        In every process, if the lines are not the same: names the process that differs, and its first other line.
    LostProcessError
        If a process has not come here in time.
    """
    lines = [*lines] if iter(lines) is lines else lines  # what can be read again is not kept
    verdict = decided(f"{name}/agree", _digest(lines), _odd, timeout)
    usually, *odd = map(int, verdict.split())
    if not odd:
        return
    me, key = jax.process_index(), f"multimesh/lines/{name}"
    if me == usually:
        put(key, packed([*lines]))
    differs = b""
    if me == odd[0]:
        differs = _parting([*lines], unpacked(get(key, name, usually, timeout))).encode()
    differs = decided(f"{name}/parting", differs, lambda every: every[odd[0]], timeout)
    forget(key)
    who = f"process {', '.join(map(str, odd))} of {jax.process_count()} differs from process {usually}"
    raise UsageError(f"{name}: {who}, {differs.decode()}; start all processes with the same code, data and flags")


def _digest(lines: Iterable[str]) -> bytes:
    found = sha256()
    for line in lines:
        found.update(line.encode() + b"\n")
    return found.digest()


def _odd(digests: Sequence[bytes]) -> bytes:
    """The first process with the usual digest, and all that have another one."""
    usual = max(digests, key=digests.count) if len(set(digests)) > 1 else digests[0]  # of two as frequent the first
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    return " ".join(map(str, [digests.index(usual), *odd])).encode()


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


def packed(value: Any) -> bytes:
    """Something that JSON holds, in few bytes."""
    return zlib.compress(json.dumps(value).encode(), 1)


def unpacked(value: bytes) -> Any:
    """What was `packed`."""
    return json.loads(zlib.decompress(value))


def first_says(name: str, value: T, timeout: float | None = None) -> T:
    """What process 0 gives as ``value``, something that JSON holds, in every process; use each ``name`` once."""
    if not several():
        return value
    key = f"multimesh/says/{name}"
    if jax.process_index() == 0:
        _say(key, json.dumps(value).encode())
        return value
    said: T = json.loads(get(key, name, 0, timeout))
    return said


def first_does(name: str, what: Callable[[], T], timeout: float | None = None) -> T:
    """Let process 0 do something; all return its result, which JSON holds, or raise its error. Use a ``name`` once."""
    verdict: list[str] = []
    result: Any = None
    if jax.process_index() == 0:
        try:
            result = what()
        except MultiMeshError as wrong:
            if not several():
                raise
            verdict = _told(wrong)
    verdict, result = first_says(name, [verdict, result], timeout)
    _raise(verdict)
    return result


def _say(key: str, value: bytes) -> None:
    put(key, value)
    if not hasattr(_here, "read"):
        _here.read = []
    _here.read.append(key)


def first_hears(name: str, mine: bytes, timeout: float | None = None) -> list[bytes]:
    """At process 0, what each process gives; nothing at others. Use each ``name`` once."""
    if not several():
        return [mine]
    folder, me = f"multimesh/hears/{name}/", jax.process_index()
    put(f"{folder}{me}", mine)
    if me:
        return []
    store, count = _compat.key_value_store(), jax.process_count()
    wait = _Wait(name, timeout)
    while True:
        found = {int(key[len(folder) :]): value for key, value in store.key_value_dir_get_bytes(folder)}
        missing = [rank for rank in range(count) if rank not in found]
        if not missing:
            break
        wait.once(f"{folder}{missing[len(missing) // 2]}", missing)  # then all are read again
    store.key_value_delete(folder)
    for key in getattr(_here, "read", ()):
        store.key_value_delete(key)
    _here.read = []
    return [found[rank] for rank in range(count)]


def settle(
    name: str,
    error: MultiMeshError | None,
    mine: Any = None,
    then: Callable[[Sequence[Any]], Any] = lambda _: None,
    timeout: float | None = None,
) -> Any:
    """Wait for all processes; use each ``name`` once. If one has an error, all raise it, with that process's name.

    Otherwise process 0 does ``then`` with what each gave as ``mine``; all return its result, or raise its error. JSON
    must hold both.
    """
    own = packed([_told(error, socket.gethostname()), mine])

    def decide(every: Sequence[bytes]) -> bytes:
        said = [unpacked(each) for each in every]
        verdict, result = _verdict([wrong for wrong, _ in said]), None
        if not verdict:
            try:
                result = then([given for _, given in said])
            except MultiMeshError as wrong:
                verdict = _told(wrong)
        return json.dumps([verdict, result]).encode()

    if not several():
        if error:
            raise error
        return then([mine])
    verdict, result = json.loads(decided(f"{name}/errors", own, decide, timeout))
    _raise(verdict)
    return result


def _raise(verdict: Sequence[str]) -> None:
    """Raise the error that `_told` tells, if there is one."""
    kinds = {kind.__name__: kind for kind in (UsageError, DamagedError, NoRecordError)}
    if verdict:
        raise kinds.get(verdict[0], MultiMeshError)(verdict[1])


def _told(error: MultiMeshError | None, *host: str) -> list[str]:
    """The kind and the text of an error, and where it is; nothing if there is none."""
    return [] if error is None else [type(error).__name__, str(error), *host]


def _verdict(said: Sequence[Any]) -> list[str]:
    """The kind and the text of the first of several processes' errors; nothing if there is none."""
    wrong = [(rank, each) for rank, each in enumerate(said) if each]
    if not wrong:
        return []
    rank, (kind, text, host) = wrong[0]
    whose = "" if said.count(said[rank]) == len(said) else f"process {rank} of {len(said)} ({host}): "
    return [kind, f"{whose}{text}"]


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
    if jax.process_index() == 0:
        _compat.key_value_store().key_value_delete(folder)


def get(key: str, what: str, rank: int, timeout: float | None = None) -> bytes:
    """Wait for the value that process ``rank`` leaves under ``key``, and return it."""
    wait = _Wait(what, timeout)
    while (found := wait.once(key, [rank])) is None:
        pass
    return found


class _Wait:
    """A wait for other processes."""

    def __init__(self, what: str, timeout: float | None) -> None:
        self._what, self._seconds, self._begun = what.rpartition("/")[0] or what, patience(timeout), time.monotonic()
        self._told = jax.process_index() != 0
        self._slice = min(5.0, max(1.0, jax.process_count() / 1000))  # seconds in which Ctrl-C has to wait

    def once(self, key: str, missing: Sequence[int]) -> bytes | None:
        """Wait for a value for a short time; None if it is not there then. ``missing``: who has not come here.

        Raises
        ------
        LostProcessError
            If the time is over.
        """
        waited = time.monotonic() - self._begun
        many = len(missing) - 8
        shown = ", ".join(map(str, missing[:8])) + (f" and {many} more" if many > 0 else "")
        who = (
            f"{self._what.rpartition('/')[0] or self._what}: process {shown} of {jax.process_count()} has not come here"
        )
        if waited > NOTICE and not self._told:
            self._told = True
            print(f"multimesh: {who} for {NOTICE:.0f} s; is it compiling?", file=sys.stderr, flush=True)
        try:
            seconds = min(max(self._seconds - waited, 0.001), self._slice)
            found: bytes = _compat.key_value_store().blocking_key_value_get_bytes(key, int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() - self._begun > self._seconds:
                raise LostProcessError(
                    f"{who} within {self._seconds:.0f} s; do all processes call the same functions in the same order? "
                    f"A longer compile_timeout ({timeouts.variable('compile')}) waits longer"
                ) from None
            return None
        return found
