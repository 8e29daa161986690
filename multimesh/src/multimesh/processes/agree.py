"""How processes agree: each gives something, process 0 decides, and all learn the decision.

That is one value that each process leaves for process 0, and one that it reads.
"""

from __future__ import annotations

import itertools
import json
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

from multimesh.core import _compat
from multimesh.errors import DamagedError, LostProcessError, MultiMeshError, NoRecordError, UsageError
from multimesh.processes import post

T = TypeVar("T")

_plans = itertools.count(1)


def several() -> bool:
    """Return whether this is one of several processes."""
    return _compat.process_count() > 1


def decide_together(
    name: str, mine: bytes, decide: Callable[[Sequence[bytes]], bytes] = lambda _: b"", timeout: float | None = None
) -> bytes:
    """Let process 0 reduce the bytes of all processes, and return its result everywhere. Use each ``name`` once.

    All wait for all, and Ctrl-C ends the wait.

    After a minute process 0 says who has not come.

    Raises ``LostProcessError`` in every process, if one has not come here in time; names all that have not.
    """
    if not several():
        return decide([mine])
    if _compat.process_index():
        post.to_first(name, mine)
        said = post.from_first(f"{name}/decided", post.patience(timeout) + 10)
        if said[:1] == b"-":
            raise LostProcessError(said[1:].decode())
        return said[1:]
    try:
        said = decide(post.from_all(name, mine, timeout))
    except LostProcessError as error:
        post.to_all(f"{name}/decided", f"-{error}".encode())
        raise
    post.to_all(f"{name}/decided", b"+" + said)
    return said


def barrier(name: str, timeout: float | None = None) -> None:
    """Wait until every process is here; use each ``name`` once. Ctrl-C ends the wait.

    After a minute process 0 says who has not come.
    """
    decide_together(f"{name}/barrier", b"", timeout=timeout)


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
    verdict = decide_together(f"{name}/agree", _digest(lines), _odd, timeout)
    usually, *odd = map(int, verdict.split())
    if not odd:
        return
    me, key = _compat.process_index(), f"multimesh/lines/{name}"
    if me == usually:
        post.put(key, pack([*lines]))
    differs = b""
    if me == odd[0]:
        differs = _parting([*lines], unpack(post.get(key, name, usually, timeout))).encode()
    differs = decide_together(f"{name}/parting", differs, lambda every: every[odd[0]], timeout)
    post.forget(key)
    who = f"process {', '.join(map(str, odd))} of {_compat.process_count()} differs from process {usually}"
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


def pack(value: Any) -> bytes:
    """Return data that JSON can hold as compressed bytes."""
    return zlib.compress(json.dumps(value).encode(), 1)


def unpack(value: bytes) -> Any:
    """Undo `pack`."""
    return json.loads(zlib.decompress(value))


def first_says(name: str, value: T, timeout: float | None = None) -> T:
    """Broadcast process 0's ``value``, which JSON can hold, to every process. Use each ``name`` once."""
    if not several():
        return value
    if _compat.process_index() == 0:
        post.to_all(f"{name}/says", json.dumps(value).encode())
        return value
    said: T = json.loads(post.from_first(f"{name}/says", timeout))
    return said


def raise_together(
    name: str,
    error: MultiMeshError | None,
    mine: Any = None,
    then: Callable[[Sequence[Any]], Any] = lambda _: None,
    timeout: float | None = None,
) -> Any:
    """Raise an error of one process in all of them, with the name of that process. Use each ``name`` once.

    All wait for all. Without an error process 0 calls ``then`` with the ``mine`` of each; all return its result, or
    raise its error. JSON must hold both.
    """
    own = pack([_describe(error, socket.gethostname()), mine])

    def decide(every: Sequence[bytes]) -> bytes:
        said = [unpack(each) for each in every]
        verdict, result = _verdict([wrong for wrong, _ in said]), None
        if not verdict:
            try:
                result = then([given for _, given in said])
            except MultiMeshError as wrong:
                verdict = _describe(wrong)
        return json.dumps([verdict, result]).encode()

    if not several():
        if error:
            raise error
        return then([mine])
    verdict, result = json.loads(decide_together(f"{name}/errors", own, decide, timeout))
    _raise(verdict)
    return result


def _raise(verdict: Sequence[str]) -> None:
    """Raise the error that `_describe` tells, if there is one."""
    kinds = {kind.__name__: kind for kind in (UsageError, DamagedError, NoRecordError)}
    if verdict:
        raise kinds.get(verdict[0], MultiMeshError)(verdict[1])


def _describe(error: MultiMeshError | None, *host: str) -> list[str]:
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
