"""What a cache holds and what of it is used: reads nginx's request log, and removes what was used longest ago."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(rb"(\d{3}) (GET|PUT) /(ac|cas)/([0-9a-f]{64})")
_KEEP = 0.9  # a bound that is reached is followed by some room, or every upload would prune


@dataclass(frozen=True)
class Hits:
    """Lookups of actions, each of which either was there or had to be run."""

    hits: int
    misses: int

    def __sub__(self, before: Hits) -> Hits:
        return Hits(self.hits - before.hits, self.misses - before.misses)

    def __str__(self) -> str:
        total = self.hits + self.misses
        return f"{self.hits} of {total} actions found ({self.hits / total:.0%})" if total else "not asked for anything"


@dataclass(frozen=True)
class Request:
    """One line of the request log."""

    status: int
    method: str
    kind: str
    key: str

    @property
    def found(self) -> bool:
        """Say whether it got an entry."""
        return self.method == "GET" and self.status == 200


class LogReader:
    """Reads the lines that a server adds to its log, once each."""

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_now and path.exists() else 0

    def new(self) -> Iterator[Request]:
        """Yield the requests since the last call; a line that is not finished yet comes with the next."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                lines = file.read()
        except FileNotFoundError:
            return
        whole = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if match := _LINE.fullmatch(line):
                yield Request(int(match[1]), match[2].decode(), match[3].decode(), match[4].decode())


def count(requests: Iterator[Request]) -> Hits:
    """Count the lookups of actions."""
    found = [each.found for each in requests if each.kind == "ac" and each.method == "GET"]
    return Hits(sum(found), len(found) - sum(found))


def touch(content: Path, request: Request) -> None:
    """Make an entry the last used one; its time of change says so, which survives every restart."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(content / request.kind / request.key)


def entries(content: Path) -> list[tuple[float, int, Path]]:
    """Return last use (seconds since the epoch), size in bytes and path of every entry."""
    found = []
    for kind in ("ac", "cas"):
        with contextlib.suppress(FileNotFoundError), os.scandir(content / kind) as folder:
            for each in folder:
                with contextlib.suppress(FileNotFoundError):
                    state = each.stat(follow_symlinks=False)
                    found.append((state.st_mtime, state.st_blocks * 512, Path(each.path)))
    return found


def size(content: Path) -> int:
    """Return the bytes that the entries take on disk."""
    return sum(each for _, each, _ in entries(content))


def prune(content: Path, max_bytes: int) -> int:
    """Remove what was used longest ago until the rest is within the bound; return the bytes on disk afterwards.

    An action whose outputs are gone is run again: Bazel takes an output that is not there for a miss.
    """
    found = sorted(entries(content))
    total = sum(each for _, each, _ in found)
    if total <= max_bytes:
        return total
    for _, bytes_on_disk, path in found:
        if total <= max_bytes * _KEEP:
            break
        path.unlink(missing_ok=True)
        total -= bytes_on_disk
    return total
