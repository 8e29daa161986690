"""One training from start to verdict: the trainer's process, its progress, whether it succeeded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from multimesh.errors import MultiMeshError, StoppedEarlyError, TrainerFailedError
from multimesh_maxtext import memory, report
from multimesh_maxtext.checkpoint import Beginning, explained
from multimesh_maxtext.checks import Job
from multimesh_maxtext.memory import Need
from multimesh_maxtext.metrics import Evaluation, Follower, Step, keep_before
from multimesh_maxtext.process import trainer
from multimesh_maxtext.translate import Launch, Paths
from multimesh_maxtext.verdict import judge

_POLL = 0.1  # seconds between looks at the metrics file
_TAIL = 20  # lines of a failed trainer's log


@dataclass(frozen=True)
class Outcome:
    """The steps and evaluations that completed, and why the run is no success: ``None`` if it is; the log tells."""

    steps: list[Step]
    evaluations: list[Evaluation]
    error: MultiMeshError | None
    log: Path


def train(job: Job, start: Launch, paths: Paths, console: Console, begin: Beginning) -> Outcome:
    """Start the trainer, show its progress and judge the run."""
    o = job.options
    if not o.json:
        console.print(_headline(job), highlight=False)
        console.print(f"output {paths.output}\nlog    {paths.log}", highlight=False)
    before = keep_before(paths.metrics, paths.log, begin.step)
    skip = paths.metrics.stat().st_size if paths.metrics.exists() else 0
    follower = Follower(paths.metrics, paths.log, skip=skip)
    steps, returncode = _follow(follower, start, paths, console, begin, total=o.num_steps, quiet=o.json)
    error: MultiMeshError | None = None
    try:
        judge(steps, expected=o.num_steps, returncode=returncode, log=paths.log, before=before, first=begin.step)
    except (TrainerFailedError, StoppedEarlyError) as ended:
        log = paths.log.read_text(encoding="utf-8", errors="replace")
        error = explained(log, o.checkpoint) if o.checkpoint else None
        error = error or ended
    except MultiMeshError as wrong:
        error = wrong
    return Outcome(steps, follower.evaluations, error, paths.log)


def forecast(start: Launch, paths: Paths) -> list[Need]:
    """Run the process that forecasts; return the need of each stage."""
    paths.forecast.unlink(missing_ok=True)
    inspect(start, paths)
    return memory.read(paths.forecast)


def inspect(start: Launch, paths: Paths) -> None:
    """Run a process that ends before it trains.

    Raises
    ------
    TrainerFailedError
        Where it fails.
    """
    with trainer(start, paths) as process:
        process.wait()
    if process.returncode:
        print(tail(paths.log), file=sys.stderr)
        raise TrainerFailedError(f"the trainer failed with exit code {process.returncode}; see {paths.log}")


def tail(log: Path) -> str:
    """Return the end of a failed trainer's log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
    return "\n".join(f"  | {line}" for line in lines)


def _headline(job: Job) -> str:
    o = job.options
    axes = ((name, getattr(o, name)) for name in ("dp", "fsdp", "tp", "pp", "ep", "interleave"))
    grid = " ".join(f"{name} {size}" for name, size in axes if size > 1) or "no parallelism"
    use = "in the pipeline" if o.pp > 1 else "accumulated"
    return (
        f"MaxText, backend {o.backend}, {job.devices} {o.platform} devices: {grid}; {job.model.layers} layers; "
        f"batch {job.batch} = {job.microbatches} microbatches {use}"
    )


def _follow(
    follower: Follower, start: Launch, paths: Paths, console: Console, begin: Beginning, *, total: int, quiet: bool
) -> tuple[list[Step], int]:
    steps: list[Step] = []
    with (
        report.progress(console, total, quiet=quiet) as show,
        trainer(start, paths, inherited=begin.inherited) as process,
    ):
        running = True
        while running:
            try:
                process.wait(_POLL)
                running = False
            except subprocess.TimeoutExpired:
                pass
            for step in follower.poll():
                steps.append(step)
                show(step)
    return steps, process.returncode
