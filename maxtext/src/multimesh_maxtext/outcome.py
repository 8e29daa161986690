"""Why a process of a run ended, as data in a file.

The trainer writes it where it knows; then `run.py`, which also knows how far the run came. Only ``cause`` and
``exit_code`` decide anything; the texts are for people.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path

from multimesh_maxtext.errors import LauncherError, TrainerFailedError, error_classes

ROOM = " " * 4096
"""What the file has from the start: a full disk then still takes the reason why it is full."""


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
