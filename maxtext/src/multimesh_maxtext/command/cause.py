"""Why a job of several processes ended: of the errors that they find, the one that is no echo of another.

Each process leaves its error in the output folder that they share. One that only knows that its trainer was ended, or
that another process was lost, looks there for a better reason, and tells that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multimesh_maxtext.command.reasons import NAMED
from multimesh_maxtext.errors import LauncherError, ProcessLostError, TrainerFailedError

_PATIENCE = 3.0  # seconds that a process waits for a better reason than its own
_POLL = 0.05


@dataclass(frozen=True)
class Causes:
    """The errors of one attempt of a job.

    Attributes
    ----------
    folder
        The output folder that its processes share.
    attempt
        How often the job was started again.
    rank, count
        The number of this process, and how many there are.
    """

    folder: Path
    attempt: int
    rank: int
    count: int

    def begin(self) -> None:
        """Forget what an earlier run left. All processes do so before any of them trains."""
        self._file(self.rank).unlink(missing_ok=True)

    def note(self, error: LauncherError) -> None:
        """Leave the error of this process to the others."""
        if self.count > 1:
            half = self._file(self.rank).with_suffix(".new")
            with suppress(OSError):
                half.write_text(json.dumps([_doubt(error), error.exit_code, str(error)]))
                half.replace(self._file(self.rank))

    def settle(self, error: LauncherError) -> LauncherError:
        """Return the error of this process, or that of another one if it is a better reason.

        That one is `LauncherError.shared`: another process tells it.
        """
        self.note(error)
        end = time.monotonic() + _PATIENCE
        while self.count > 1 and _doubt(error):
            found = min(self._others(), default=None)
            if found and (found[0] == 0 or time.monotonic() > end):
                return _error_of(*found[1:]) if found[0] < _doubt(error) else error
            if time.monotonic() > end:
                break
            time.sleep(_POLL)
        return error

    def _others(self) -> Iterator[tuple[int, int, int, str]]:
        for rank in range(self.count):
            with suppress(OSError, ValueError):
                if rank != self.rank:
                    doubt, code, text = json.loads(self._file(rank).read_text())
                    yield doubt, rank, code, text

    def _file(self, rank: int) -> Path:
        return self.folder / f".cause-{self.attempt}-{rank}"


def _doubt(error: LauncherError) -> int:
    """Return 0 for a cause, 1 for a process that was lost, and 2 for a trainer that ended for a reason unknown."""
    if isinstance(error, ProcessLostError):
        return 1 if NAMED.match(str(error)) else 2
    return 2 if isinstance(error, TrainerFailedError) else 0


def _error_of(rank: int, code: int, text: str) -> LauncherError:
    known: tuple[type[LauncherError], ...] = (ProcessLostError, *LauncherError.__subclasses__())
    kinds = {kind.exit_code: kind for kind in known}
    error = kinds.get(code, TrainerFailedError)(text if NAMED.match(text) else f"process {rank}: {text}")
    error.shared = True
    return error
