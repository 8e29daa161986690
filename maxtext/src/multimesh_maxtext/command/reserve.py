"""Folders that one run at a time writes to."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from multimesh_maxtext.errors import FileError, LauncherError

_POLL = 0.1  # seconds between looks at a lock

RUNNING = ".running"
"""A file that is locked while a run writes to an output folder, and not empty once a run has done a step there."""


@contextmanager
def writing(file: Path, flag: str, kind: type[LauncherError] = FileError, *, patience: float = 0.0) -> Iterator[int]:
    """Reserve a folder for one run by a lock file in it; yields a file descriptor that the trainer must inherit.

    The reservation ends when both this process and the trainer have ended, however they ended.

    Parameters
    ----------
    patience
        Seconds to wait for another run that is about to end.

    Raises
    ------
    LauncherError
        Of that kind, where another run writes to the folder, whose process it names, or nobody can write.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("a+b")
    except OSError as error:
        raise kind(f"{flag} {file.parent}: {error.strerror}; choose another folder") from error
    with lock:
        deadline = time.monotonic() + patience
        while not (taken := _lock(lock)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        if not taken:
            raise kind(
                f"{flag} {file.parent}: another run writes here, {_living(file)}; wait for it, stop it, or choose "
                "another folder"
            )
        yield lock.fileno()


def _lock(file: IO[bytes]) -> bool:
    """Lock a file; return whether nobody else has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _living(file: Path) -> str:
    """Name the processes of this machine that have a file open."""
    held = file.stat()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            open_files = (path.stat() for path in (process / "fd").iterdir())
            if any((at.st_dev, at.st_ino) == (held.st_dev, held.st_ino) for at in open_files):
                found.append(process.name)
    own = str(os.getpid())
    return f"process {' and '.join(pid for pid in found if pid != own)}" if set(found) - {own} else "on another machine"


def mark_run(folder: Path) -> None:
    """Note that an output folder holds a run from now on; one that failed before its first step leaves nothing."""
    (folder / RUNNING).write_text("a run did steps here\n")


def holds_run(folder: Path) -> bool:
    """Return whether a run did steps in an output folder."""
    return any(has_content(folder / name) for name in (RUNNING, "metrics.jsonl"))


def has_content(file: Path) -> bool:
    """Return whether a file is there, and not empty."""
    return file.is_file() and file.stat().st_size > 0


def remove_run(folder: Path, names: Iterable[str]) -> None:
    """Remove the files of a run in an output folder, by names or patterns. Call it while `writing`."""
    for path in (path for name in names for path in folder.glob(name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
