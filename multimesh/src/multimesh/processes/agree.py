"""How processes agree: each gives something, process 0 decides, and all learn the decision.

That is one value that each process leaves for process 0, and one that it reads. Process 0 deletes what it has left when
it hears from all again: by then they have read it.
"""

from __future__ import annotations

import itertools
import json
import operator
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeVar, cast

from multimesh.core import _compat
from multimesh.errors import DamagedError, LostProcessError, MultiMeshError, NoRecordError, UsageError
from multimesh.processes import post, timeouts

T = TypeVar("T")

_plans = itertools.count(1)
_here = threading.local()  # at process 0: `read`, the key that all have read when they come to this thread again
_LATER = 10.0  # seconds that the others wait longer than process 0, which then says who has not come


def several() -> bool:
    """Return whether this is one of several processes."""
    return _compat.process_count() > 1


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
    folder, decision = f"multimesh/{kind}/{name}/", f"multimesh/decided/{kind}/{name}"
    if rank := _compat.process_index():
        post.put(f"{folder}{rank}", data)
        seconds = timeouts.current().compile if timeout is None else timeout
        verdict = post.get(decision, name, 0, seconds + _LATER)
        if verdict[:1] == b"-":
            raise LostProcessError(verdict[1:].decode())
        return verdict[1:]
    try:
        verdict = b"+" + decide(post.collect(folder, data, name, timeout))
    except LostProcessError as error:
        post.put(decision, f"-{error}".encode())
        raise
    post.forget(getattr(_here, "read", decision))
    _here.read = decision
    post.put(decision, verdict)
    return verdict[1:]


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
    usual, *odd = map(int, decide_together(name, _digest(lines), _odd, timeout, "agree").split())
    if not odd:
        return
    data = pack([*lines]) if _compat.process_index() in (usual, odd[0]) else b""

    def part(every: Sequence[bytes]) -> bytes:
        return _parting(unpack(every[odd[0]]), unpack(every[usual])).encode()

    differs = decide_together(name, data, part, timeout, "lines")
    who = f"process {', '.join(map(str, odd))} of {_compat.process_count()} differs from process {usual}"
    raise UsageError(f"{name}: {who}, {differs.decode()}; start all processes with the same code, data and flags")


def _digest(lines: Iterable[str]) -> bytes:
    digest = sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.digest()


def _odd(digests: Sequence[bytes]) -> bytes:
    """The first process with the usual digest, and all that have another one."""
    usual = max(digests, key=digests.count) if len(set(digests)) > 1 else digests[0]  # of two as frequent the first
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    return " ".join(map(str, [digests.index(usual), *odd])).encode()


def _parting(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Where the lines of a process first differ from the usual ones."""
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing more")
    where, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    from_ = max(0, first - 60)
    a, b = (f"{'...' * (from_ > 0)}{line[from_ : from_ + 160]}" for line in (a, b))
    return f"first in line {where + 1}, which is {a!r} in place of {b!r}"


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
    said = decide_together(name, json.dumps(value).encode(), operator.itemgetter(0), timeout, "says")
    first: T = json.loads(said) if several() else value
    return first


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
    except MultiMeshError as wrong:
        if not several():
            raise
        error = [type(wrong).__name__, str(wrong), socket.gethostname()]
    if not several():
        return then([cast("T", value)]) if then else value

    def decide(every: Sequence[bytes]) -> bytes:
        errors, values = zip(*map(unpack, every), strict=True)
        verdict, result = _verdict(errors), None
        if then and not verdict:
            try:
                result = then(values)
            except MultiMeshError as wrong:
                verdict = [type(wrong).__name__, str(wrong)]
        return json.dumps([verdict, result]).encode()

    verdict, result = json.loads(
        decide_together(name, pack([error, value if then else None]), decide, timeout, "errors")
    )
    if verdict:
        kinds = {kind.__name__: kind for kind in (UsageError, DamagedError, NoRecordError)}
        raise kinds.get(verdict[0], MultiMeshError)(verdict[1])
    return result if then else value


def _verdict(errors: Sequence[Any]) -> list[str]:
    """The kind and the text of the first of several processes' errors; nothing if there is none."""
    rank = next((rank for rank, error in enumerate(errors) if error), None)
    if rank is None:
        return []
    kind, text, host = errors[rank]
    whose = "" if errors.count(errors[rank]) == len(errors) else f"process {rank} of {len(errors)} ({host}): "
    return [kind, f"{whose}{text}"]
