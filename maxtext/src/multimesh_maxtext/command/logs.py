"""The trainer's log. It stays small enough for a disk, however long a run takes and however much is said in it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

LIMIT = 32 << 20
"""Bytes at which a log is put aside, in place of the one that was put aside before."""


def name_older(log: Path) -> Path:
    """Return where a log is put when it has reached `LIMIT`."""
    return log.with_name(f"{log.stem}-older{log.suffix}")


def bound_log(log: Path) -> None:
    """Put a log aside if it has reached `LIMIT`. Its writer, who appends, goes on at its beginning.

    A line that is written in the moment between the copy and the cut is lost.
    """
    if log.stat().st_size >= LIMIT:
        shutil.copyfile(log, name_older(log))
        os.truncate(log, 0)


def read_log(log: Path) -> str:
    """Return the text of a log, with the part that was put aside before it."""
    found = ""
    for part in (name_older(log), log):
        with suppress(FileNotFoundError):
            found += part.read_text(encoding="utf-8", errors="replace")
    return found


def move_log(log: Path, target: Path) -> None:
    """Rename a log and its older part, if they are there."""
    for each, new in ((name_older(log), name_older(target)), (log, target)):
        with suppress(FileNotFoundError):
            each.rename(new)
