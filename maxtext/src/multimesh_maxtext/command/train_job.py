"""A job that trains: reserve its folders, train, verify, report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from multimesh_maxtext import outcome
from multimesh_maxtext.checkpoint_folder import going_back
from multimesh_maxtext.command.checkpoint import RUNNING, beginning, make_way, writing
from multimesh_maxtext.command.dataset import write_corpus
from multimesh_maxtext.command.environment import python
from multimesh_maxtext.command.forecasting import check_memory
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.listeners import make_listeners
from multimesh_maxtext.command.member import SINGLE, Member
from multimesh_maxtext.command.report import Output, schedule_choice, step_table, summary
from multimesh_maxtext.command.spawning import check_processes
from multimesh_maxtext.command.steps import TOLERANCE, Run, compare, find_disagreement, reference_job
from multimesh_maxtext.command.training import (
    SPAWNED,
    StopRequest,
    log_tail,
    receiving,
    state_line,
    train,
    write_outcome,
)
from multimesh_maxtext.command.translate import Launch, launch
from multimesh_maxtext.errors import (
    DamagedCheckpointError,
    FileError,
    FlagError,
    InterruptedRunError,
    TrainerFailedError,
    UnreadError,
)


def train_job(
    job: Job,
    first: Paths,
    start: Launch,
    texts: Sequence[str],
    console: Output,
    gpu_memory: int | None,
    this: Member,
) -> int:
    """Train, judge, compare; return the exit code.

    ``first``: where the first process writes, which may be this one.
    """
    o, paths = job.flags, first.of_process(this.rank)
    if o.check:
        check_processes(start, o, first.output, this)
    with writing(paths.output / RUNNING, "--output"):
        make_way(o, first, paths)
        listeners = make_listeners(o) if this.rank == 0 else []
        if not o.json:
            console.print(python())
        prepare_folders(job, paths, texts)
        check_memory(job, paths, console, gpu_memory)
        stop = StopRequest()
        with receiving(stop):
            while True:
                with beginning(job, paths.checkpoints, first=this.rank == 0) as step:
                    if step >= o.num_steps:
                        return 0 if this.rank else _say_all_steps_ran(o.num_steps, step, as_json=o.json)
                    run = train(job, start, paths, console, step, this, stop, listeners)
                if run.error and not (SPAWNED in os.environ and isinstance(run.error, InterruptedRunError)):
                    run.error = outcome.find_cause(first.output, this.count, run.error)
                    if this.rank == 0 and SPAWNED not in os.environ:  # others read this one for their own
                        write_outcome(run, paths, this, o.checkpoint)
                if not isinstance(run.error, DamagedCheckpointError):
                    break
                line = going_back(run.error, o.checkpoint or Path())
                if this.rank == 0:
                    print(line, file=sys.stderr)
            if isinstance(run.error, UnreadError):
                raise run.error
            if o.verify and this.rank == 0 and not run.error:
                other, beside = reference_job(job), paths.below("spmd")
                prepare_folders(other, beside, texts)
                start = launch(other, beside, inherited=os.environ, gpu_memory=gpu_memory)
                reference = train(other, start, beside, console, 0, SINGLE, stop)
                if reference.error:
                    run.error, run.log = reference.error, reference.log
                else:
                    run.reference, run.differences = reference.steps, compare(run.steps, reference.steps)
                    run.error = find_disagreement(run, dtype=str(job.model.resolved.get("dtype")))
                write_outcome(run, paths, this, o.checkpoint)
            return _report(job, console, paths, run, step)


def _say_all_steps_ran(steps: int, step: int, *, as_json: bool) -> int:
    """Say that all steps were done before: a job that is run again until it succeeds has succeeded."""
    said = f"ok: checkpoint {step - 1} is after the last of --num-steps {steps}; nothing is left to do"
    print(json.dumps({"error": None, "exit_code": 0, "steps": [], "checkpoint": step - 1}) if as_json else said)
    return 0


def prepare_folders(job: Job, paths: Paths, texts: Sequence[str]) -> None:
    """Make the folders and the corpus, and remove files of an older run that could pass for files of this one."""
    o = job.flags
    try:
        for folder in (paths.output, paths.metrics.parent, *([o.dump] if o.dump and not o.forecast else [])):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (paths.placement, paths.schedule):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(
            f"{error.filename}: {error.strerror}; choose another --output, --metrics-file or --dump"
        ) from error
    if texts:
        write_corpus(texts, paths.text, sequence_length=o.sequence_length)


def _report(job: Job, console: Output, paths: Paths, run: Run, first: int) -> int:
    o, steps, error = job.flags, run.steps, run.error
    if o.json and not console.quiet:
        print(json.dumps(summary(run, paths)))
    if not o.json:
        if schedule := schedule_choice(paths.schedule):
            console.print(f"{schedule['schedule']['text']}\nschedule {paths.schedule}\n")
        console.print(step_table(run))
        for evaluation in run.evaluations:
            console.print(f"evaluated after step {evaluation['step']}: loss {evaluation['loss']:.4f}")
        if run.reference:
            console.print(f"largest difference {max(run.differences):.1e}, at most {TOLERANCE:.0e} allowed")
        console.print(f"metrics {paths.metrics}")
    if not error:
        agree = f"; the same without the pipeline, in {job.model.resolved.get('dtype')}" if run.reference else ""
        if not o.json:
            console.print(f"ok: {len(steps)} steps, loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}{agree}")
        return 0
    if not ((error.shared and console.quiet) or SPAWNED in os.environ):  # else another process or --spawn tells
        if isinstance(error, TrainerFailedError):
            print(log_tail(run.log), file=sys.stderr)
        early = len(steps) < o.num_steps - first and not isinstance(error, FlagError)
        print(f"error: {error}{f'; {state_line(o.checkpoint)}' if early else ''}", file=sys.stderr)
    return error.exit_code
