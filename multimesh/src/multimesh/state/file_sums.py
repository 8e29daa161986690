"""Checksums of the files of a checkpoint: records in its folder, to compare later. Nothing here needs Orbax."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimesh.errors import DamagedError

RECORD = "multimesh-sums.{}-of-{}.json"
BLOCK = 1 << 20
"""Bytes that have a checksum of their own."""

FORMAT = 2
REMEDY = "copy the checkpoint again, or take another"

Sums = tuple[int, Sequence[int]]
"""Bytes of a file, and the CRC-32 of each block."""


def list_files(folder: Path) -> list[str]:
    """Return the names of all files in a folder but for its records."""
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in names if not name.startswith(RECORD.partition("{")[0])]


def sum_files(folder: Path, names: Sequence[str]) -> dict[str, Sums]:
    """Return the checksums of files."""
    return dict(zip(names, _map_files(_sum, folder, names), strict=True))


def write_sums(folder: Path, sums: Mapping[str, Sums], share: int, shares: int) -> None:
    """Write the checksums of a share of the files of a folder into it."""
    file = folder / RECORD.format(share, shares)
    half = file.with_suffix(".half")
    with half.open("wb") as sums_file:
        sums_file.write(_seal(json.dumps(dict(sums), indent=1).encode()))
        sums_file.flush()
        os.fsync(sums_file.fileno())
    half.replace(file)


def read_sums(folder: Path, shares: int | None = None) -> tuple[dict[str, Sums], bool]:
    """Return the checksums in a folder, and whether every share has its own.

    Raises ``DamagedError`` if a record is not what was written, or one of so many ``shares`` is missing.
    """
    files = [folder / RECORD.format(share, shares) for share in range(shares or 0)]
    files = files or sorted(folder.glob(RECORD.format("*", "*")))
    sums: dict[str, Sums] = {}
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DamagedError(f"{file}: {error.strerror or error}; {REMEDY}") from None
        body = data.partition(b"\n")[2]
        if data != _seal(body):
            raise DamagedError(f"{file}: its bytes are not those that were written; {REMEDY}")
        sums |= json.loads(body)
    return sums, bool(files) and files[0].name.endswith(f"-of-{len(files)}.json")


def check_share(folder: Path, sums: Mapping[str, Sums], share: int, shares: int) -> None:
    """Read a share of the files, and compare their checksums.

    Raises ``DamagedError`` if bytes are not those that were written; names the first such file.
    """
    _map_files(functools.partial(_compare, sums), folder, sorted(sums)[share::shares])


def _map_files(read: Callable[[Path, str], Any], folder: Path, names: Sequence[str]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(functools.partial(read, folder), names))


def _sum(folder: Path, name: str) -> Sums:
    with (folder / name).open("rb") as file:
        sums = [zlib.crc32(block) for block in iter(functools.partial(file.read, BLOCK), b"")]
        return file.tell(), sums


def _compare(sums: Mapping[str, Sums], folder: Path, name: str) -> None:
    size, expected = sums[name]
    try:
        length, actual = _sum(folder, name)
    except OSError as error:
        raise DamagedError(f"{folder / name}: {error.strerror or error}; {REMEDY}") from None
    if length != size:
        raise DamagedError(f"{folder / name}: the file has {length:,} bytes in place of {size:,}; {REMEDY}")
    for start, a, b in zip(range(0, size, BLOCK), actual, expected, strict=True):
        if a != b:
            place = f"{folder / name}: bytes {start:,} to {min(start + BLOCK, size):,}"
            raise DamagedError(f"{place} are not those that were written; {REMEDY}")


def _seal(body: bytes) -> bytes:
    """Return the bytes of a record's file: a first line that follows from the body, so that any change is found."""
    head = {"format": FORMAT, "bytes": len(body), "crc32": zlib.crc32(body, FORMAT)}
    return json.dumps(head).encode() + b"\n" + body
