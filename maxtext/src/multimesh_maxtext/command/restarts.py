"""Attempts of a job that starts again by itself: on which grid, why each ended, and what share of the time counted.

``--spawn``, the batch scripts for Slurm, or Kubernetes start it again, and count that in an environment variable.
Process 0 then notes why, in the output folder, where all processes write.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.command import logs
from multimesh_maxtext.command.member import Member
from multimesh_maxtext.command.options import Options, Parsed
from multimesh_maxtext.command.reasons import LOST, has_saved
from multimesh_maxtext.command.report import Step
from multimesh_maxtext.command.training import Follower
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import UsageError

VARIABLE = "MULTIMESH_MAXTEXT_RESTARTS"
"""Name of the environment variable: how often all processes have been started again, 0 at first."""

_SAVED = "a signal ended the run"
_GROWN = "more processes fit again"

_WIDTH = 160  # of the table: reasons are not broken


@dataclass(frozen=True)
class Attempt:
    """One start of all processes."""

    # began, ended: when, in ISO 8601; ``ended`` is empty while it goes on
    began: str
    grid: str  # the parallelism: ``dp 2 pp 4``
    processes: int  # how many there are
    first: int  # the step that it began with
    done: int = 0  # the step after the last one that it did
    ended: str = ""
    because: str = ""  # why it ended


def continue_attempts(parsed: Parsed, environment: Mapping[str, str]) -> Parsed:
    """Let a job that was started again go on with its run, and not remove it."""
    if parsed.options.max_restarts and _number(environment):
        parsed.options.resume, parsed.options.overwrite = True, False
    return parsed


def attempt(options: Options, environment: Mapping[str, str]) -> int:
    """Return how often this job was started again.

    Raises ``UsageError`` for ``--max-restarts`` where nothing would start it again.
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


def now() -> str:
    """Return the time, as attempts keep it."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def begin(options: Options, paths: Paths, number: int) -> list[Attempt]:
    """Note an attempt that begins, and why the one before it ended; return all of this job.

    ``paths``: those of process 0.
    ``number``: how many attempts came before.
    """
    found = read_attempts(paths.restarts) if number else []
    if found and not found[-1].ended:
        found[-1] = _lost(found[-1], options, paths, number)
    if found:
        if found[-1].processes < options.nodes and found[-1].because.startswith(_SAVED):
            found[-1] = replace(found[-1], because=_GROWN)  # who started it ended the smaller job for that
        announce(found[-1], number, options)
    first = look(options.checkpoint).next_step if options.checkpoint else 0
    found.append(Attempt(now(), options.grid, options.nodes, first, first))
    return _write(paths.restarts, found)


def close_attempt(options: Options, paths: Paths, number: int) -> Attempt | None:
    """Return the newest attempt, also if its process 0 was killed before it noted the end; none if none began."""
    found = read_attempts(paths.restarts)
    return (found[-1] if found[-1].ended else _lost(found[-1], options, paths, number)) if found else None


def end(paths: Paths, because: str, done: int) -> list[Attempt]:
    """Note how the newest attempt ended, of which process 0 knows; return all."""
    found = read_attempts(paths.restarts)
    found[-1] = replace(found[-1], ended=now(), because=because, done=max(done, found[-1].first))
    return _write(paths.restarts, found)


def read_attempts(file: Path) -> list[Attempt]:
    """Return the attempts that a file has; none where nobody noted any."""
    with suppress(OSError, ValueError, TypeError):
        return [Attempt(**each) for each in json.loads(file.read_text())]
    return []


def _write(file: Path, attempts: list[Attempt]) -> list[Attempt]:
    half = file.with_suffix(".new")
    half.write_text(json.dumps([asdict(each) for each in attempts], indent=1))
    half.replace(file)
    return attempts


def _lost(open_one: Attempt, options: Options, paths: Paths, number: int) -> Attempt:
    """Describe an attempt whose process 0 said nothing at its end, from the files that it left."""
    grows = options.nodes > open_one.processes
    because = _GROWN if grows else reason(options, paths, open_one.processes, number)
    return replace(open_one, ended=_last_sign(paths) or now(), because=because, done=_done(options, paths))


def _last_sign(paths: Paths) -> str:
    """Return when process 0 last wrote something, before its log is put aside; empty where it did not."""
    times = [file.stat().st_mtime for file in (paths.log, paths.metrics) if file.exists()]
    return datetime.fromtimestamp(max(times)).astimezone().isoformat(timespec="milliseconds") if times else ""


def reason(options: Options, paths: Paths, processes: int, number: int = 0) -> str:
    """Return why an attempt ended, by the logs of its processes, and how far it came, before restart ``number``."""
    texts = [_last_log(Member(rank).own(paths).log, number) for rank in range(processes)]
    if lost := [line for text in texts for line in LOST.findall(text)]:
        return f"{lost[0]} after {_done(options, paths)} of {options.num_steps} steps"
    return f"{_SAVED}, and a checkpoint was written" if any(map(has_saved, texts)) else "a process was lost"


def _done(options: Options, paths: Paths) -> int:
    """Return the step after the last one that was done."""
    steps = Follower(paths.metrics).poll()
    kept = look(options.checkpoint).next_step if options.checkpoint else 0
    return max(kept, steps[-1].number + 1 if steps else 0)


def _last_log(log: Path, number: int) -> str:
    """Read the log of a process. It may be starting again, and putting its log aside, at this moment."""
    for path in (before(log, number), log, before(log, number)):
        with suppress(OSError):
            path.stat()
            return logs.read_log(path)
    return ""


def before(log: Path, number: int) -> Path:
    """Return where the log goes at restart ``number``."""
    return log.with_name(f"{log.stem}-before-restart-{number}{log.suffix}")


def keep_log(log: Path, number: int) -> None:
    """Put the log of the attempt before restart ``number`` aside."""
    logs.move_log(log, before(log, number))


def announce(last: Attempt, number: int, options: Options) -> None:
    """Say on stderr why all processes start again, for the ``number``-th time, and on which grid if it is another."""
    limit = f" of at most {options.max_restarts}" if number <= (options.max_restarts or 0) else ""
    count = f"restart {number}{limit}"  # a job that Slurm starts anew counts on
    grid = "" if options.grid == last.grid else f" on {options.grid}"
    print(f"{last.because}; all processes start again{grid} ({count})", file=sys.stderr)


def show(attempts: Sequence[Attempt], steps: Iterable[Step], options: Options) -> None:
    """Print the table of all attempts and what share of the time counted, if there was more than one."""
    if len(attempts) < 2:
        return
    console = Console(stderr=options.json, width=_WIDTH)
    console.print(attempt_table(attempts))
    console.print(goodput(attempts, steps), highlight=False)


def attempt_table(attempts: Sequence[Attempt]) -> Table:
    """Return when each attempt began and on which grid, the steps that it did, how many counted, and why it ended."""
    result = Table(box=None, pad_edge=False)
    for name in ("attempt", "at", "grid", "processes", "steps", "counted", "seconds"):
        result.add_column(name, justify="left" if name == "grid" else "right", no_wrap=True)
    result.add_column("ended because")
    for number, (each, counted) in enumerate(zip(attempts, _count_steps(attempts), strict=True), 1):
        steps = f"{each.first}-{each.done - 1}" if each.done > each.first else "none"
        at = datetime.fromisoformat(each.began)
        cells = f"{at:%H:%M:%S}", each.grid, each.processes, steps, counted, f"{_seconds(each):.1f}", each.because
        result.add_row(str(number), *map(str, cells))
    return result


def goodput(attempts: Sequence[Attempt], steps: Iterable[Step]) -> str:
    """Return the share of the time since the first start that went into steps that counted, as a sentence.

    A step counts with the median time of the steps that counted in its attempt. So what a first step compiles, and the
    pauses of checkpoints, are no part of it.
    """
    seconds = {step.number: step.seconds for step in steps}
    good, number = 0.0, 0
    for each, counted in zip(attempts, _count_steps(attempts), strict=True):
        known = [seconds[n] for n in range(each.first, each.first + counted) if n in seconds]
        good += counted * statistics.median(known) if known else 0.0
        number += counted
    whole = (datetime.fromisoformat(attempts[-1].ended) - datetime.fromisoformat(attempts[0].began)).total_seconds()
    return f"goodput {100 * good / whole:.1f} %: {number} steps that counted took {good:.1f} of {whole:.1f} seconds"


def _count_steps(attempts: Sequence[Attempt]) -> list[int]:
    """How many steps of each attempt were not done again by the next one."""
    kept = [max(0, after.first - each.first) for each, after in pairwise(attempts)]
    return [*kept, attempts[-1].done - attempts[-1].first]


def _seconds(each: Attempt) -> float:
    return (datetime.fromisoformat(each.ended) - datetime.fromisoformat(each.began)).total_seconds()
