"""Lines of MultiMesh in the trainer's log that an operator should see at once: who holds up the others, and where."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from multimesh_maxtext.handoff import MEDIAN, SLOWEST, WORST

_HOLDS_UP = re.compile(r"multimesh: .* (?:is|has been) (?:in|after) step |multimesh: .* (?:waits? for|is slow after) ")
_STACK = re.compile(r"\s|Thread |Current thread ")
"""Begins a line of a Python stack, which follows."""

_MOST = 400
"""So many lines are shown of a run; all are in the log."""


class HoldUps:
    """Shows such lines of a log on stderr."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._within, self._shown = False, 0

    def show(self, lines: Iterable[str]) -> None:
        """Show those of the lines that came since the last look; NUL, which a stack may begin with, is left out."""
        for line in (line.replace("\0", "") for line in lines):
            self._within = bool(_HOLDS_UP.match(line)) or (self._within and bool(_STACK.match(line)))
            if self._within and self._shown < _MOST:
                print(line, file=sys.stderr)
                self._shown += 1


def read_speeds(metrics: Path) -> dict[str, float]:
    """Return the newest comparison of the processes in the records of a run; empty for a run of one process."""
    newest = "{}"
    with suppress(OSError):
        newest = next((line for line in reversed(metrics.read_text().splitlines()) if SLOWEST in line), newest)
    found = json.loads(newest)
    return {name.partition("/")[2]: found[name] for name in (MEDIAN, WORST, SLOWEST) if name in found}
