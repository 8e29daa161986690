"""A profile of a run that is on its way: a file asks for it, as in ``touch OUTPUT/profile``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import jax

ASKED = "profile"
"""Name of the file in the output folder of a process; it is removed once the profile is written."""

FOLDER = "profiles"
"""Folder for the profiles, beside it."""

STEPS = 3
"""Steps of a profile."""

_until: int | None = None


def profile_on_request(output: Path, step: int) -> None:
    """Start a profile of the next steps if the file is there, or end the one that runs. Called after each step.

    An error is told, and ends nothing.
    """
    global _until
    file, folder = output / ASKED, output / FOLDER
    if _until is None:
        if not file.is_file():
            return
        try:
            jax.profiler.start_trace(folder)
            _until = step + STEPS
            print(f"multimesh: profile of steps {step + 1} to {_until} goes to {folder}", flush=True)
        except (RuntimeError, OSError) as error:  # MaxText's own profile runs
            _tell(error, file)
    elif step >= _until:
        _until = None
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:
            _tell(error, file)
        with suppress(OSError):
            file.unlink()


def _tell(error: Exception, file: Path) -> None:
    print(f"multimesh: no profile ({error}); training goes on", flush=True)
    with suppress(OSError):
        file.unlink()
