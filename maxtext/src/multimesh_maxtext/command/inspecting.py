"""Processes that end before they train: a forecast, a dump of the plan."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from multimesh_maxtext.command.launch import Launch
from multimesh_maxtext.command.reasons import read_meeting, read_refusal, tail
from multimesh_maxtext.command.training import trainer
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import TrainerFailedError
from multimesh_maxtext.handoff import Forecast, read_forecast

_COMPILING = re.compile(r"compiling kernels: [^\n]+")  # the library's lines on progress


def forecast(start: Launch, paths: Paths, tell: Callable[[str], object] = lambda _: None) -> Forecast:
    """Run the process that forecasts; return its forecast. ``tell`` gets its lines on compilation."""
    paths.forecast.unlink(missing_ok=True)
    inspect(start, paths, tell)
    return read_forecast(paths.forecast)


def inspect(start: Launch, paths: Paths, tell: Callable[[str], object] = lambda _: None) -> None:
    """Run a process that ends before it trains. ``tell`` gets the newest line on compilation, about once a second.

    Raises ``UsageError`` where MaxText refuses its settings, and ``TrainerFailedError`` where it fails otherwise.
    """
    told = ""
    with trainer(start, paths) as process:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            lines = _COMPILING.findall(paths.log.read_text(encoding="utf-8", errors="replace"))
            if lines and lines[-1] != told:
                told = lines[-1]
                tell(told)
    if process.returncode:
        log = paths.log.read_text(encoding="utf-8", errors="replace")
        if error := read_refusal(log) or read_meeting(log, process.returncode):
            raise error
        print(tail(paths.log), file=sys.stderr)
        raise TrainerFailedError(f"the trainer failed with exit code {process.returncode}; see {paths.log}")
