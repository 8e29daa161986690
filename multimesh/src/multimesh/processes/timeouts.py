"""How long processes wait for each other, in seconds: as an argument says, else a variable, else as here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from multimesh.errors import UsageError

DEFAULTS = {
    "start": 60.0,  # in which all processes must have started and met
    "silence": 8.0,  # without a heartbeat of JAX: a process is stopped, or its machine or the network is down
    "compile": 3600.0,  # that processes wait for each other elsewhere: until others have compiled, saved, gathered
    "transfer": 300.0,  # in which the first transfer of two processes must have arrived, once both have come to it
    "stall": 0.0,  # after which a process that makes no progress ends the job; 0: never, it is told only
}
_chosen: dict[str, float] = {}


def variable(name: str) -> str:
    """Return the environment variable that sets a timeout."""
    return f"MULTIMESH_{name.upper()}_TIMEOUT"


def choose(arguments: Mapping[str, float | None]) -> None:
    """Choose the timeouts of this job; leave out a name, or give None, for what is not given.

    Raises ``UsageError`` if one is no positive number; ``stall`` may be 0.
    """
    for name, usual in DEFAULTS.items():
        value = arguments.get(name)
        text = (os.environ.get(variable(name)) or usual) if value is None else value
        try:
            number = float(text)
        except (TypeError, ValueError):
            number = math.nan
        if not (0 < number < math.inf or (name == "stall" and number == 0)):
            source = f"{variable(name)}={text}" if value is None else f"{name}_timeout={value!r}"
            raise UsageError(f"{source}: give a positive number of seconds")
        _chosen[name] = number


def seconds(name: str) -> float:
    """Return a timeout of this job; where MultiMesh has not started it, that of the environment."""
    if not _chosen:
        choose({})
    return _chosen[name]
