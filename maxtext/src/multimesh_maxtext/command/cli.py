"""The command behind ``maxtext/run.py``: parse, check, translate, train, judge."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from multimesh_maxtext.checkpoint_folder import going_back, look
from multimesh_maxtext.command import (
    compile_cache,
    fallback,
    metrics_hook,
    report,
    restarts,
    roll_call,
    suggesting,
)
from multimesh_maxtext.command.cause import Causes
from multimesh_maxtext.command.checkpoint import Beginning, beginning, is_written_to
from multimesh_maxtext.command.checks import Job, check_machine
from multimesh_maxtext.command.dataset import check_dataset
from multimesh_maxtext.command.exposition import listeners
from multimesh_maxtext.command.foresight import check_memory
from multimesh_maxtext.command.launch import Launch, forecasting, in_place, launch, visible_gpu_memory
from multimesh_maxtext.command.machine import check_environment, python, stale_parts
from multimesh_maxtext.command.member import ALONE, Member, any_member, find_repeats, member
from multimesh_maxtext.command.model import find_maxtext, has_package
from multimesh_maxtext.command.options import Options, read
from multimesh_maxtext.command.readiness import check_processes
from multimesh_maxtext.command.reasons import resume_advice, tail
from multimesh_maxtext.command.report import TOLERANCE, Output, Pair, check_agreement, compare, largest, reference_job
from multimesh_maxtext.command.reserve import RUNNING, has_content, holds_run, remove_run, writing
from multimesh_maxtext.command.services import compile_text, export_parameters, show_command, write_dump
from multimesh_maxtext.command.settle import Settled, settle
from multimesh_maxtext.command.spawning import SPAWNED, spawn
from multimesh_maxtext.command.text import read_texts, write_corpus
from multimesh_maxtext.command.told import read_speeds
from multimesh_maxtext.command.training import (
    Follower,
    Outcome,
    Tell,
    keep_code,
    terminate_as_interrupt,
    train,
)
from multimesh_maxtext.command.translate import Paths, notes
from multimesh_maxtext.errors import (
    DamagedCheckpointError,
    FileError,
    LauncherError,
    ProcessLostError,
    TrainerFailedError,
    UnreadError,
)

INTERRUPTED = 130

_HOLD = 5.0  # seconds that a process waits with an error, which the first process may print for all
_PATIENCE = 60.0  # seconds that a new attempt waits for the one that lost a process


def command(argv: Sequence[str], *, root: Path | None = None) -> NoReturn:
    """Run the command line, and end this process with its exit code."""
    code = main(argv, root=root)
    keep_code()
    sys.exit(code)


def main(argv: Sequence[str], *, root: Path | None = None) -> int:
    """Run the command line and return its exit code; nothing but ``--help`` leaves by an exception.

    ``argv``: the arguments, without the program's name.
    ``root``: the repository, if this runs from one. It may hold ``third_party/maxtext``.
    """
    try:
        code = _main(argv, root)
        sys.stdout.flush()
    except KeyboardInterrupt:
        exec("")  # noqa: S102 - Python ends by SIGINT if a string that it executed was interrupted, until the next one
        if SPAWNED not in os.environ:  # who spawned this process says so for all
            print(f"interrupted; the trainer was stopped{_how_to_go_on(argv)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # a program such as head has read what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UnreadError.exit_code
    return code


def _how_to_go_on(argv: Sequence[str]) -> str:
    with suppress(LauncherError):
        if folder := read(argv).options.checkpoint:
            return f"; {resume_advice(folder)}"
    return ""


def _main(argv: Sequence[str], root: Path | None) -> int:
    this = ALONE
    with terminate_as_interrupt():
        try:
            parsed = restarts.continue_attempts(read(argv), os.environ)
            this = any_member(parsed, os.environ)
            if root:
                check_environment(root)
            maxtext = find_maxtext(root)
            if parsed.options.suggest:
                return 0 if this.rank else suggesting.run(parsed, argv, maxtext)
            if parsed.options.show_grids:
                fallback.count_processes(parsed.options)
            settled = settle(parsed, maxtext / "maxtext")
            options = settled.job.options
            starts = options.spawn and options.nodes > 1 and not (options.dry_run or options.forecast)
            if starts or options.show_grids:
                grids = fallback.grids(settled.job, argv, maxtext)
                if options.show_grids:
                    print(fallback.lines(grids))
                    return 0
                _find_gpus(options)
                return spawn(argv, options, root, grids)
            if options.fallback and roll_call.OWN_ADDRESS in os.environ and not options.dry_run:
                return _answer_roll_call(settled.job, argv, maxtext, root)
            return _run(settled, maxtext, root)
        except LauncherError as error:
            return _tell(error, this, as_json="--json" in argv)


def _answer_roll_call(job: Job, argv: Sequence[str], maxtext: Path, root: Path | None) -> int:
    """Run on the grid that those processes can have which came; return 0 in one that is not needed, at the end."""
    o, this = job.options, member(job.options, os.environ)
    folder = (o.output or Path()) / f"roll-call-{restarts.attempt(o, os.environ)}"
    own, patience = os.environ[roll_call.OWN_ADDRESS], o.start_timeout or roll_call.PATIENCE
    place = roll_call.answer(folder, this.rank, this.count, own, fallback.grids(job, argv, maxtext), patience)
    with roll_call.until_all_are_done(folder, place):
        if place is None:
            print(f"{o.grid} does without this process, which waits", file=sys.stderr)
            return 0
        os.environ.update(place.variables())
        parsed = restarts.continue_attempts(read([*argv, *place.grid.words]), os.environ)
        return _run(settle(parsed, maxtext / "maxtext"), maxtext, root)


def _tell(error: LauncherError, this: Member, *, as_json: bool) -> int:
    """Print an error, and return its exit code. The first process prints for all where all find the same."""
    told = "error: "
    if this.rank:
        if error.shared:
            return error.exit_code
        try:
            time.sleep(_HOLD)
        except KeyboardInterrupt:  # the first one found it too, and the launcher ends all
            return error.exit_code
        told = f"error: process {this.rank} of {this.count} on {socket.gethostname()}: "
    for line in str(error).splitlines() or [""]:
        print(f"{told}{line}", file=sys.stderr)
    if as_json and not this.rank:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
    return error.exit_code


def _run(settled: Settled, maxtext: Path, root: Path | None) -> int:
    job, options = settled.job, settled.job.options
    this = member(options, os.environ)
    texts = read_texts(options.text or ())
    gpus = _find_gpus(options)
    if not options.forecast and this.rank < job.readers:
        check_dataset(job, maxtext / "maxtext")
    gpu_memory = min(gpus) if gpus else None
    stale = stale_parts(root) if root else ()
    for note in (*stale, *settled.notes, *find_repeats(options, os.environ), *notes(options, gpu_memory=gpu_memory)):
        if this.rank == 0:
            print(f"warning: {note}", file=sys.stderr)
    first = _paths(options, maxtext)
    paths = this.own(first)
    if options.forecast or options.dump_only:  # beside a run that the output folder may hold
        paths = paths.below("forecast" if options.forecast else "dump-only")
    start = launch(job, paths, inherited=os.environ, gpu_memory=gpu_memory, this=this)
    if options.hlo:
        start = in_place(start, "compile", str(options.hlo))
    elif options.dry_run and options.forecast:
        start = forecasting(job, paths, inherited=os.environ, gpu_memory=gpu_memory)
    if options.dry_run:
        return show_command(start, as_json=options.json)
    if options.hlo:
        return compile_text(start, options)
    if options.export:
        return 0 if this.rank else export_parameters(start, options, options.export)
    # Of several processes the first speaks for all, unless another fails.
    console = Output(soft_wrap=True, quiet=this.rank > 0)
    if options.forecast and this.rank:
        return 0
    if options.forecast or options.dump_only:
        with writing(paths.output / RUNNING, "--output"):
            _prepare(job, paths, texts)
            check_memory(job, paths, console, gpu_memory)
            if options.dump_only:
                write_dump(start, paths, options, quiet=console.quiet)
            return 0
    kept = compile_cache.first_use(start.environment)
    if kept and this.rank == 0:
        print(kept, file=sys.stderr)
    if options.check:
        check_processes(start, options, first.output, this)
    again = restarts.attempt(options, os.environ)
    patience = _PATIENCE if again else 0.0
    with writing(paths.output / RUNNING, "--output", patience=patience) as held:
        _make_way(options, first, paths)
        if options.max_restarts and this.rank == 0:
            restarts.begin(options, paths, again)
        if again:
            restarts.keep_log(paths.log, again)
        causes = Causes(first.output, again, this.rank, this.count)
        code, why = _train(job, paths, start, texts, console, gpu_memory, causes, held, patience=patience)
        if options.max_restarts and this.rank == 0:
            _end_attempt(options, paths, code, why, again)
        return code


def _find_gpus(options: Options) -> list[int] | None:
    """Return the memory of every GPU here that a job may use; refuse a job for which something is missing here."""
    gpus = visible_gpu_memory() if options.gpus else None
    if not (options.dry_run or options.forecast):
        check_machine(
            options,
            gpu_memory=gpus,
            has_plugin=any(map(has_package, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        )
    return gpus


def _make_way(o: Options, first: Paths, paths: Paths) -> None:
    """Keep the files of another run, or remove them where a flag asks for that. Call it while `writing`.

    ``first``: paths of the first process, which may be this one.

    Raises ``FileError`` where this run would write over another.
    """
    for each in dict.fromkeys((first, paths)):
        goes_on = o.checkpoint and o.resume and is_written_to(each.checkpoints, o.checkpoint)
        if goes_on or o.overwrite or not holds_run(each.output):
            continue
        if o.resume:
            raise FileError(
                f"--output {each.output} holds a run that wrote no checkpoint to {o.checkpoint}: --resume would write "
                "over it; choose another --output"
            )
        kept = each.checkpoints.resolve()
        left = each.checkpoints.is_symlink() and look(kept).steps
        also = f"--checkpoint {kept} --resume to go on with it, " if left else ""
        raise FileError(
            f"--output {each.output} holds another run; add --overwrite to replace it, {also}or choose another folder"
        )
    mine = o.checkpoint and o.resume and (is_written_to(paths.checkpoints, o.checkpoint) or look(o.checkpoint).steps)
    if o.metrics_file and paths == first and has_content(paths.metrics) and not (mine or o.overwrite):
        raise FileError(
            f"--metrics-file {paths.metrics} has the steps of another run; remove it, or choose another file"
        )
    if o.overwrite and not o.resume:
        names = {path.name for path in paths.output.glob("process-*")} - {f"process-{rank}" for rank in range(o.nodes)}
        remove_run(paths.output, (*paths.made, *names))


def _end_attempt(o: Options, paths: Paths, code: int, why: str, again: int) -> None:
    """Note why an attempt ended, of several that may follow one another; after the last one, show all."""
    steps = Follower(paths.metrics).poll()
    lost = code == ProcessLostError.exit_code
    because = restarts.reason(o, paths, o.nodes) if lost else why
    attempts = restarts.end(paths, because, steps[-1].number + 1 if steps else 0)
    if not lost or again >= (o.max_restarts or 0):
        restarts.show(attempts, steps, o)


def _train(
    job: Job,
    paths: Paths,
    start: Launch,
    texts: Sequence[str],
    console: Console,
    gpu_memory: int | None,
    causes: Causes,
    held: int,
    *,
    patience: float,
) -> tuple[int, str]:
    """Train, judge, compare; return the exit code, and why it ended. The trainer inherits the descriptor ``held``."""
    options, rank = job.options, causes.rank
    hook = metrics_hook.load(options.metrics_hook) if options.metrics_hook and rank == 0 else None
    tells: list[Tell] = [*listeners(options, restarts.attempt(options, os.environ))] if rank == 0 else []
    tells += [hook] if hook else []
    if not options.json:
        console.print(python(), highlight=False, markup=False)
    _prepare(job, paths, texts)
    check_memory(job, paths, console, gpu_memory)
    pairs = list[Pair]()
    causes.begin()
    while True:
        with beginning(job, paths.checkpoints, first=rank == 0, patience=patience) as begin:
            if begin.step >= options.num_steps:
                return (_say_all_steps_ran(options, begin.step) if rank == 0 else 0), "nothing was left to do"
            begin = replace(begin, inherited=(*begin.inherited, held))
            try:
                outcome = train(job, start, paths, console, begin, tells)
            except LauncherError as error:
                causes.note(error)
                raise
        if not isinstance(outcome.error, DamagedCheckpointError):
            break
        line = going_back(outcome.error, options.checkpoint or Path())
        if rank == 0:
            print(line, file=sys.stderr)
    if outcome.error:
        outcome = replace(outcome, error=causes.settle(outcome.error))
    if hook:
        hook.end()
    if options.verify and not outcome.error and rank == 0:
        other, beside = reference_job(job), paths.below("spmd")
        _prepare(other, beside, texts)
        start = launch(other, beside, inherited=os.environ, gpu_memory=gpu_memory)
        outcome, pairs = _verify_outcome(job, outcome, train(other, start, beside, console, Beginning()))
    why = str(outcome.error).partition("; see ")[0] if outcome.error else "all steps are done"
    return _report(job, console, paths, outcome, pairs), why


def _say_all_steps_ran(o: Options, step: int) -> int:
    """Say that all steps were done before: a job that is run again until it succeeds has succeeded."""
    if o.json:
        print(json.dumps({"error": None, "exit_code": 0, "steps": [], "checkpoint": step - 1}))
    else:
        print(f"ok: checkpoint {step - 1} is after the last of --num-steps {o.num_steps}; nothing is left to do")
    return 0


def _paths(options: Options, maxtext: Path) -> Paths:
    if options.output:
        output = options.output.resolve()
    elif options.dry_run:
        output = Path(tempfile.gettempdir()) / "multimesh-maxtext-XXXXXXXX"
    else:
        output = Path(tempfile.mkdtemp(prefix="multimesh-maxtext-"))
    metrics = options.metrics_file.resolve() if options.metrics_file else output / "metrics.jsonl"
    return Paths(python=sys.executable, maxtext=maxtext.resolve(), output=output, metrics=metrics)


def _prepare(job: Job, paths: Paths, texts: Sequence[str]) -> None:
    """Make the folders and the corpus, and remove files of an older run that could pass for files of this one."""
    o = job.options
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


def _verify_outcome(job: Job, outcome: Outcome, reference: Outcome) -> tuple[Outcome, list[Pair]]:
    """Compare a pipeline with its reference. An error of either, or a difference, becomes the error of the outcome."""
    if reference.error:
        return replace(outcome, error=reference.error, log=reference.log), []
    pairs = compare(outcome.steps, reference.steps)
    try:
        check_agreement(pairs, dtype=str(job.model.resolved.get("dtype")))
    except LauncherError as error:
        return replace(outcome, error=error), pairs
    return outcome, pairs


def _report(job: Job, console: Console, paths: Paths, outcome: Outcome, pairs: Sequence[Pair]) -> int:
    o, steps, error = job.options, outcome.steps, outcome.error
    if o.json and not console.quiet:
        files = {"output": paths.output, "metrics_file": paths.metrics, "log": paths.log}
        found = report.summary(steps, outcome.evaluations, pairs, files, error)
        found |= {"processes": speeds} if (speeds := read_speeds(paths.metrics)) else {}
        print(json.dumps(report.schedule_choice(paths.schedule) | found))
    else:
        if schedule := report.schedule_choice(paths.schedule):
            console.print(f"{schedule['schedule']['text']}\nschedule {paths.schedule}\n", highlight=False, markup=False)
        console.print(report.comparison(pairs) if pairs else report.step_table(steps))
        for evaluation in outcome.evaluations:
            console.print(f"evaluated after step {evaluation.step}: loss {evaluation.loss:.4f}", highlight=False)
        if pairs:
            console.print(f"largest difference {largest(pairs):.1e}, at most {TOLERANCE:.0e} allowed", highlight=False)
        console.print(f"metrics {paths.metrics}", highlight=False)
    silent = error and error.shared and console.quiet  # another process tells for all
    if isinstance(error, TrainerFailedError) and not silent:
        print(tail(outcome.log), file=sys.stderr)
    if error and not silent:
        print(f"error: {error}", file=sys.stderr)
    elif not error and not o.json:
        agree = f"; the same without the pipeline, in {job.model.resolved.get('dtype')}" if pairs else ""
        console.print(
            f"ok: {len(steps)} steps, loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}{agree}", highlight=False
        )
    return error.exit_code if error else 0
