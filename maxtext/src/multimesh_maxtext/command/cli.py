"""The command behind ``maxtext/run.py``: parse, check, and do what the flags ask for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from multimesh.launch import job_variables, process_variables
from multimesh_maxtext import errors, outcome
from multimesh_maxtext.checkpoint_folder import look, state_line
from multimesh_maxtext.command import report, suggesting
from multimesh_maxtext.command.check_flags import check_job, find_job_notes
from multimesh_maxtext.command.checkpoint import check_parameters, reserve_folders
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.dataset import check_dataset, read_texts
from multimesh_maxtext.command.environment import describe_python, find_flag_notes, find_gpus, stale_parts
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.forecasting import check_memory, inspect, show_size
from multimesh_maxtext.command.job import Job, Paths, find_maxtext
from multimesh_maxtext.command.listeners import make_listeners
from multimesh_maxtext.command.member import SINGLE, Member, check_processes, find_launcher, find_members, find_repeats
from multimesh_maxtext.command.report import Output, unblock_output
from multimesh_maxtext.command.steps import reference_job
from multimesh_maxtext.command.train_job import train_job
from multimesh_maxtext.command.training import SIGNALS, Start, StopRequest
from multimesh_maxtext.command.translate import Launch, forecasting, launch

HOLD = 5.0
"""Seconds that the others wait for the first process, which tells: Slurm ends all as soon as one ends with an error."""


def command(argv: Sequence[str], *, root: Path | str = "") -> NoReturn:
    """Run the command line, and end this process with its exit code, which says more than a signal would.

    ``root``: the repository, if this runs from one. It may hold ``third_party/maxtext``.
    """
    code, stop = 0, StopRequest()
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        unblock_output()
        code = main(argv, root=Path(root) if root else None, stop=stop)
        stop.trains = True  # nothing interrupts the rest
        print(end="", flush=True)  # there may be no output
    except BrokenPipeError:  # a program such as head has read what it wanted
        code = code or errors.UnreadError.exit_code
    os._exit(code)  # Python itself would end by SIGINT if a string that it executed was interrupted


def main(argv: Sequence[str], *, root: Path | None = None, stop: StopRequest | None = None) -> int:
    """Return the exit code of a command line; only ``--help`` and closed pipes leave by an exception."""
    this = SINGLE
    try:
        parsed = read(argv)
        if (parsed.flags.nodes > 1 or "--nodes" in parsed.doubtful) and not parsed.flags.spawn:
            this = find_launcher(os.environ)[1]
        maxtext = find_maxtext(root)
        if parsed.flags.suggest:
            return 0 if this.rank else suggesting.run(parsed, argv, maxtext)
        job = check_job(parsed, maxtext / "maxtext")
        return run_job(job, find_job_notes(parsed, job), maxtext, root, stop or StopRequest())
    except KeyboardInterrupt:
        print(f"interrupted before it trained; {state_line(read(argv).flags.checkpoint)}", file=sys.stderr)
        return errors.InterruptedRunError.exit_code
    except (errors.LauncherError, OSError) as error:
        shown = error if isinstance(error, errors.LauncherError) else errors.full_file(error)
        if shown is None:
            raise
        return _print_error(shown, this, as_json="--json" in argv)


def _print_error(error: errors.LauncherError, this: Member, *, as_json: bool) -> int:
    """Print an error, and return its exit code. The first process prints for all where all find the same."""
    prefix = "error: "
    if this.rank:
        try:
            time.sleep(HOLD)
        except KeyboardInterrupt:  # the first one found it too, and the launcher ends all
            return error.exit_code
        if error.shared:
            return error.exit_code
        prefix = f"error: {outcome.name_process(this.rank, this.count)}: "
    for line in str(error).splitlines() or [""]:
        print(f"{prefix}{line}", file=sys.stderr)
    if as_json and not this.rank:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
    return error.exit_code


def run_job(job: Job, notes: Iterable[str], maxtext: Path, root: Path | None, stop: StopRequest) -> int:
    """Do what the flags of a job ask for; return the exit code. ``notes``: lines about the job, to be shown."""
    flags, texts = job.flags, read_texts(job.flags.text)
    this, *others = find_members(flags, os.environ)
    gpu_memory = min(find_gpus(flags) or (), default=None)
    if not flags.forecast and this.rank < job.readers:
        check_dataset(job)
    stale, idle = stale_parts(root) if root else (), find_flag_notes(flags, gpu_memory=gpu_memory)
    for note in (*stale, *notes, *find_repeats(flags, os.environ), *idle) if this.rank == 0 else ():
        print(f"warning: {note}", file=sys.stderr)
    first, starts = _paths(flags, maxtext), list[Start]()
    shared = job_variables() if others else {}
    for member in (this, *others):
        paths = first.of_process(member.rank)
        start = launch(job, paths, inherited=os.environ, gpu_memory=gpu_memory, this=member)
        numbers = process_variables(member.rank, member.count) if others else {}
        starts.append((replace(start, environment={**start.environment, **shared, **numbers}), paths))
    start, paths = starts[0]
    if flags.dry_run:
        if flags.forecast:
            start = forecasting(job, paths, inherited=os.environ, gpu_memory=gpu_memory)
        shown = report.plan_text(start.command, start.environment, start.configuration)
        print(json.dumps(asdict(start), indent=1) if flags.json else shown)
        return 0
    if flags.export:
        return 0 if this.rank else _export(start, flags, flags.export)
    if flags.forecast and this.rank:
        return 0
    # Of several processes the first speaks for all, unless another fails.
    console = Output(soft_wrap=True, highlight=False, markup=False, quiet=flags.json or this.rank > 0)
    trainings = [(job, starts)]
    if flags.verify and not this.rank:
        program, place = reference_job(job), paths.below("spmd")
        reference = launch(program, place, inherited=os.environ, gpu_memory=gpu_memory)
        trainings.append((program, [(reference, place)]))
    with reserve_folders(job, first, [place for _, training in trainings for _, place in training], texts):
        listeners = {} if this.rank or flags.dump_only or flags.forecast else make_listeners(flags)
        if flags.check:
            check_processes(flags, start.command[:3], [start.environment for start, _ in starts], first.unfit)
        check_memory(job, paths, console, gpu_memory)
        if not (flags.forecast or flags.dump_only):
            for training, _ in trainings:  # before any of them trains
                check_parameters(training)
            places = [first.of_process(rank) for rank in range(flags.nodes)]
            console.print(describe_python())
            return train_job(trainings, places, console, stop, listeners)
        if flags.dump_only:
            inspect(starts)
            if not this.rank:
                print(json.dumps({"dump": str(flags.dump)}) if flags.json else f"compiled; the plan is in {flags.dump}")
    return 0


def _paths(flags: Flags, maxtext: Path) -> Paths:
    if flags.output:
        output = flags.output.resolve()
    elif flags.dry_run:
        output = Path(tempfile.gettempdir()) / "multimesh-maxtext-XXXXXXXX"
    else:
        output = Path(tempfile.mkdtemp(prefix="multimesh-maxtext-"))
    metrics = flags.metrics_file.resolve() if flags.metrics_file else output / "metrics.jsonl"
    paths = Paths(python=sys.executable, maxtext=maxtext.resolve(), output=output, metrics=metrics)
    beside = "forecast" if flags.forecast else "dump-only" if flags.dump_only else ""  # a run that the folder may hold
    return paths.below(beside) if beside else paths


def _export(start: Launch, flags: Flags, target: Path) -> int:
    """Write the parameters of the newest checkpoint for MaxText's tools, and say where they are."""
    folder = flags.checkpoint or Path()
    steps = look(folder)
    if not steps:
        raise errors.CheckpointError(f"--checkpoint {folder}: there is no checkpoint to export; train first")
    if target.exists():
        raise errors.FileError(f"--export {target}: it is there already; choose another folder")
    words = "export", str(folder.resolve()), str(steps[-1]), str(target.resolve())
    command = [*start.command[:3], "multimesh_maxtext", *words, *["unrolled"] * (flags.scan_layers is False)]
    done = subprocess.run(command, env={**os.environ, **start.environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise errors.TrainerFailedError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    result = json.loads(done.stdout)
    if flags.json:
        print(json.dumps({"export": str(target / "items"), "checkpoint": steps[-1], **result}))
    else:
        scanned = str(result["scan_layers"]).lower()
        print(f"checkpoint {steps[-1]}: {show_size(result['bytes'])} of parameters")
        print(f"for MaxText: load_parameters_path={target / 'items'} scan_layers={scanned}")
    return 0
