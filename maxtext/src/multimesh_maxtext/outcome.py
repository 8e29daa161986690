"""Why a process of a run ended, as data in a file.

The trainer writes it where it knows; then `run.py`, which also knows how far the run came. Only ``cause`` and
``exit_code`` decide anything; the texts are for people.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from multimesh_maxtext.errors import LauncherError, NoSpaceError, PreemptedError, TrainerFailedError, error_classes

_ROOM = 4096  # bytes that the file has from the start: a full disk then still takes the reason why it is full
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FILE_OF_TENSORSTORE = re.compile(r'local file "([^"]+)"')
_PATIENCE = 3.0  # seconds that a process which doubts its own outcome waits for that of another one


def reserve(file: Path) -> None:
    """Forget the outcome of an earlier run; from now on the file has the room that an outcome needs."""
    file.write_text(" " * _ROOM)


def name_process(rank: int, count: int) -> str:
    """Return who a process of this machine is."""
    return f"process {rank} of {count} on {socket.gethostname()}"


def write(error: LauncherError | None, file: Path, who: str = "", **progress: int | None) -> None:
    """Write why a process ended over what the file has, without asking the disk for more room.

    ``error``: none for a success.
    ``progress``: numbers of the last ``step`` that was recorded, and of the newest complete ``checkpoint``.
    """
    message, _, remedy = str(error or "").partition("; ")
    values = {
        "cause": error.cause if error else "",  # the name of its class
        "exit_code": error.exit_code if error else 0,
        "message": message,
        "remedy": remedy,
        "who": (error and error.who) or who,
        **progress,
    }
    with file.open("r+" if file.exists() else "w") as out:
        out.write(json.dumps(values) + "\n")
        out.truncate()


def read(file: Path) -> LauncherError | None:
    """Return the error in a file; none where nobody has written one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads(file.read_text())
        if values["cause"]:
            text = "; ".join(filter(None, (values["message"], values["remedy"])))
            error = error_classes().get(values["cause"], TrainerFailedError)(text)
            error.who = values["who"]
            return error
    return None


def find_cause(error: LauncherError, files: Sequence[Path]) -> LauncherError:
    """Return the error of another process of a job, which has one of the files, where that of this one follows from it.

    A process that was ended, or which knows that another one was lost, waits some seconds for the others.
    """
    until = time.monotonic() + _PATIENCE
    while error.doubt and not isinstance(error, PreemptedError) and time.monotonic() < until:
        first = min(filter(None, map(read, files)), key=lambda other: other.doubt, default=error)
        if first.doubt < error.doubt:
            first.shared = True  # the other process tells it
            return first
        time.sleep(0.05)
    return error


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's text."""
    return str(error).strip().partition("\n")[0][:300]


def full_file(error: BaseException) -> NoSpaceError | None:
    """Return the error of a file that could not be written for want of room; none for any other exception."""
    number = error.errno if isinstance(error, OSError) else None
    if number not in _FULL:
        number = next((candidate for candidate in _FULL if os.strerror(candidate) in str(error)), None)
    if number is None or isinstance(error, LauncherError):
        return None
    text = first_line(error)
    of_tensorstore = _FILE_OF_TENSORSTORE.search(str(error))
    name = of_tensorstore[1] if of_tensorstore else getattr(error, "filename", None)
    name = name or (text if "/" in text else "a file of --output, --checkpoint or --metrics-file")
    if Path(name).is_absolute():
        name = str(Path(name).resolve())  # MaxText writes checkpoints through a link
    return NoSpaceError(
        f"{name}: {os.strerror(number)} ({errno.errorcode[number]}); make room, or raise the limit, and start again"
    )
