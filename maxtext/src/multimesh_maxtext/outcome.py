"""Why a process of a run ended, as data in a file.

The trainer writes it where it knows; then `run.py`, which also knows how far the run came. Only `Outcome.cause` and
`Outcome.exit_code` decide anything; the texts are for people.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from multimesh_maxtext import errors
from multimesh_maxtext.errors import LauncherError, NoSpaceError

NAME = "outcome.json"
_ROOM = 4096  # bytes that the file has from the start: a full disk then still takes the reason why it is full
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 300
_FILE_OF_TENSORSTORE = re.compile(r'local file "([^"]+)"')
_PATIENCE = 3.0  # seconds that a process which doubts its own outcome waits for that of another one


@dataclass(frozen=True)
class Outcome:
    """Why a process ended."""

    cause: str  # the name of an error's class, such as ``process-lost``; empty for a success
    exit_code: int = 0
    message: str = ""  # a sentence without the remedy
    remedy: str = ""
    who: str = ""  # ``process 1 of 2 on HOST``
    step: int | None = None  # number of the last step that was recorded
    checkpoint: int | None = None  # number of the newest complete checkpoint

    @property
    def text(self) -> str:
        """The message with its remedy."""
        return "; ".join(filter(None, (self.message, self.remedy)))

    def error(self) -> LauncherError | None:
        """Return the error of this outcome; none for a success."""
        return errors.error_classes().get(self.cause, errors.TrainerFailedError)(self.text) if self.cause else None


def outcome_of(error: LauncherError | None) -> Outcome:
    """Return the outcome of a process that ended with an error, or with none."""
    if error is None:
        return Outcome("")
    message, _, remedy = str(error).partition("; ")
    return Outcome(error.cause, error.exit_code, message, remedy)


def reserve(file: Path) -> None:
    """Forget the outcome of an earlier run; from now on the file has the room that an outcome needs."""
    file.write_text(" " * _ROOM)


def write(outcome: Outcome, file: Path) -> None:
    """Write an outcome over what the file has, without asking the disk for more room."""
    data = json.dumps(asdict(outcome)).encode() + b"\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def read(file: Path) -> Outcome | None:
    """Return the outcome in a file; none where nobody has written one."""
    with suppress(OSError, ValueError, TypeError):
        return Outcome(**json.loads(file.read_text()))
    return None


def doubt(cause: str) -> int:
    """Return how likely another process knows better why all ended: 0 for a cause of its own."""
    follows = {"preempted": 1, "interrupted-run": 1, "trainer-failed": 2, "process-lost": 3}
    return follows.get(cause, 0)


def find_first(folder: Path, count: int, since: float = 0.0, code: int = 0) -> Outcome | None:
    """Return the outcome of a job's process that is least likely to follow from that of another one.

    Outcomes written before ``since`` are those of an earlier run; among doubtful ones that with this ``code`` is first.
    """
    files = [folder / (f"process-{rank}" if rank else "") / NAME for rank in range(count)]
    ended = [end for file in files if (end := read(file)) and end.cause and file.stat().st_mtime >= since]

    def order(outcome: Outcome) -> tuple[bool, bool, int]:
        return doubt(outcome.cause) > 0, outcome.exit_code != code, doubt(outcome.cause)

    return min(ended, key=order, default=None)


def find_cause(folder: Path, count: int, error: LauncherError) -> LauncherError:
    """Return the error of another process where that of this one only follows from it.

    A process that was ended, or which knows that another one was lost, waits some seconds for the others.
    """
    until = time.monotonic() + _PATIENCE
    while count > 1 and doubt(error.cause) and error.cause != errors.PreemptedError.cause and time.monotonic() < until:
        first = find_first(folder, count)
        if first and doubt(first.cause) < doubt(error.cause) and (cause := first.error()):
            cause.shared = True  # the other process tells it
            return cause
        time.sleep(0.05)
    return error


def full_file(error: BaseException) -> NoSpaceError | None:
    """Return the error of a file that could not be written for want of room; none for any other exception."""
    number = error.errno if isinstance(error, OSError) else None
    if number not in _FULL:
        number = next((candidate for candidate in _FULL if os.strerror(candidate) in str(error)), None)
    if number is None or isinstance(error, LauncherError):
        return None
    text = str(error).strip().partition("\n")[0][:_LONGEST]
    of_tensorstore = _FILE_OF_TENSORSTORE.search(str(error))
    name = of_tensorstore[1] if of_tensorstore else getattr(error, "filename", None)
    name = name or (text if "/" in text else "a file of --output, --checkpoint or --metrics-file")
    if Path(name).is_absolute():
        name = str(Path(name).resolve())  # MaxText writes checkpoints through a link
    return NoSpaceError(
        f"{name}: {os.strerror(number)} ({errno.errorcode[number]}); make room, or raise the limit, and start again"
    )
