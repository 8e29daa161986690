"""Why a trainer ended before its last step, as its log says."""

from __future__ import annotations

import re
from pathlib import Path

from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.command import logs
from multimesh_maxtext.errors import (
    DoesNotFitError,
    LauncherError,
    PreemptedError,
    StoppedEarlyError,
    UsageError,
)

_TAIL = 20  # lines of a failed trainer's log

LOST = re.compile(
    r"^multimesh: (?:.* ends because )?(.* (?:was killed|ended|has been|is gone|failed: LostProcessError:) .*?)"
    r"(?: after \d+ steps?)?$",
    re.MULTILINE,
)
"""A line of a trainer's log on a process that was lost; how far that came, we know better."""

NAMED = re.compile(r"process \d+ of \d+ ")
"""Begins an error that names a process."""

_MEETING = re.compile(r"^multimesh: (.*)$", re.MULTILINE)
_STOPPED = re.compile(r"Training stopped: (.*)$", re.MULTILINE)
_SIGNAL = "termination signal"
"""MaxText's words where a signal ended the training, after a checkpoint."""
_NO_MORE = "run out of training data"
"""MaxText's words where its data ended; it takes any error of its input for a reason to stop."""

_REFUSED = re.compile(r"^(?:(\w[\w.]*)\n)?  (?:Value error, )?(.+?) \[type=\w+, ", re.MULTILINE | re.DOTALL)
"""A setting that MaxText refuses, and why, as pydantic prints it."""

_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED: Out of memory.*|std::bad_alloc|\bMemoryError\b.*|Unable to allocate .*|Cannot allocate memory"
)
"""Words of XLA, C++, Python, NumPy and Linux where memory has ended."""

_MORE_MEMORY = {
    "cpu": (
        "this machine",
        "use fewer devices or smaller sizes here, or ask for more: --mem of Slurm, --memory of Docker",
    ),
    "gpu": (
        "a GPU",
        "use a smaller --microbatch-size, --remat full, or more --pp or --fsdp; --forecast shows the needs",
    ),
}


def count_steps(error: LauncherError) -> str:
    """Return how far a trainer came, in the words of `judge`."""
    return f"after {str(error).partition(' after ')[2].partition(';')[0].removesuffix(' without an error')}"


def resume_advice(checkpoints: Path | None) -> str:
    """Return how to go on with a run that ended too early."""
    steps = look(checkpoints).steps if checkpoints else ()
    if not steps:
        return "no checkpoint is complete: start the same line again"
    return f"checkpoint {steps[-1]} is complete: start the same line with --resume"


def read_refusal(log: str) -> UsageError | None:
    """Return the error of the settings in MaxText's log; ``None`` if MaxText took them."""
    _, found, told = log.rpartition(" for MaxTextConfig\n")
    told = "".join(line for line in told.splitlines(keepends=True) if not line.startswith("    For further"))
    wrong = [" ".join(": ".join(filter(None, said)).split()) for said in _REFUSED.findall(told)]
    return UsageError(f"MaxText refuses these settings: {'; '.join(wrong)}") if found and wrong else None


def read_meeting(log: str, returncode: int) -> UsageError | None:
    """Return the error of processes that could not become one job, as the library told it; each has its own."""
    said = _MEETING.findall(log) if returncode == UsageError.exit_code else []
    if not said:
        return None
    error = UsageError(said[-1])
    error.shared = False
    return error


def out_of_memory(log: str, platform: str, error: LauncherError) -> DoesNotFitError | None:
    """Return the error of a trainer for which memory did not suffice; ``None`` if its log has none of the words."""
    found = _MEMORY.findall(log)
    if not found or isinstance(error, StoppedEarlyError):
        return None
    where, remedy = _MORE_MEMORY["cpu" if platform == "cpu" or "RESOURCE" not in found[-1] else "gpu"]
    return DoesNotFitError(
        f"the memory of {where} did not suffice {count_steps(error)} ({found[-1].strip()}); {remedy}"
    )


def has_saved(log: str) -> bool:
    """Return whether MaxText's log says that a signal ended the training, after a checkpoint."""
    return any(_SIGNAL in why for why in _STOPPED.findall(log))


def explain_stop(log: str, error: LauncherError) -> LauncherError:
    """Return the error of a trainer that ended before its last step, with the reason that MaxText's log gives."""
    if not isinstance(error, StoppedEarlyError) or not (found := _STOPPED.search(log)):
        return error
    if has_saved(log):
        done = str(error).partition(" after ")[2].partition(" without")[0]
        return PreemptedError(
            f"a signal ended the run after {done}, and a checkpoint was written; add --resume to go on"
        )
    if _NO_MORE in found[1]:
        return StoppedEarlyError(
            f"the data ended: {error}; use fewer --num-steps, more data, or num_epoch= to read it several times"
        )
    return StoppedEarlyError(f"{error}: {found[1]}")


def tail(log: Path) -> str:
    """Return the end of a failed trainer's log, indented."""
    lines = logs.read_log(log).splitlines()[-_TAIL:]
    return "\n".join(f"  | {line}" for line in lines)
