"""A job that trains: reserve its folders, train, verify, report."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from multimesh_maxtext import outcome
from multimesh_maxtext.checkpoint_folder import going_back, look
from multimesh_maxtext.command import report
from multimesh_maxtext.command.checkpoint import (
    RUNNING,
    Beginning,
    beginning,
    has_content,
    holds_run,
    is_written_to,
    remove_run,
    writing,
)
from multimesh_maxtext.command.dataset import write_corpus
from multimesh_maxtext.command.environment import describe_cache, python
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.forecasting import check_memory
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.listeners import make_listeners
from multimesh_maxtext.command.member import Member
from multimesh_maxtext.command.report import Output
from multimesh_maxtext.command.spawning import check_processes
from multimesh_maxtext.command.steps import TOLERANCE, Pair, Step, check_agreement, compare, largest, reference_job
from multimesh_maxtext.command.training import SPAWNED, TrainingResult, log_tail, state_line, train
from multimesh_maxtext.command.translate import Launch, launch
from multimesh_maxtext.errors import (
    DamagedCheckpointError,
    FileError,
    FlagError,
    InterruptedRunError,
    LauncherError,
    TrainerFailedError,
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
    """Train, and return the exit code.

    ``first``: where the first process writes, which may be this one.
    ``gpu_memory``: memory of a visible GPU in MiB, ``None`` if unknown.
    ``this``: which of several processes this one is.
    """
    options, paths = job.flags, first.of_process(this.rank)
    note = describe_cache(start.environment)
    if note and this.rank == 0:
        print(note, file=sys.stderr)
    if options.check:
        check_processes(start, options, first.output, this)
    with writing(paths.output / RUNNING, "--output") as lock:
        _make_way(options, first, paths)
        return _train(job, first, paths, start, texts, console, gpu_memory, this, lock)


def _make_way(o: Flags, first: Paths, paths: Paths) -> None:
    """Keep the files of another run, or remove them where a flag asks for that. Call it while `writing`.

    ``first``: paths of the first process, which may be this one.

    Raises ``FileError`` where this run would write over another.
    """
    for place in dict.fromkeys((first, paths)):
        goes_on = o.checkpoint and o.resume and is_written_to(place.checkpoints, o.checkpoint)
        if goes_on or o.overwrite or not holds_run(place.output):
            continue
        if o.resume:
            raise FileError(
                f"--output {place.output} holds a run that wrote no checkpoint to {o.checkpoint}: --resume would write "
                "over it; choose another --output"
            )
        target = place.checkpoints.resolve()
        steps = place.checkpoints.is_symlink() and look(target).steps
        also = f"--checkpoint {target} --resume to go on with it, " if steps else ""
        raise FileError(
            f"--output {place.output} holds another run; add --overwrite to replace it, {also}or choose another folder"
        )
    written = o.checkpoint and (is_written_to(paths.checkpoints, o.checkpoint) or bool(look(o.checkpoint).steps))
    if o.metrics_file and paths == first and has_content(paths.metrics) and not ((written and o.resume) or o.overwrite):
        raise FileError(
            f"--metrics-file {paths.metrics} has the steps of another run; remove it, or choose another file"
        )
    if o.overwrite and not o.resume:
        names = {path.name for path in paths.output.glob("process-*")} - {f"process-{rank}" for rank in range(o.nodes)}
        remove_run(paths.output, (*paths.products, *names))


def _train(
    job: Job,
    first: Paths,
    paths: Paths,
    start: Launch,
    texts: Sequence[str],
    console: Output,
    gpu_memory: int | None,
    this: Member,
    lock: int,
) -> int:
    """Train, judge, compare; return the exit code. The trainer inherits the descriptor ``lock``."""
    options = job.flags
    listeners = make_listeners(options) if this.rank == 0 else []
    if not options.json:
        console.print(python(), highlight=False, markup=False)
    prepare_folders(job, paths, texts)
    check_memory(job, paths, console, gpu_memory)
    pairs = list[Pair]()
    while True:
        with beginning(job, paths.checkpoints, first=this.rank == 0) as begin:
            if begin.step >= options.num_steps:
                return _say_all_steps_ran(options, begin.step) if this.rank == 0 else 0
            begin = replace(begin, inherited=(*begin.inherited, lock))
            try:
                result = train(job, start, paths, console, begin, listeners)
            except LauncherError as error:
                _write_outcome(error, paths, this, options, ())
                raise
        if result.error:
            _write_outcome(result.error, paths, this, options, result.steps)
            if not (SPAWNED in os.environ and isinstance(result.error, InterruptedRunError)):
                result = replace(result, error=outcome.find_cause(first.output, this.count, result.error))
                if this.rank == 0 and SPAWNED not in os.environ:  # else --spawn compares the outcomes afterwards
                    _write_outcome(result.error, paths, this, options, result.steps)
        if not isinstance(result.error, DamagedCheckpointError):
            break
        line = going_back(result.error, options.checkpoint or Path())
        if this.rank == 0:
            print(line, file=sys.stderr)
    if not result.error:
        if options.verify and this.rank == 0:
            other, beside = reference_job(job), paths.below("spmd")
            prepare_folders(other, beside, texts)
            start = launch(other, beside, inherited=os.environ, gpu_memory=gpu_memory)
            result, pairs = _compare_results(job, result, train(other, start, beside, console, Beginning()))
        _write_outcome(result.error, paths, this, options, result.steps)
    return _report(job, console, paths, result, pairs, begin.step)


def _write_outcome(error: LauncherError | None, paths: Paths, this: Member, o: Flags, steps: Sequence[Step]) -> None:
    """Write why this process ended, and how far it came, for whoever started it and for the others."""
    newest = look(o.checkpoint).steps[-1:] if o.checkpoint else ()
    ended = replace(
        outcome.outcome_of(error),
        who=f"process {this.rank} of {this.count} on {socket.gethostname()}",
        step=steps[-1].number if steps else None,
        checkpoint=newest[0] if newest else None,
    )
    outcome.write(ended, paths.outcome)


def _say_all_steps_ran(o: Flags, step: int) -> int:
    """Say that all steps were done before: a job that is run again until it succeeds has succeeded."""
    if o.json:
        print(json.dumps({"error": None, "exit_code": 0, "steps": [], "checkpoint": step - 1}))
    else:
        print(f"ok: checkpoint {step - 1} is after the last of --num-steps {o.num_steps}; nothing is left to do")
    return 0


def prepare_folders(job: Job, paths: Paths, texts: Sequence[str]) -> None:
    """Make the folders and the corpus, and remove files of an older run that could pass for files of this one."""
    o = job.flags
    try:
        for folder in (paths.output, paths.metrics.parent, *([o.dump] if o.dump and not o.forecast else [])):
            folder.mkdir(parents=True, exist_ok=True)
        if not o.resume:
            paths.metrics.unlink(missing_ok=True)
        for file in (paths.placement, paths.schedule):
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
            console.print(f"{schedule['schedule']['text']}\nschedule {paths.schedule}\n", highlight=False, markup=False)
        console.print(report.comparison(pairs) if pairs else report.step_table(steps))
        for evaluation in result.evaluations:
            console.print(f"evaluated after step {evaluation.step}: loss {evaluation.loss:.4f}", highlight=False)
        if pairs:
            console.print(f"largest difference {largest(pairs):.1e}, at most {TOLERANCE:.0e} allowed", highlight=False)
        console.print(f"metrics {paths.metrics}", highlight=False)
    if error:
        # Another process tells for all, or the command that spawned this one.
        silent = (error.shared and console.quiet) or SPAWNED in os.environ
        if isinstance(error, TrainerFailedError) and not silent:
            print(log_tail(result.log), file=sys.stderr)
        early = len(steps) < o.num_steps - first and not isinstance(error, FlagError)
        state = f"; {state_line(o.checkpoint)}" if early else ""
        if not silent:
            print(f"error: {error}{state}", file=sys.stderr)
        return error.exit_code
    if not o.json:
        agree = f"; the same without the pipeline, in {job.model.resolved.get('dtype')}" if pairs else ""
        line = f"ok: {len(steps)} steps, loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}{agree}"
        console.print(line, highlight=False)
    return 0
