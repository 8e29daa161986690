"""The schedule that the flags name, checked before anything is compiled. No JAX."""

from __future__ import annotations

from pathlib import Path

from multimesh import schedules
from multimesh.errors import UsageError
from multimesh_maxtext.options import Options


def find_schedule(name: str, table: Path | str | None) -> schedules.Schedule:
    """Return a schedule by its name, or that of a user's table."""
    return schedules.get(name) if table is None else schedules.load(table)


def schedule_name(options: Options) -> str:
    """Return the name of the schedule: by default 1F1B, interleaved where stages have several pieces."""
    return options.schedule or ("interleaved" if options.interleave > 1 else "1f1b")


def check_schedule(options: Options, microbatches: int) -> None:
    """Raise for a schedule that cannot order these stages and microbatches.

    Raises
    ------
    UsageError
        Naming the flag to change, or the cell of the table that is wrong.
    """
    name, path = schedule_name(options), options.custom_schedule_path
    if (name == "custom") != (path is not None):
        raise UsageError(
            "--schedule custom needs a table; add --custom-schedule-path FILE"
            if path is None
            else f"--custom-schedule-path {path} is for --schedule custom; add that or leave it out"
        )
    if name == "interleaved" and options.interleave == 1:
        raise UsageError("--schedule interleaved is for stages of several pieces; add --interleave 2 or use 1f1b")
    schedule = find_schedule(name, path)
    shape = options.pp, options.interleave, microbatches
    try:
        schedules.validate(schedule.table(*shape, backward=True), *shape)
    except UsageError as error:
        where = f"--custom-schedule-path {path}" if path else f"--schedule {name}"
        raise UsageError(
            f"{where}, --pp {shape[0]}, --interleave {shape[1]}, {shape[2]} microbatches: {error}"
        ) from None
