"""Messages between the command and the trainer: variables of the environment, and files.

The command writes a `TrainerConfig` into the environment of the trainer. A trainer that only forecasts answers with a
file of JSON, of which the command prints what `--json` asks for: see `trainer.foresight`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import multimesh.schedules

TRAINER = "maxtext.trainers.pre_train.train"

VARIABLE = "MULTIMESH_RUN"
"""Environment variable of every trainer: its `TrainerConfig`. The patched MaxText takes its batches from us then."""

PIPELINE = "MULTIMESH_MAXTEXT"
"""Environment variable that is set for a pipeline beside it. Without both variables the hooks do nothing."""

SECONDS = "perf/step_seconds"
"""Name in the records of the time from the end of the step before to the end of a step."""

TIME = "time/unix_seconds"
MEMORY = "memory/peak_bytes"
UTILIZATION = "perf/mfu"
"""Names in the records of the time of day when a step had ended, of the most memory that a device of process 0 has had
in use by then (on CPU devices: the process), and of the operations of the step as a share of the devices' peak."""


@dataclass(frozen=True)
class TrainerConfig:
    """The message to the trainer beside MaxText's configuration: which process it is, how it runs a pipeline."""

    outcome: str = ""  # file to be written with the reason why the trainer ended
    # rank, count: which process this is of so many that train together
    rank: int = 0
    count: int = 1
    stages: int = 1  # number of pipeline stages; the devices are dealt to them in equal shares
    interleave: int = 1  # pieces of the model per stage
    schedule: str = "1f1b"  # a name that `multimesh.schedules` knows, or ``custom``
    table: str | None = None  # file of the custom schedule
    placement: str = ""  # file to be written with the devices of every parameter and optimizer moment
    # file to be written with the memory that each stage will need; nothing is allocated, compiled or trained then
    forecast: str = ""
    sizes: tuple[int, ...] = ()  # decoder layers of each piece, in the order of the model; empty: all have as many
    route: tuple[int, ...] = ()  # of the schedule ``auto``: stage of each piece; empty: in turn
    chosen: str = ""  # file for the choice of the schedule ``auto``
    limit: int = 0  # bytes that a device has, for the schedule ``auto``; 0 where that is not known
    # dump, dump_only: folder for the plan of the step, and whether that is all to do
    dump: str = ""
    dump_only: bool = False
    profile: str = ""  # folder for measured timelines of the step
    # arrays of the train state with fewer elements than this lie whole on each device of their stage
    replicate_below: int = 0
    # platform, processes: of the devices that a forecast is for, and how many processes share them
    platform: str = ""
    processes: int = 1
    gather_once: bool = False  # whether parameters are gathered before the loop over microbatches, and not in it
    # 1: the state of the optimizer is laid out over the axis of data parallelism too; 2: sums of gradients as well
    zero: int = 0
    # with a forecast: GPUs to compile the kernels for, which need not be here, as arguments of `multimesh.topology`
    target: Mapping[str, Any] | None = None

    def variables(self) -> dict[str, str]:
        """Return the variables to add to the trainer's environment."""
        return {VARIABLE: json.dumps(asdict(self)), **({PIPELINE: "1"} if self.stages > 1 else {})}


def receive(environment: Mapping[str, str]) -> TrainerConfig:
    """Return the `TrainerConfig` in an environment."""
    return TypeAdapter(TrainerConfig).validate_json(environment[VARIABLE])


def find_schedule(name: str, table: Path | str | None) -> multimesh.schedules.Schedule:
    """Return a schedule by its name, or that of a user's table."""
    return multimesh.schedules.get(name) if table is None else multimesh.schedules.load(table)
