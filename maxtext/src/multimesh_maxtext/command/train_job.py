"""A job that trains: reserve its folders, train, verify, report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from multimesh_maxtext import outcome
from multimesh_maxtext.checkpoint_folder import going_back
from multimesh_maxtext.command import report
from multimesh_maxtext.command.checkpoint import RUNNING, beginning, make_way, writing
from multimesh_maxtext.command.dataset import write_corpus
from multimesh_maxtext.command.environment import describe_cache, python
from multimesh_maxtext.command.forecasting import check_memory
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.listeners import make_listeners
from multimesh_maxtext.command.member import SINGLE, Member
from multimesh_maxtext.command.report import Output
from multimesh_maxtext.command.spawning import check_processes
from multimesh_maxtext.command.steps import TOLERANCE, Pair, check_agreement, compare, largest, reference_job
from multimesh_maxtext.command.training import SPAWNED, TrainingResult, log_tail, state_line, train, write_outcome
from multimesh_maxtext.command.translate import Launch, launch
from multimesh_maxtext.errors import (
    DamagedCheckpointError,
    FileError,
    FlagError,
    InterruptedRunError,
    LauncherError,
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
    o, paths, pairs = job.flags, first.of_process(this.rank), list[Pair]()
    if this.rank == 0 and (note := describe_cache(start.environment)):
        print(note, file=sys.stderr)
    if o.check:
        check_processes(start, o, first.output, this)
    with writing(paths.output / RUNNING, "--output"):
        make_way(o, first, paths)
        listeners = make_listeners(o) if this.rank == 0 else []
        if not o.json:
            console.print(python())
        prepare_folders(job, paths, texts)
        check_memory(job, paths, console, gpu_memory)
        while True:
            with beginning(job, paths.checkpoints, first=this.rank == 0) as step:
                if step >= o.num_steps:
                    return 0 if this.rank else _say_all_steps_ran(o.num_steps, step, as_json=o.json)
                result = train(job, start, paths, console, step, this, listeners)
            if result.error and not (SPAWNED in os.environ and isinstance(result.error, InterruptedRunError)):
                result = replace(result, error=outcome.find_cause(first.output, this.count, result.error))
                if this.rank == 0 and SPAWNED not in os.environ:  # others read this one for their own
                    write_outcome(result, paths, this, o.checkpoint)
            if not isinstance(result.error, DamagedCheckpointError):
                break
            line = going_back(result.error, o.checkpoint or Path())
            if this.rank == 0:
                print(line, file=sys.stderr)
        if isinstance(result.error, UnreadError):
            raise result.error
        if o.verify and this.rank == 0 and not result.error:
            other, beside = reference_job(job), paths.below("spmd")
            prepare_folders(other, beside, texts)
            start = launch(other, beside, inherited=os.environ, gpu_memory=gpu_memory)
            reference = train(other, start, beside, console, 0, SINGLE)
            result, pairs = _compare_results(job, result, reference)
            write_outcome(result, paths, this, o.checkpoint)
        return _report(job, console, paths, result, pairs, step)


def _say_all_steps_ran(steps: int, step: int, *, as_json: bool) -> int:
    """Say that all steps were done before: a job that is run again until it succeeds has succeeded."""
    if as_json:
        print(json.dumps({"error": None, "exit_code": 0, "steps": [], "checkpoint": step - 1}))
    else:
        print(f"ok: checkpoint {step - 1} is after the last of --num-steps {steps}; nothing is left to do")
    return 0


def prepare_folders(job: Job, paths: Paths, texts: Sequence[str]) -> None:
    """Make the folders and the corpus, and remove files of an older run that could pass for files of this one."""
    o = job.flags
    try:
        for folder in (paths.output, paths.metrics.parent, *([o.dump] if o.dump and not o.forecast else [])):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (paths.placement, paths.schedule, *([] if o.resume else [paths.metrics])):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(
            f"{error.filename}: {error.strerror}; choose another --output, --metrics-file or --dump"
        ) from error
    if texts:
        write_corpus(texts, paths.text, sequence_length=o.sequence_length)


def _compare_results(job: Job, result: TrainingResult, reference: TrainingResult) -> tuple[TrainingResult, list[Pair]]:
    """Compare a pipeline with its reference. An error of either, or a difference, becomes the error of the result."""
    if reference.error:
        return replace(result, error=reference.error, log=reference.log), []
    pairs = compare(result.steps, reference.steps)
    try:
        check_agreement(pairs, dtype=str(job.model.resolved.get("dtype")))
    except LauncherError as error:
        return replace(result, error=error), pairs
    return result, pairs


def _report(job: Job, console: Output, paths: Paths, result: TrainingResult, pairs: Sequence[Pair], first: int) -> int:
    o, steps, error = job.flags, result.steps, result.error
    if o.json and not console.quiet:
        files = {"output": paths.output, "metrics_file": paths.metrics, "log": paths.log}
        summary = report.summary(steps, result.evaluations, pairs, files, error)
        print(json.dumps(report.schedule_choice(paths.schedule) | summary))
    else:
        if schedule := report.schedule_choice(paths.schedule):
            console.print(f"{schedule['schedule']['text']}\nschedule {paths.schedule}\n")
        console.print(report.comparison(pairs) if pairs else report.step_table(steps))
        for evaluation in result.evaluations:
            console.print(f"evaluated after step {evaluation.step}: loss {evaluation.loss:.4f}")
        if pairs:
            console.print(f"largest difference {largest(pairs):.1e}, at most {TOLERANCE:.0e} allowed")
        console.print(f"metrics {paths.metrics}")
    if not error:
        if not o.json:
            agree = f"; the same without the pipeline, in {job.model.resolved.get('dtype')}" if pairs else ""
            line = f"ok: {len(steps)} steps, loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}{agree}"
            console.print(line)
        return 0
    if not ((error.shared and console.quiet) or SPAWNED in os.environ):  # else another process or --spawn tells
        if isinstance(error, TrainerFailedError):
            print(log_tail(result.log), file=sys.stderr)
        early = len(steps) < o.num_steps - first and not isinstance(error, FlagError)
        print(f"error: {error}{f'; {state_line(o.checkpoint)}' if early else ''}", file=sys.stderr)
    return error.exit_code
