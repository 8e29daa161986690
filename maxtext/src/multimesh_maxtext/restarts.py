"""Restarts of a job that lost a process: when, why, and which steps were computed again.

``--spawn``, the batch scripts for Slurm, or Kubernetes start it again, and count that in an environment variable.
Process 0 then notes why, in the output folder, where all processes write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multimesh_maxtext.checkpoint import look
from multimesh_maxtext.errors import UsageError
from multimesh_maxtext.member import Member
from multimesh_maxtext.options import Options, Parsed
from multimesh_maxtext.trainer import LOST, Follower
from multimesh_maxtext.translate import Paths

VARIABLE = "MULTIMESH_MAXTEXT_RESTARTS"
"""Name of the environment variable: how often all processes have been started again, 0 at first."""

_WIDTH = 160  # of the table: reasons are not broken


@dataclass(frozen=True)
class Loss:
    """A process that was lost.

    Attributes
    ----------
    at
        When that was noted, in ISO 8601.
    reason
        The words of the others on it.
    done
        How many steps were done by then.
    kept
        How many of them are in the checkpoint from which the job goes on.
    """

    at: str
    reason: str
    done: int
    kept: int


def going_on(parsed: Parsed, environment: Mapping[str, str]) -> Parsed:
    """Let a job that was started again go on with its run, and not remove it."""
    if parsed.options.max_restarts and _number(environment):
        parsed.options.resume, parsed.options.overwrite = True, False
    return parsed


def attempt(options: Options, environment: Mapping[str, str]) -> int:
    """Return how often this job was started again.

    Raises
    ------
    UsageError
        For ``--max-restarts`` where nothing would start it again.
    """
    if options.max_restarts and not options.spawn and VARIABLE not in environment:
        raise UsageError(
            "--max-restarts: nothing here starts the processes again; submit a job.sbatch of a folder beside run.py, "
            "which does, or add --spawn"
        )
    return _number(environment)


def _number(environment: Mapping[str, str]) -> int:
    found = environment.get(VARIABLE, "")
    return int(found) if found.isdigit() else 0


def find_loss(options: Options, paths: Paths, number: int = 0) -> Loss:
    """Describe a process that was lost, from the files of the job before restart ``number``.

    Parameters
    ----------
    paths
        Those of process 0.
    """
    logs = [_last_log(Member(rank).own(paths).log, number) for rank in range(options.nodes)]
    said = [line for log in logs for line in LOST.findall(log)]
    steps = Follower(paths.metrics).poll()
    kept = look(options.checkpoint).next_step if options.checkpoint else 0
    done = max(kept, steps[-1].number + 1 if steps else 0)
    return Loss(datetime.now().isoformat(), said[0] if said else "a process was lost", done, kept)


def _last_log(log: Path, number: int) -> str:
    """Read the log of a process. It may be starting again, and putting its log aside, at this moment."""
    for path in (before(log, number), log, before(log, number)):
        with suppress(OSError):
            return path.read_text(errors="replace")
    return ""


def before(log: Path, number: int) -> Path:
    """Return where the log goes at restart ``number``."""
    return log.with_name(f"{log.stem}-before-restart-{number}{log.suffix}")


def keep_log(log: Path, number: int) -> None:
    """Put the log of the attempt before restart ``number`` aside."""
    with suppress(FileNotFoundError):
        log.rename(before(log, number))


def remember(file: Path, loss: Loss, number: int) -> list[Loss]:
    """Add the loss before restart ``number`` to those of this job in a file; return them all."""
    found = [Loss(**each) for each in json.loads(file.read_text())] if number > 1 and file.exists() else []
    found.append(loss)
    file.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return found


def announce(loss: Loss, number: int, options: Options) -> None:
    """Say on stderr why all processes start again, for the ``number``-th time."""
    count = f"restart {number} of at most {options.max_restarts}"
    print(f"{loss.reason}; all processes start again ({count})", file=sys.stderr)


def show(losses: Sequence[Loss], options: Options) -> None:
    """Print the table of all restarts, if there were any."""
    if losses:
        Console(stderr=options.json, width=_WIDTH).print(table(losses))


def table(losses: Sequence[Loss]) -> Table:
    """Return when and why the job started again, and how many steps were computed once more."""
    result = Table(box=None, pad_edge=False)
    for name in ("restart", "at", "steps done", "in checkpoint", "recomputed"):
        result.add_column(name, justify="right")
    result.add_column("because")
    for number, loss in enumerate(losses, 1):
        counts = loss.done, loss.kept, loss.done - loss.kept
        at = datetime.fromisoformat(loss.at)
        result.add_row(str(number), f"{at:%H:%M:%S}", *map(str, counts), loss.reason)
    return result
