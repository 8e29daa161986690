"""A Python program as several processes of one job on this machine. Nothing here imports JAX."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from multimesh import launch
from multimesh.errors import UsageError


def spawn(program: Sequence[str], processes: int, *, label: bool = False) -> int:
    """Start a program, a file or ``-m`` and a module, with its arguments as so many processes, and wait for all.

    Return 0, or the exit code of the first that failed, 128 more than the number of a signal that ended it. The others
    are ended then. With ``label`` the number of a process stands before each line that it prints.
    """
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise UsageError(f"spawn: there is no file {program[0]!r}; give the Python program after the flags")

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    # A program that writes to a pipe would keep its lines for a while; a killed one would take them along.
    job = {"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"), **launch.job_variables()}
    environments = [job | launch.process_variables(rank, processes) for rank in range(processes)]
    width = len(str(processes - 1))
    labels = [f"{rank:{width}}: " if label else "" for rank in range(processes)]
    commands = [[sys.executable, *program]] * processes
    code = launch.run_together(commands, environments, labels=labels if label or processes > 1 else None)
    return code if code >= 0 else 128 - code
