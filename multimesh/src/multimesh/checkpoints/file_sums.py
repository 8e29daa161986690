"""Checksums of a checkpoint that other software wrote, such as Orbax: a record in its folder, to compare later.

Each process records its share of the files, by their names. A reader needs no part of the software that wrote them.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from multimesh.checkpoints import ocdbt, shard_files
from multimesh.errors import DamagedError

RECORD = "multimesh-sums.{}-of-{}.json"
BLOCK = 1 << 20
"""Bytes that have a checksum of their own."""

_REMEDY = "copy the checkpoint again, or take another"

Sums = tuple[int, Sequence[int]]
"""Bytes of a file, and the CRC-32 of each block."""

T = TypeVar("T")


def write_record(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Write the checksums of a share of the files in a folder into it."""
    every = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    mine = [name for name in every if not _is_record(name) and zlib.crc32(name.encode()) % shares == share]
    body = json.dumps(dict(zip(mine, _each(_sums, folder, mine), strict=True)), indent=1).encode()
    file = folder / RECORD.format(share, shares)
    half = file.with_suffix(".half")
    with half.open("wb") as opened:
        opened.write(shard_files.seal(body))
        opened.flush()
        os.fsync(opened.fileno())
    half.replace(file)
    shard_files.settle_folder(folder)


def read_record(folder: Path) -> tuple[dict[str, Sums], bool]:
    """Return the checksums in a folder, and whether every share has its own.

    Raises ``DamagedError`` if a record is not what was written.
    """
    files = sorted(folder.glob(RECORD.format("*", "*")))
    found: dict[str, Sums] = {}
    for file in files:
        try:
            body = shard_files.unseal(file.read_bytes())
        except OSError as error:
            raise DamagedError(f"{file}: {error.strerror or error}; {_REMEDY}") from None
        if body is None:
            raise DamagedError(f"{file}: its bytes are not those that were written; {_REMEDY}")
        found |= json.loads(body)
    return found, bool(files) and files[0].name.endswith(f"-of-{len(files)}.json")


def check_share(folder: Path, sums: dict[str, Sums], share: int = 0, shares: int = 1) -> None:
    """Read a share of the files, and compare their checksums.

    Raises ``DamagedError`` if bytes are not those that were written; names the first such file, and arrays in it where
    Orbax tells.
    """
    mine = sorted(sums)[share::shares]
    for name, why in zip(mine, _each(functools.partial(_compare, sums), folder, mine), strict=True):
        if why:
            raise DamagedError(f"{folder / name}: {why}; {_REMEDY}")


def _is_record(name: str) -> bool:
    return name.startswith(RECORD.partition("{")[0])


def _each(what: Callable[[Path, str], T], folder: Path, names: Sequence[str]) -> list[T]:
    with concurrent.futures.ThreadPoolExecutor(shard_files.THREADS) as pool:
        return list(pool.map(functools.partial(what, folder), names))


def _sums(folder: Path, name: str) -> Sums:
    with (folder / name).open("rb") as opened:
        sums = [zlib.crc32(block) for block in iter(functools.partial(opened.read, BLOCK), b"")]
        return opened.tell(), sums


def _compare(sums: dict[str, Sums], folder: Path, name: str) -> str:
    """Return the difference of a file from its record; "" if there is none."""
    size, want = sums[name]
    try:
        has, found = _sums(folder, name)
    except OSError as error:
        return error.strerror or str(error)
    if has != size:
        return f"the file has {has:,} bytes in place of {size:,}"
    wrong = [number for number, (a, b) in enumerate(zip(found, want, strict=True)) if a != b]
    if not wrong:
        return ""
    start, end = wrong[0] * BLOCK, min((wrong[0] + 1) * BLOCK, size)
    held = ocdbt.arrays(folder, name, start, end)
    more = f" and {len(held) - ocdbt.SHOWN} more" if len(held) > ocdbt.SHOWN else ""
    of = f", of {', '.join(held[: ocdbt.SHOWN])}{more}," if held else ""
    return f"bytes {start:,} to {end:,}{of} are not those that were written"
