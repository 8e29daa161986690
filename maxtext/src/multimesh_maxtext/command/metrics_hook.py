"""Calls a function of the user's with the record of each step and evaluation, in the process that started the run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multimesh_maxtext.errors import FileError, UsageError


class MetricsHook:
    """A function of the user's that takes records. What it raises is told once, and ends nothing.

    Attributes
    ----------
    failed, calls
        How often it raised an error, of how many calls.
    """

    def __init__(self, name: str, fn: Callable[[Mapping[str, Any]], object]) -> None:
        self._name = name
        self._fn = fn
        self.calls = self.failed = 0

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Call it with a copy of a record."""
        self.calls += 1
        try:
            self._fn(dict(record))
        except Exception as error:  # noqa: BLE001 - whatever a user's code raises, training goes on
            self.failed += 1
            if self.failed == 1:
                _warn(
                    f"--metrics-hook {self._name}: {type(error).__name__} at step {record['step']:g}: {error}; "
                    "training goes on, and it is called with the next record"
                )

    def end(self) -> None:
        """Say how many records it missed, if any."""
        if self.failed:
            missed = f"{self.failed} of {self.calls} records"
            _warn(f"--metrics-hook {self._name} failed for {missed}; they are in the metrics file")


def load(name: str) -> MetricsHook:
    """Import ``module:function``. The module may lie in the working folder.

    Raises ``UsageError`` for a name of another form, and one that is no function of the module, and ``FileError`` where
    the module cannot be imported.
    """
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise UsageError(f"--metrics-hook {name}: write MODULE:FUNCTION, such as my_hooks:log")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last: a file of the user's must not shadow a module of ours
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        raise FileError(
            f"--metrics-hook {name}: {module} cannot be imported ({type(error).__name__}: {error}); install it, or put "
            "it into the working folder"
        ) from error
    if not callable(found):
        raise UsageError(f"--metrics-hook {name}: {module} has no function {function}; write its name")
    return MetricsHook(name, found)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
