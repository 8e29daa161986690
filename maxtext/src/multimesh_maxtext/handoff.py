"""What ``run.py`` tells the hooks in the trainer's process: MaxText refuses settings that it does not know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from multimesh.errors import UsageError

VARIABLE = "MULTIMESH_MAXTEXT"
"""Name of the environment variable; where it is not set the hooks of the patched MaxText do nothing."""


@dataclass(frozen=True)
class Handoff:
    """How to run the pipeline.

    Attributes
    ----------
    stages
        Number of pipeline stages; the devices are dealt to them in equal shares.
    interleave
        Pieces of the model per stage.
    schedule
        A name that `multimesh.schedules` knows, or ``custom``.
    table
        File of the custom schedule.
    placement
        File to be written with the devices of every parameter and optimizer moment.
    forecast
        File to be written with the memory that each stage will need; nothing is allocated, compiled or trained then.
    dump, dump_passes, dump_only
        Folder for the plan of the step; whether every pass of MultiMesh goes there too, and whether that is all to do.
    profile
        Folder for measured timelines of the step.
    """

    stages: int
    interleave: int
    schedule: str
    table: str | None
    placement: str
    forecast: str = ""
    dump: str = ""
    dump_passes: bool = False
    dump_only: bool = False
    profile: str = ""

    def variables(self) -> dict[str, str]:
        """Return what to add to the trainer's environment."""
        return {VARIABLE: json.dumps(asdict(self))}


def received(environment: Mapping[str, str]) -> Handoff:
    """Return what an environment hands over.

    Raises
    ------
    UsageError
        Where the variable does not hold a `Handoff`.
    """
    try:
        handoff = Handoff(**json.loads(environment[VARIABLE]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{VARIABLE} is not what maxtext/run.py writes ({error}); start MaxText with it") from error
    return handoff
