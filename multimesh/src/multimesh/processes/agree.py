"""How processes wait and agree: each leaves a value in JAX's store, process 0 decides, and all read the decision.

Process 0 deletes what it has left when it hears from all again: by then they have read it.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar, cast

import jax

from multimesh import errors
from multimesh.core import _compat
from multimesh.errors import LostProcessError, MultiMeshError, UsageError

T = TypeVar("T")

TIMEOUTS = {
    "start": 60.0,  # in which all processes must have started and met
    "silence": 8.0,  # without a heartbeat of JAX: a process is stopped, or its machine or the network is down
    "compile": 3600.0,  # that processes wait for each other elsewhere: until others have compiled, saved, gathered
    "transfer": 300.0,  # in which the first transfer of two processes must have arrived, once both have come to it
    "stall": 0.0,  # after which a process that makes no progress ends the job; 0: never, it is told only
}
"""Seconds that processes wait for each other, as an argument says, else a variable, else as here."""

NOTICE = 60.0
"""Seconds after which process 0 says for whom it waits."""

PROGRESS = "multimesh/at/"
"""Before the number of a process: the key of its progress."""

DONE = b" done"
"""At the end of the progress of a process that has ended well."""

_timeouts: dict[str, float] = {}  # of this job
_plans = itertools.count(1)
_here = threading.local()  # at process 0: `read`, the key that all have read when they come to this thread again
_LATER = 10.0  # seconds that the others wait longer than process 0, which then says who has not come


def timeout_variable(name: str) -> str:
    """Return the environment variable that sets a timeout."""
    return f"MULTIMESH_{name.upper()}_TIMEOUT"


def choose_timeouts(arguments: Mapping[str, float | None]) -> None:
    """Choose the timeouts of this job; leave out a name, or give None, for what is not given.

    Raises ``UsageError`` if one is no positive number; ``stall`` may be 0.
    """
    for name, default in TIMEOUTS.items():
        value = arguments.get(name)
        text = (os.environ.get(timeout_variable(name)) or default) if value is None else value
        try:
            number = float(text)
        except (TypeError, ValueError):
            number = math.nan
        if not (0 < number < math.inf or (name == "stall" and number == 0)):
            source = f"{timeout_variable(name)}={text}" if value is None else f"{name}_timeout={value!r}"
            raise UsageError(f"{source}: give a positive number of seconds")
        _timeouts[name] = number


def seconds_of(name: str) -> float:
    """Return a timeout of this job; where MultiMesh has not started it, that of the environment."""
    if not _timeouts:
        choose_timeouts({})
    return _timeouts[name]


def several() -> bool:
    """Return whether this is one of several processes."""
    return _compat.process_count() > 1


def put(key: str, value: bytes) -> None:
    """Leave a value for all processes; use each ``key`` once: JAX refuses a second value."""
    _compat.key_value_store().key_value_set_bytes(key, value)


def look(key: str) -> bytes:
    """Return the value under a key; b"" if there is none."""
    try:
        return bytes(_compat.key_value_store().key_value_try_get_bytes(key))
    except jax.errors.JaxRuntimeError:
        return b""


def forget(folder: str) -> None:
    """Let process 0 delete a value, or all values of a folder."""
    if _compat.process_index() == 0:
        _compat.key_value_store().key_value_delete(folder)


def wait_for(keys: Mapping[int, str], label: str, timeout: float | None = None) -> list[bytes]:
    """Wait for the values that processes, by their numbers, leave under keys of one folder, and return them.

    Ctrl-C ends the wait. After a minute process 0 says who has not come.

    Raises ``LostProcessError``, which begins with ``label``, if one does not come in time, or has ended without.
    """
    count, store = _compat.process_count(), _compat.key_value_store()
    start, silent = time.monotonic(), _compat.process_index() != 0
    limit = seconds_of("compile") if timeout is None else timeout
    longest = min(5.0, max(1.0, count / 1000))  # seconds in which Ctrl-C may have to wait
    values: dict[int, bytes] = {}
    while missing := [rank for rank in keys if rank not in values]:
        first, waited = missing[0], time.monotonic() - start
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        who = f"{label}: process {', '.join(map(str, missing[:8]))}{more} of {count} has not come here"
        if waited > limit:
            raise LostProcessError(
                f"{who} within {limit:.0f} s; do all processes call the same functions in the same order? "
                f"A longer compile_timeout ({timeout_variable('compile')}) waits longer"
            )
        if waited > NOTICE and not silent:
            silent = True
            print(f"multimesh: {who} for {NOTICE:.0f} s; is it compiling?", file=sys.stderr, flush=True)
        has_ended = look(f"{PROGRESS}{first}").endswith(DONE)
        slice_ = min(max(limit - waited, 0.001), longest)
        try:
            values[first] = store.blocking_key_value_get_bytes(keys[first], int(1000 * slice_))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if has_ended:
                raise LostProcessError(
                    f"{label}: process {first} of {count} has ended and does not come here; do all processes call "
                    "the same functions, as often as each other?"
                ) from None
        if len(missing) > 1:  # one question for all that have come
            every = dict(store.key_value_dir_get_bytes(os.path.dirname(keys[first])))
            values |= {rank: every[keys[rank]] for rank in missing if keys[rank] in every}
    return [values[rank] for rank in keys]


def decide_together(
    name: str,
    data: bytes,
    decide: Callable[[Sequence[bytes]], bytes] = lambda _: b"",
    timeout: float | None = None,
    kind: str = "values",
) -> bytes:
    """Let process 0 reduce the bytes of all processes, and return its result everywhere.

    Use each ``name`` once for each ``kind``. All wait for all, and Ctrl-C ends the wait. After a minute process 0 says
    who has not come.

    Raises ``LostProcessError`` in every process, if one has not come here in time; names all that have not.
    """
    if not several():
        return decide([data])
    folder, decision = f"multimesh/{kind}/{name}", f"multimesh/decided/{kind}/{name}"
    if rank := _compat.process_index():
        put(f"{folder}/{rank}", data)
        limit = seconds_of("compile") if timeout is None else timeout
        (verdict,) = wait_for({0: decision}, name, limit + _LATER)
        if verdict[:1] == b"-":
            raise LostProcessError(verdict[1:].decode())
        return verdict[1:]
    keys = {other: f"{folder}/{other}" for other in range(1, _compat.process_count())}
    try:
        values = wait_for(keys, name, timeout)
    except LostProcessError as error:
        put(decision, f"-{error}".encode())
        raise
    result = decide([data, *values])
    forget(folder)
    forget(getattr(_here, "read", decision))
    _here.read = decision
    put(decision, b"+" + result)
    return result


def barrier(name: str, timeout: float | None = None) -> None:
    """Wait until every process is here; use each ``name`` once. Ctrl-C ends the wait.

    After a minute process 0 says who has not come.
    """
    decide_together(name, b"", timeout=timeout, kind="barrier")


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
    digest = sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")

    def list_odd(digests: Sequence[bytes]) -> bytes:
        """The first process with the usual digest, and all that have another one."""
        mode = max(digests, key=digests.count) if len(set(digests)) > 1 else digests[0]  # of two as frequent the first
        return json.dumps([digests.index(mode), *(rank for rank, x in enumerate(digests) if x != mode)]).encode()

    mode, *odd = json.loads(decide_together(name, digest.digest(), list_odd, timeout, "agree"))
    if not odd:
        return

    def part(every: Sequence[bytes]) -> bytes:
        """Where the lines of a process first differ from the usual ones."""
        pairs = itertools.zip_longest(unpack(every[odd[0]]), unpack(every[mode]), fillvalue="nothing more")
        where, pair = next((i, (a, b)) for i, (a, b) in enumerate(pairs, 1) if a != b)
        first = next((n for n, (x, y) in enumerate(zip(*pair, strict=False)) if x != y), min(map(len, pair)))
        start = max(0, first - 60)
        a, b = (f"{'...' * (start > 0)}{line[start : start + 160]}" for line in pair)
        return f"first in line {where}, which is {a!r} in place of {b!r}".encode()

    data = pack([*lines]) if _compat.process_index() in (mode, odd[0]) else b""
    differs = decide_together(name, data, part, timeout, "lines").decode()
    who = f"process {', '.join(map(str, odd))} of {_compat.process_count()} differs from process {mode}"
    raise UsageError(f"{name}: {who}, {differs}; start all processes with the same code, data and flags")


def agree_on_plan(name: str, lines: Iterable[str]) -> int:
    """Compare a plan's fingerprint with all other processes. Returns the number of the plan, alike in all."""
    number = next(_plans)
    agree_on(f"plan {number} ({name})", lines)
    return number


def pack(value: Any) -> bytes:
    """Return data that JSON can hold as compressed bytes."""
    return zlib.compress(json.dumps(value).encode(), 1)


def unpack(value: bytes) -> Any:
    """Undo `pack`."""
    return json.loads(zlib.decompress(value))


def first_says(name: str, value: T, timeout: float | None = None) -> T:
    """Broadcast process 0's ``value``, which JSON can hold, to every process. Use each ``name`` once."""
    answer = decide_together(name, pack(value), operator.itemgetter(0), timeout, "says")
    return cast("T", unpack(answer)) if several() else value


def run_in_all(
    name: str,
    part: Callable[[], T],
    then: Callable[[Sequence[T]], Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Run a part in every process; raise an error of one in all of them, with its name. Use each ``name`` once.

    All wait for all. Then process 0 calls ``then`` with the result of each, and all return its result, or raise its
    error; JSON must hold both. Without it each returns what its part returned.
    """
    error, value = None, None
    try:
        value = part()
    except MultiMeshError as fault:
        if not several():
            raise
        error = [type(fault).__name__, str(fault), socket.gethostname()]
    if not several():
        return then([cast("T", value)]) if then else value

    def decide(every: Sequence[bytes]) -> bytes:
        failures, values = zip(*map(unpack, every), strict=True)
        for rank, failure in enumerate(failures):
            if failure:
                kind, text, host = failure
                of_one = failures.count(failure) < len(failures)
                return pack([kind, f"process {rank} of {len(failures)} ({host}): {text}" if of_one else text])
        try:
            return pack([None, then(values) if then else None])
        except MultiMeshError as fault:
            return pack([type(fault).__name__, str(fault)])

    kind, result = unpack(decide_together(name, pack([error, value if then else None]), decide, timeout, "errors"))
    if kind:
        raise getattr(errors, kind, MultiMeshError)(result)
    return result if then else value
