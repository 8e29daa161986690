"""A job that trains: from its newest checkpoint that is whole, with ``--verify`` once more without the pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.command.checkpoint import beginning
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.report import headline, progress, report, step_line
from multimesh_maxtext.command.steps import Listeners, Run, compare, judge, tail
from multimesh_maxtext.command.training import Start, StopRequest, find_cause, run_trainers
from multimesh_maxtext.errors import DamagedCheckpointError, LauncherError, UnreadError

_NEWS = "multimesh: "  # begins lines of a log that an operator should see at once: who is lost, or holds up the others

Training = tuple[Job, Sequence[Start]]
"""A job, and the trainers that this process starts for it: its own, or with ``--spawn`` all."""


def train_job(
    trainings: Sequence[Training], places: Sequence[Paths], console: Console, stop: StopRequest, listeners: Listeners
) -> int:
    """Train, judge, compare, report; return the exit code.

    ``trainings``: the job, and what it is compared with, if anything.
    ``places``: where all processes of the job write.
    """
    stop.trains = True
    (job, _), *others = trainings
    run = train(trainings[0], places, console, stop, listeners)
    for other in others if not run.error else ():
        reference = train(other, (), console, stop, {})
        run.error = reference.error or compare(run, reference.steps, str(job.model.resolved.get("dtype")))
    return report(job, run, console)


def train(
    training: Training, places: Sequence[Paths], console: Console, stop: StopRequest, listeners: Listeners
) -> Run:
    """Train from the newest checkpoint on, or from the one before where it is damaged; where all steps ran, no more."""
    job, starts = training
    o, paths = job.flags, starts[0][1]
    while True:
        with beginning(job, first=not paths.rank) as step:
            run = Run(paths, range(step, o.num_steps), listeners)
            if run.planned:
                console.print(headline(job, paths))
                run.error = follow(run, training, console, stop)
        if run.error and len(starts) < len(places):
            run.error = find_cause(run.error, paths.rank, places)
        if not isinstance(run.error, DamagedCheckpointError) or not look(o.checkpoint or Path()):
            return run
        if not paths.rank:
            print(run.error, file=sys.stderr)


def follow(run: Run, training: Training, console: Console, stop: StopRequest) -> LauncherError | None:
    """Start trainers, show their progress, tell the records to others; return why the run is no success."""
    (job, starts), paths, news = training, run.paths, tail(run.paths.log)
    o = job.flags

    def look_on() -> bool:
        for line in next(news):
            if line.startswith(_NEWS) and not paths.rank:
                print(line, file=sys.stderr)
        steps = run.read()
        if steps and steps == run.steps:  # a run that failed before its first step leaves nothing
            paths.running.write_text(str(o.checkpoint.resolve()) if o.checkpoint else os.devnull)
        for step in steps:
            show(step_line(step, o.num_steps))
        return bool(o.checkpoint and run.steps)  # before its first step there is nothing to save

    try:
        with progress(console, "starting MaxText; it compiles before the first step") as show:
            return judge(run, run_trainers(starts, look_on, stop, o.nodes))
    except BrokenPipeError:
        text = "nobody reads the output any more (a closed pipe), so the trainer was stopped; write it to a file"
        return UnreadError(text)
