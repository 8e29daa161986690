"""A job that trains: check its processes, reserve its folders, train, verify, report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from multimesh.launch import run_together
from multimesh_maxtext import outcome
from multimesh_maxtext.checkpoint_folder import going_back, look
from multimesh_maxtext.command.checkpoint import PARAMETERS, RUNNING, beginning, make_way, writing
from multimesh_maxtext.command.dataset import write_corpus
from multimesh_maxtext.command.environment import python
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.forecasting import check_memory
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.listeners import make_listeners
from multimesh_maxtext.command.member import Member
from multimesh_maxtext.command.report import (
    Output,
    headline,
    progress,
    schedule_choice,
    step_line,
    step_table,
    summary,
)
from multimesh_maxtext.command.steps import TOLERANCE, Run, Tell, compare, judge, reference_job, tail
from multimesh_maxtext.command.training import Start, StopRequest, log_tail, run_trainers, state_line
from multimesh_maxtext.command.translate import CHECKPOINTS, KEEP, launch
from multimesh_maxtext.errors import (
    CheckpointError,
    DamagedCheckpointError,
    DisagreementError,
    FileError,
    FlagError,
    LossNotFallingError,
    ProcessLostError,
    TrainerFailedError,
    UnfitError,
    UnreadError,
)

UNFIT = "unfit-nodes"
"""File in the output folder: the nodes that the check found at fault, one a line, for ``sbatch --exclude``."""

_NEWS = "multimesh: "  # begins lines of a log that an operator should see at once: who is lost, or holds up the others


def train_job(
    job: Job,
    first: Paths,
    starts: Sequence[Start],
    texts: Sequence[str],
    console: Output,
    gpu_memory: int | None,
    this: Member,
    stop: StopRequest,
) -> int:
    """Train, judge, compare; return the exit code.

    ``first``: where the first process writes, which may be this one.
    ``starts``: the trainer of this process; with ``--spawn`` those of all.
    """
    o, paths, leads = job.flags, starts[0][1], this.rank == 0
    with writing(paths.output / RUNNING, "--output"):
        listeners = make_listeners(o) if leads else {}
        console.print(python())
        for _, place in starts:
            make_way(o, first, place)
            prepare_folders(job, place, texts)
        if o.check:
            check_processes(starts, o, first.output / UNFIT)
        check_memory(job, paths, console, gpu_memory)
        stop.trains = True
        while True:
            with beginning(job, first=leads) as step:
                if step >= o.num_steps:
                    return 0 if this.rank else _say_all_steps_ran(o.num_steps, step, as_json=o.json)
                run = train(job, starts, console, step, stop, listeners)
            write_outcome(run, paths, this, o.checkpoint)  # others look for it
            if run.error and len(starts) < o.nodes:
                run.error = outcome.find_cause(run.error, [first.of_process(rank).outcome for rank in range(o.nodes)])
            if not isinstance(run.error, DamagedCheckpointError):
                break
            back = going_back(run.error, o.checkpoint or Path())
            if leads:
                print(back, file=sys.stderr)
        if o.verify and leads and not run.error:
            other, beside = reference_job(job), paths.below("spmd")
            prepare_folders(other, beside, texts)
            start = launch(other, beside, inherited=os.environ, gpu_memory=gpu_memory)
            reference = train(other, [(start, beside)], console, 0, stop)
            run.log, dtype = reference.log, str(job.model.resolved.get("dtype"))
            run.error = reference.error or compare(run, reference.steps, dtype)
        if leads:
            write_outcome(run, paths, this, o.checkpoint)
        return _report(job, console, paths, run)


def check_processes(starts: Sequence[Start], o: Flags, unfit: Path) -> None:
    """Let processes check their devices and the way between them; the table goes to stderr."""
    if not starts[0][1].process:
        unfit.unlink(missing_ok=True)
    shared, stages = (o.checkpoint or o.output or Path()).absolute(), o.pp if o.staged else 1
    words = ("check", "--quick", f"--stages={stages}", f"--folder={shared}", f"--unfit={unfit}")
    command = ("sh", "-c", 'exec "$@" >&2', "check", *starts[0][0].command[:3], "multimesh", *words)
    code = run_together([command] * len(starts), [start.environment for start, _ in starts])
    if code == ProcessLostError.exit_code or code < 0:
        raise ProcessLostError("--check: a process or a transfer did not answer; the table above says which")
    if code:
        nodes = unfit.read_text().split() if unfit.exists() else []
        which = f"; at fault: {', '.join(nodes)}" if nodes else ""
        raise UnfitError(f"--check: these processes cannot run pipelines{which}; the table above says why")


def _say_all_steps_ran(steps: int, step: int, *, as_json: bool) -> int:
    """Say that all steps were done before: a job that is run again until it succeeds has succeeded."""
    said = f"ok: checkpoint {step - 1} is after the last of --num-steps {steps}; nothing is left to do"
    print(json.dumps({"error": None, "exit_code": 0, "steps": [], "checkpoint": step - 1}) if as_json else said)
    return 0


def prepare_folders(job: Job, paths: Paths, texts: Sequence[str]) -> None:
    """Make the folders, the corpus and the link by which MaxText finds ``--checkpoint``.

    Files of an older run that could pass for files of this one are removed.
    """
    o, link = job.flags, paths.checkpoints
    try:
        for folder in (paths.output, paths.metrics.parent, *([o.dump] if o.dump and not o.forecast else [])):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (paths.placement, paths.schedule):
            file.unlink(missing_ok=True)
        if o.checkpoint and not (o.forecast or o.dump_only):
            link.parent.mkdir(exist_ok=True)
            if link.is_symlink():
                link.unlink()
            link.symlink_to(o.checkpoint.resolve())
    except OSError as error:
        place = error.filename2 or error.filename
        raise FileError(f"{place}: {error.strerror}; choose another --output, --metrics-file or --dump") from error
    if texts:
        write_corpus(texts, paths.text, sequence_length=o.sequence_length)


def train(
    job: Job, starts: Sequence[Start], console: Output, first: int, stop: StopRequest, tell: Mapping[str, Tell] = {}
) -> Run:
    """Start trainers, show their progress, tell the records to others, and judge the run from its ``first`` step on."""
    o, places = job.flags, [paths for _, paths in starts]
    paths = places[0]
    console.print(f"{headline(job)}\noutput {paths.output}\nlog    {paths.log}")
    if o.checkpoint:
        console.print(f"the newest {o.values.get(KEEP, CHECKPOINTS[KEEP])} checkpoints stay ({KEEP}=)")
    if len(starts) < o.nodes and not o.output:
        console.print("other processes log to temporary folders of their own; --output DIR keeps all in one")
    run, news = Run(paths, range(first, o.num_steps), tell), tail(paths.log)

    def look_on() -> bool:
        for line in next(news):
            if line.startswith(_NEWS) and not paths.process:
                print(line, file=sys.stderr)
        steps = run.read()
        if steps and steps == run.steps:  # a run that failed before its first step leaves nothing
            (paths.output / RUNNING).write_text(str(o.checkpoint.resolve()) if o.checkpoint else os.devnull)
        for step in steps:
            show(step_line(step, o.num_steps))
        return bool(o.checkpoint and run.steps)  # before its first step there is nothing to save

    try:
        with progress(console, "starting MaxText; it compiles before the first step") as show:
            codes, stopped_by = run_trainers(starts, look_on, stop)
        run.error = judge(run, codes, places, stopped_by, several=o.nodes > 1)
    except BrokenPipeError:
        run.error = UnreadError(
            "nobody reads the output any more (a closed pipe), so the trainer was stopped; write it to a file"
        )
    if type(run.error) is CheckpointError and o.checkpoint and PARAMETERS not in str(run.error):
        run.error = CheckpointError(f"--checkpoint {o.checkpoint}: {run.error}")
    return run


def write_outcome(run: Run, paths: Paths, this: Member, checkpoints: Path | None) -> None:
    """Write why this process ended, and how far it came, for whoever started it and for the others."""
    step = max((step.number for step in run.steps), default=None)
    newest = max(look(checkpoints) if checkpoints else (), default=None)
    outcome.write(run.error, paths.outcome, outcome.name_process(this.rank, this.count), step=step, checkpoint=newest)


def _report(job: Job, console: Output, paths: Paths, run: Run) -> int:
    o, steps, error = job.flags, run.steps, run.error
    if isinstance(error, UnreadError):
        raise error
    if o.json and not paths.process:
        print(json.dumps(summary(run, paths)))
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
        console.print(f"ok: {len(steps)} steps, loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}{agree}")
        return 0
    if not (error.shared and paths.process):  # else another process tells
        if isinstance(error, TrainerFailedError):
            print(log_tail(run.log), file=sys.stderr)
        ran = isinstance(error, FlagError | LossNotFallingError | DisagreementError)
        state = "" if ran else f"; {state_line(o.checkpoint)}"
        print(f"error: {error}{state}{f' ({error.who})' if error.who else ''}", file=sys.stderr)
    return error.exit_code
