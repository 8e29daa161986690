"""One training from start to verdict: the trainer's process, its progress, whether it succeeded."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from multimesh.errors import MultiMeshError
from multimesh.maxtext import report
from multimesh.maxtext.checks import Job
from multimesh.maxtext.metrics import Follower, Step
from multimesh.maxtext.process import trainer
from multimesh.maxtext.translate import Launch, Paths
from multimesh.maxtext.verdict import judge

_POLL = 0.1  # seconds between looks at the metrics file
_TAIL = 20  # lines of a failed trainer's log


@dataclass(frozen=True)
class Outcome:
    """The steps that completed, why the run is no success (``None`` if it is one), and the log that tells."""

    steps: list[Step]
    error: MultiMeshError | None
    log: Path


def train(job: Job, start: Launch, paths: Paths, console: Console) -> Outcome:
    """Start the trainer, show its progress and judge the run."""
    o = job.options
    if not o.json:
        console.print(_headline(job), highlight=False)
        console.print(f"output {paths.output}\nlog    {paths.log}", highlight=False)
    steps, returncode = _follow(start, paths, console, total=o.num_steps, quiet=o.json)
    try:
        judge(steps, expected=o.num_steps, returncode=returncode, log=paths.log)
    except MultiMeshError as error:
        return Outcome(steps, error, paths.log)
    return Outcome(steps, None, paths.log)


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
