"""Files of shards, with a checksum for every block: bytes are read as they were written, or an error is raised.

Each process of a save writes one file, ``process-3.shards``: the bytes of its shards, one after the other, in C order.
Process 0 writes the table of all shards to ``multimesh.json``: a line with the table's own checksum, then the table.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from multimesh.errors import DamagedError, UsageError
from multimesh.processes.arrays import Bounds

TABLE = "multimesh.json"
FORMAT = 2
BLOCK = 1 << 24
"""Bytes that have a checksum of their own: a reader of some rows of a shard reads the blocks that hold them."""

THREADS = 8
VISIBLE = 60.0
"""Seconds after which a machine sees what another one wrote to a shared file system: the most that NFS keeps a folder.
"""

T = TypeVar("T")
_HEAD = re.compile(rb'\{"format": (\d+), "bytes": \d+, "crc32": \d+\}')
_BY_ORBAX = b'{\n "format": 1,'  # what a table of format 1 begins with

_REMEDY = "copy the checkpoint again, or restore another"

"""Where a part of an array begins and ends along each axis."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of an array, and where its bytes are."""

    name: str
    bounds: Bounds
    file: str
    offset: int
    size: int
    sums: tuple[int, ...]  # CRC-32 of each block

    def __str__(self) -> str:
        return f"shard {show(self.bounds)} of {self.name}"

    def row(self) -> list[Any]:
        """Return the shard as JSON has it."""
        return [self.name, self.bounds, self.file, self.offset, self.size, self.sums]

    @classmethod
    def of(cls, row: Sequence[Any]) -> Shard:
        """Return the shard of a `row`."""
        name, part, file, offset, size, sums = row
        return cls(name, tuple((start, end) for start, end in part), file, offset, size, tuple(sums))

    @property
    def shape(self) -> tuple[int, ...]:
        """The length along each axis."""
        return tuple(end - start for start, end in self.bounds)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array that is to be written; ``fetch`` copies it to the host."""

    name: str
    bounds: Bounds
    dtype: np.dtype[Any]
    fetch: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(end - start for start, end in self.bounds) * self.dtype.itemsize


def show(part: Bounds) -> str:
    """Format bounds as an index."""
    return f"[{', '.join(f'{start}:{end}' for start, end in part)}]"


def write(file: Path, parts: Sequence[Part], threads: int = THREADS) -> list[Shard]:
    """Write parts to a new file that stays even if the power fails; return where they are."""
    offsets = itertools.accumulate((part.size for part in parts), initial=0)
    with file.open("xb") as opened, contextlib.ExitStack() as stack:
        into = functools.partial(_write, opened.fileno(), file.name)
        if threads == 1:  # also while Python ends, when it starts no threads
            shards = list(map(into, parts, offsets))
        else:
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(threads))
            shards = list(pool.map(into, parts, offsets))
        os.fsync(opened.fileno())
    return shards


def _write(descriptor: int, file: str, part: Part, offset: int) -> Shard:
    data = memoryview(np.ascontiguousarray(part.fetch()).reshape(-1).view(np.uint8))
    sums, at = [], offset
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        sums.append(zlib.crc32(block))
        while len(block):
            written = os.pwrite(descriptor, block, at)
            block, at = block[written:], at + written
    return Shard(part.name, part.bounds, file, offset, part.size, tuple(sums))


def read(folder: Path, shards: Sequence[Shard], dtype: np.dtype[Any], part: Bounds) -> np.ndarray:
    """Read a part of an array from its shards, and compare the checksums of all blocks that hold it.

    Raises ``DamagedError`` if bytes are not those that were written; names the file and the shard.
    """
    shape = [end - start for start, end in part]
    found, elements = np.empty(shape, dtype), 0
    for shard in shards:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, shard.bounds, strict=True)]
        if any(start >= end for start, end in both):
            continue
        here = tuple(slice(start - own, end - own) for (start, end), (own, _) in zip(both, part, strict=True))
        there = [slice(start - own, end - own) for (start, end), (own, _) in zip(both, shard.bounds, strict=True)]
        rows = there[0] if there else slice(0, 1)
        row = shard.size // (shard.shape[0] if there else 1)
        data = _blocks(folder, shard, rows.start * row, rows.stop * row)
        whole = np.frombuffer(data, dtype).reshape(-1, *shard.shape[1:]) if there else np.frombuffer(data, dtype)[0]
        found[here] = whole[(slice(None), *there[1:])] if there else whole
        elements += math.prod(end - start for start, end in both)
    if elements != found.size:
        raise DamagedError(f"{folder}: the table lacks shards of {show(part)}; {_REMEDY}")
    return found


def _blocks(folder: Path, shard: Shard, start: int, end: int) -> memoryview:
    """Return bytes ``start`` to ``end`` of a shard, out of whole blocks whose checksums are right."""
    file = folder / shard.file
    first, last = start // BLOCK, -(-end // BLOCK)
    size = min(last * BLOCK, shard.size) - first * BLOCK
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(shard.offset + first * BLOCK)
            data = bytearray(size)
            view, got = memoryview(data), 0
            while got < size and (count := opened.readinto(view[got:])):
                got += count
    except OSError as error:
        raise _damage(file, shard, error.strerror or str(error)) from None
    if got < size:
        raise _damage(file, shard, f"the file ends {size - got:,} bytes too early")
    for number in range(first, last):
        at = (number - first) * BLOCK
        if zlib.crc32(view[at : at + BLOCK]) != shard.sums[number]:
            raise _damage(file, shard, "its bytes are not those that were saved")
    return view[start - first * BLOCK : end - first * BLOCK]


def _damage(file: Path, shard: Shard, why: str) -> DamagedError:
    return DamagedError(f"{file}: {shard}: {why}; {_REMEDY}")


def check(folder: Path, shard: Shard) -> None:
    """Read a shard, and compare its checksums.

    Raises ``DamagedError`` if bytes are not those that were written; names the file and the shard.
    """
    for start in range(0, shard.size, BLOCK):
        _blocks(folder, shard, start, min(start + BLOCK, shard.size))


def check_sizes(folder: Path, shards: Iterable[Shard]) -> None:
    """Compare the sizes of the files with those that their shards make.

    Raises ``DamagedError`` if a file is missing, or has fewer or more bytes.
    """
    last: dict[str, Shard] = {}
    for shard in shards:
        if shard.file not in last or shard.offset >= last[shard.file].offset:
            last[shard.file] = shard
    for name, shard in last.items():
        file, want = folder / name, shard.offset + shard.size
        try:
            size = file.stat().st_size
        except OSError as error:
            raise _damage(file, shard, error.strerror or str(error)) from None
        if size != want:
            raise _damage(file, shard, f"the file has {size:,} bytes in place of {want:,}")


def write_table(folder: Path, contents: Mapping[str, Any], shards: Iterable[Shard]) -> None:
    """Write the table of a checkpoint that is complete but for it."""
    table = [shard.row() for shard in shards]
    with (folder / TABLE).open("xb") as opened:
        opened.write(seal(json.dumps({**contents, "shards": table}, indent=1).encode()))
        opened.flush()
        os.fsync(opened.fileno())


def seal(body: bytes, version: int = FORMAT) -> bytes:
    """Return the bytes of a table's file: a first line that follows from the body, so that any change is found."""
    head = {"format": version, "bytes": len(body), "crc32": zlib.crc32(body, version)}
    return json.dumps(head).encode() + b"\n" + body


def unseal(data: bytes) -> bytes | None:
    """Return the body that was `sealed`; None if a byte was changed."""
    head, _, body = data.partition(b"\n")
    said = _HEAD.fullmatch(head)
    return body if said and data == seal(body, int(said[1])) else None


def read_table(folder: Path) -> tuple[dict[str, Any], dict[str, list[Shard]]]:
    """Return the contents of a checkpoint, and the shards of each leaf.

    Raises ``FileNotFoundError`` if there is none, and ``DamagedError`` if it is not what was written, and
    ``UsageError`` if it is of another version of MultiMesh.
    """
    file = folder / TABLE
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{file}: {error.strerror or error}; {_REMEDY}") from None
    body = unseal(data)
    if data.startswith(_BY_ORBAX):
        raise UsageError(f"{folder} is of an older MultiMesh, which wrote checkpoints without checksums; use that one")
    if body is None:
        raise DamagedError(f"{file}: its bytes are not those that were saved; {_REMEDY}")
    if (version := json.loads(data.partition(b"\n")[0])["format"]) != FORMAT:
        raise UsageError(f"{folder} is of a newer MultiMesh (format {version}); use that one")
    contents = json.loads(body)
    shards: dict[str, list[Shard]] = {name: [] for name in contents["leaves"]}
    for row in contents.pop("shards"):
        shard = Shard.of(row)
        shards[shard.name].append(shard)
    return contents, shards


def retry(what: Callable[[], T], folder: Path, *late: type[Exception]) -> T:
    """Access files of other machines. Retry while it fails with ``late``, until they must be visible."""
    until = time.monotonic() + VISIBLE
    while True:
        try:
            return what()
        except late:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)
        settle_folder(folder)  # to open a folder of NFS asks its server what is in it


def settle_folder(folder: Path) -> None:
    """Let the names in a folder stay even if the power fails, where its file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
