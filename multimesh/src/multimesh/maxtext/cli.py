"""The command behind ``maxtext/run.py``: parse, check, translate, train, judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from multimesh.errors import MultiMeshError, TrainerFailedError, UsageError
from multimesh.maxtext import report
from multimesh.maxtext.checks import Job, check_backend, check_flags, check_job, check_machine
from multimesh.maxtext.flags import parse
from multimesh.maxtext.gpus import visible_gpu_memory
from multimesh.maxtext.locate import find_maxtext, has_package
from multimesh.maxtext.metrics import Follower, Step
from multimesh.maxtext.model import describe_model
from multimesh.maxtext.options import Options
from multimesh.maxtext.process import terminate_as_interrupt, trainer
from multimesh.maxtext.realm import warning
from multimesh.maxtext.text import read_texts, write_corpus
from multimesh.maxtext.translate import Launch, Paths, launch
from multimesh.maxtext.verdict import judge

_POLL = 0.1  # seconds between looks at the metrics file
_TAIL = 20  # lines of a failed trainer's log
INTERRUPTED = 130


def main(argv: Sequence[str], *, root: Path | None = None) -> int:
    """Run the command line and return its exit code; nothing but ``--help`` leaves by an exception.

    Parameters
    ----------
    argv
        The arguments, without the program's name.
    root
        The repository, if this runs from one: where ``third_party/maxtext`` is looked for.
    """
    try:
        with terminate_as_interrupt():
            return _run(parse(argv), root)
    except MultiMeshError as error:
        print(f"error: {error}", file=sys.stderr)
        if "--json" in argv:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the trainer was stopped", file=sys.stderr)
        return INTERRUPTED


def _run(options: Options, root: Path | None) -> int:
    check_backend(options)
    check_flags(options)
    maxtext = find_maxtext(root)
    job = check_job(options, describe_model(options, maxtext / "maxtext"))
    texts = read_texts(options.text or ())
    memory = visible_gpu_memory() if options.gpus else None
    gpu_memory = min(memory) if memory else None
    if not options.dry_run:
        check_machine(
            options, visible_gpus=None if memory is None else len(memory), has_tfds=has_package("tensorflow_datasets")
        )
    note = warning(options, gpu_memory=gpu_memory)
    if note:
        print(f"warning: {note}", file=sys.stderr)
    paths = _paths(options, maxtext)
    start = launch(job, paths, inherited=os.environ, gpu_memory=gpu_memory)
    if options.dry_run:
        return _dry_run(start, as_json=options.json)
    _prepare(options, paths)
    if texts:
        write_corpus(texts, paths.text, sequence_length=options.sequence_length)
    return _train(job, start, paths)


def _paths(options: Options, maxtext: Path) -> Paths:
    if options.output:
        output = options.output.resolve()
    elif options.dry_run:
        output = Path(tempfile.gettempdir()) / "multimesh-maxtext-XXXXXXXX"
    else:
        output = Path(tempfile.mkdtemp(prefix="multimesh-maxtext-"))
    metrics = options.metrics_file.resolve() if options.metrics_file else output / "metrics.jsonl"
    return Paths(python=sys.executable, maxtext=maxtext.resolve(), output=output, metrics=metrics)


def _prepare(options: Options, paths: Paths) -> None:
    """Make the folders and remove an older run's metrics, which must not be judged in place of this run's."""
    try:
        for folder in (paths.output, paths.metrics.parent, *([options.dump] if options.dump else [])):
            folder.mkdir(parents=True, exist_ok=True)
        paths.metrics.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}; choose another --output, --metrics-file or --dump"
        ) from error


def _dry_run(start: Launch, *, as_json: bool) -> int:
    if as_json:
        print(
            json.dumps({name: getattr(start, name) for name in ("command", "environment", "configuration")}, indent=1)
        )
    else:
        print(report.plan_text(start.command, start.environment, start.configuration))
    return 0


def _train(job: Job, start: Launch, paths: Paths) -> int:
    o = job.options
    console = Console(soft_wrap=True)
    files = {"output": paths.output, "metrics_file": paths.metrics, "log": paths.log}
    if not o.json:
        console.print(_headline(job), highlight=False)
        console.print(f"output {paths.output}\nlog    {paths.log}", highlight=False)
    steps, returncode = _follow(start, paths, console, total=o.num_steps, quiet=o.json)
    error: MultiMeshError | None = None
    try:
        judge(steps, expected=o.num_steps, returncode=returncode, log=paths.log)
    except MultiMeshError as raised:
        error = raised
    code = error.exit_code if error else 0
    if o.json:
        print(json.dumps(report.summary(steps, files, error, code)))
    else:
        console.print(report.table(steps))
        console.print(f"metrics {paths.metrics}", highlight=False)
    if isinstance(error, TrainerFailedError):
        print(_tail(paths.log), file=sys.stderr)
    if error:
        print(f"error: {error}", file=sys.stderr)
    elif not o.json:
        console.print(f"ok: {len(steps)} steps, loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}", highlight=False)
    return code


def _headline(job: Job) -> str:
    o = job.options
    axes = ((name, getattr(o, name)) for name in ("dp", "fsdp", "tp", "pp", "ep", "interleave"))
    grid = " ".join(f"{name} {size}" for name, size in axes if size > 1) or "no parallelism"
    use = "in the pipeline" if o.pp > 1 else "accumulated"
    return (
        f"MaxText, backend {o.backend}, {job.devices} {o.platform} devices: {grid}; {job.model.layers} layers; "
        f"batch {job.batch} = {job.microbatches} microbatches {use}"
    )


def _follow(start: Launch, paths: Paths, console: Console, *, total: int, quiet: bool) -> tuple[list[Step], int]:
    follower = Follower(paths.metrics, paths.log)
    steps: list[Step] = []
    with report.progress(console, total, quiet=quiet) as show, trainer(start, paths) as process:
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


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
    return "\n".join(f"  | {line}" for line in lines)
