"""How long processes wait for each other: settings by argument, else by variable, else as here."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping

from multimesh.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds; ``MULTIMESH_START_TIMEOUT`` and so on in the environment."""

    start: float = 60.0  # in which all processes must have started and met
    # without a heartbeat of JAX, because a process is stopped, or its machine or the network is down
    silence: float = 8.0
    # that processes wait for each other elsewhere: until the others have compiled, saved, gathered
    compile: float = 3600.0
    # in which the first transfer between two processes must have arrived, once both have come to it
    transfer: float = 300.0
    stall: float = 0.0  # after which a process that makes no progress ends the job; 0: never, it is told only


def variable(name: str) -> str:
    """Return the environment variable that sets a timeout."""
    return f"MULTIMESH_{name.upper()}_TIMEOUT"


def choose(overrides: Mapping[str, float | None]) -> Timeouts:
    """Return the timeouts that are given, else those in the environment, else the usual ones.

    Leave out a name, or give None, for what is not given.

    Raises ``UsageError`` if one is no positive number; ``stall`` may be 0.
    """
    seconds: dict[str, float] = {}
    for name in (field.name for field in dataclasses.fields(Timeouts)):
        value = overrides.get(name)
        text = os.environ.get(variable(name), "") if value is None else value
        if text == "":
            continue
        try:
            number = float(text)
        except (TypeError, ValueError):
            number = math.nan
        if not (0 < number < math.inf or (name == "stall" and number == 0)):
            source = f"{variable(name)}={text}" if value is None else f"{name}_timeout={value!r}"
            raise UsageError(f"{source}: give a positive number of seconds")
        seconds[name] = number
    return Timeouts(**seconds)


_of_job: list[Timeouts] = []


def use(timeouts: Timeouts) -> None:
    """Set the timeouts of this job."""
    _of_job[:] = [timeouts]


def current() -> Timeouts:
    """Return the timeouts of this job; where MultiMesh has not started it, those of the environment."""
    if not _of_job:
        use(choose({}))
    return _of_job[0]
