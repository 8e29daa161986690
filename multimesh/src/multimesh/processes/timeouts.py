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


def choose(given: Mapping[str, float | None]) -> Timeouts:
    """Return the timeouts that are given, else those in the environment, else the usual ones.

    Leave out a name, or give None, for what is not given.

    Raises ``UsageError`` if one is no positive number; ``stall`` may be 0.
    """
    found: dict[str, float] = {}
    for name in (field.name for field in dataclasses.fields(Timeouts)):
        value = given.get(name)
        text = os.environ.get(variable(name)) if value is None else value
        if text is None or text == "":
            continue
        source = f"{variable(name)}={text}" if value is None else f"{name}_timeout={value!r}"
        try:
            found[name] = float(text)
        except (TypeError, ValueError):
            raise UsageError(f"{source}: give a number of seconds") from None
        if not (math.isfinite(found[name]) and (found[name] > 0 or (name == "stall" and found[name] == 0))):
            raise UsageError(f"{source}: give a positive number of seconds")
    return Timeouts(**found)


_now: Timeouts | None = None


def current() -> Timeouts:
    """Return the timeouts of this job; where MultiMesh has not started it, those of the environment."""
    global _now
    if _now is None:
        _now = choose({})
    return _now


def use(timeouts: Timeouts) -> None:
    """Set the timeouts of this job."""
    global _now
    _now = timeouts
