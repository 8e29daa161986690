"""A batch job of Slurm: submitted, followed to its end with its output shown, cancelled when nobody waits any more."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workflows import errors, proc

PROGRAMS = ("sbatch", "srun", "squeue", "scancel")
_POLL_S = 5.0
_PATIENCE_S = 20.0
_SILENCE_S = 300.0  # how long a controller may not answer before the job counts as lost
_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)
_FIELDS = "State:32,exit_code:12,TimeUsed:20,Reason:64"


@dataclass(frozen=True)
class State:
    """Where a job stands: Slurm's word for it, its exit code (a signal is negative), how long it ran, why it waits."""

    word: str
    exit_code: int
    ran: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.word in _ENDED

    @property
    def line(self) -> str:
        """For people."""
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.word.lower()}{why}, {self.ran}"


def missing() -> str | None:
    """Return what keeps jobs from being submitted here; None if nothing does."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"no {program} here"
    try:
        told = proc.run(["sinfo", "--noheader", "--format=%D"], check=False, timeout_s=_PATIENCE_S)
    except TimeoutError as error:
        return f"Slurm does not answer ({error})"
    return None if told.returncode == 0 else f"Slurm does not answer ({told.complaint})"


def runs_containers() -> bool:
    """Say whether ``srun`` itself starts containers: the plugin pyxis."""
    return "--container-image" in proc.run(["srun", "--help"]).text


def submit(argv: Sequence[str], environment: Mapping[str, str], *, cwd: Path) -> str:
    """Submit a job and return its number; its processes start in ``cwd``.

    Raises
    ------
    SmokeError
        Slurm does not take it.
    """
    done = proc.run(argv, env=environment, cwd=cwd, check=False)
    if done.returncode:
        raise errors.SmokeError(f"Slurm does not take the job ({done.complaint}); no tag was moved")
    return done.text.partition(";")[0].strip()


def follow(job: str, log: Path, on_line: Callable[[str], None], on_state: Callable[[State], None]) -> State:
    """Return how a job ended; cancel it if this is interrupted.

    Parameters
    ----------
    log
        The job's output; every line is handed on as it is written.
    """
    seen, before, heard = 0, State("", 0, "", ""), time.monotonic()
    try:
        while True:
            if (now := state(job)) is not None:
                heard = time.monotonic()
                if (now.word, now.reason) != (before.word, before.reason):
                    on_state(now)
                    before = now
            elif time.monotonic() - heard > _SILENCE_S:
                raise errors.SmokeError(
                    f"Slurm says nothing of job {job} for {_SILENCE_S:.0f} s; look for it, and at {log}"
                )
            seen = _new_lines(log, seen, on_line)
            if now is not None and now.ended:
                return now
            time.sleep(_POLL_S)
    except BaseException:
        proc.run(["scancel", job], check=False)
        raise


def state(job: str) -> State | None:
    """Return where a job stands, or None where Slurm gives no answer now."""
    ask = ["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--Format={_FIELDS}"]
    told = proc.run(ask, check=False)
    if told.returncode == 0 and told.text.strip():
        return parse(told.text.splitlines()[0])
    # Long after its end only the accounts know a job, where the cluster keeps any.
    ask = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State,ExitCode,Elapsed"]
    if shutil.which("sacct") is None or (told := proc.run(ask, check=False)).returncode or not told.text.strip():
        return None
    word, code, ran = told.text.splitlines()[0].split("|")
    status, signal = map(int, code.split(":"))
    return State(word.partition(" ")[0], -signal or status, ran, "")


def parse(line: str) -> State:
    """Read a line of squeue: fields of fixed width, because reasons hold blanks."""
    fields, at = list[str](), 0
    for width in map(int, re.findall(r":(\d+)", _FIELDS)):
        fields.append(line[at : at + width].strip())
        at += width
    word, status, ran, reason = fields
    return State(word, os.waitstatus_to_exitcode(int(status)), ran, reason)


def _new_lines(log: Path, seen: int, on_line: Callable[[str], None]) -> int:
    """Hand on what a log has got since; return how far it was read, to the end of a line."""
    if not log.exists():
        return seen
    with log.open("rb") as file:
        file.seek(seen)
        whole, newline, _ = file.read().rpartition(b"\n")
    for line in whole.decode("utf-8", "replace").splitlines():
        on_line(line)
    return seen + len(whole) + len(newline)
