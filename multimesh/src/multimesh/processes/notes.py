"""Notes between process 0 and all others, over the connections of their watchers.

A process leaves a note for process 0, and process 0 leaves one for all others. For process 0 that is a message, where a
value in JAX's key-value store is a call of its service; and who lacks the secret of the job can leave none.
"""

from __future__ import annotations

import threading
from base64 import b64decode, b64encode
from collections.abc import Sequence

from multimesh.processes.wire import Line, Message

LARGEST = 1 << 13
"""Bytes of a note: the hub may have to keep one for each of thousands."""

_of_this_job: list[Notes] = []


class Notes:
    """The notes of this process; ``line`` leads to its watcher."""

    def __init__(self, line: Line) -> None:
        self._line, self._came = line, threading.Condition()
        self._found: dict[str, dict[int, bytes]] = {}

    def leave(self, name: str, value: bytes) -> None:
        """Leave a note for process 0; process 0: for all others. Use each ``name`` once."""
        self._line.send(note=[name, b64encode(value).decode()])

    def add(self, messages: Sequence[Message]) -> None:
        """Take the notes among the messages of the watcher."""
        new = [note for message in messages for note in message.get("notes", ())]
        if new:
            with self._came:
                for rank, name, text in new:
                    self._found.setdefault(name, {})[rank] = b64decode(text)
                self._came.notify_all()

    def wait(self, name: str, count: int, seconds: float) -> dict[int, bytes]:
        """Wait for the notes of that name from ``count`` processes, and return those that came, by their rank.

        When all have come they are forgotten.
        """
        with self._came:
            whole = self._came.wait_for(lambda: len(self._found.get(name, ())) >= count, seconds)
            found = self._found.pop(name, {}) if whole else self._found.get(name, {})
            return dict(found)


def of_job() -> Notes | None:
    """The notes of this process; None if MultiMesh has not started its job."""
    return _of_this_job[-1] if _of_this_job else None


def use(notes: Notes) -> None:
    """Let the processes of this job agree by notes."""
    _of_this_job.append(notes)
