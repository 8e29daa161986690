"""Tells of a run: headline, progress, tables of its steps or one JSON object, its end; and never blocks on a reader."""

from __future__ import annotations

import io
import json
import os
import select
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from multimesh_maxtext import errors, outcome
from multimesh_maxtext.checkpoint_folder import look, state_line
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.steps import TOLERANCE, Run, Step
from multimesh_maxtext.command.translate import CHECKPOINTS, KEEP

_ROWS = 12  # of the table
_TAIL = 20  # lines of a failed trainer's log
_PATIENCE = 2.0  # seconds after which a reader who takes nothing is given up


class Output(Console):
    """Rich's console. Where nobody reads it any more it raises the `BrokenPipeError`, and does not end the program."""

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise


def headline(job: Job, paths: Paths) -> str:
    """Return the job in a line: its backend, devices, grid, layers and batch; and where it writes."""
    o = job.flags
    use = "in the pipeline" if o.pp > 1 else "accumulated"
    sizes = job.pieces if o.staged else ()
    dealt = f" dealt {' '.join(map(str, sizes))}" if len(set(sizes)) > 1 else ""
    lines = [
        f"MaxText, backend {o.backend}, {job.devices} {o.platform} devices: {o.grid}; "
        f"{job.model.layers} layers{dealt}; batch {job.batch} = {job.microbatches} microbatches {use}",
        f"output {paths.output}",
        f"log    {paths.log}",
    ]
    if o.checkpoint:
        lines.append(f"the newest {o.values.get(KEEP, CHECKPOINTS[KEEP])} checkpoints stay ({KEEP}=)")
    if o.nodes > 1 and not (o.spawn or o.output):
        lines.append("other processes log to temporary folders of their own; --output DIR keeps all in one")
    return "\n".join(lines)


@contextmanager
def progress(console: Console, begin: str) -> Iterator[Callable[[str], object]]:
    """Show lines as they come: in one line on a terminal, each for itself elsewhere."""
    with console.status(begin) if console.is_terminal and not console.quiet else nullcontext() as status:
        show = status.update if status else console.print
        show(begin)
        yield show


def step_line(step: Step, total: int) -> str:
    """Return a step as a line."""
    speed = f"  {step.tokens_per_second:,.0f} tokens/s" if step.number else ""
    return f"step {step.number} of {total}  loss {step.loss:.4f}  {step.seconds:.2f} s{speed}"


def make_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines, its cells to the right."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def step_table(run: Run) -> Table:
    """Return losses, norms and speed of at most a dozen steps, with ``--verify`` those of one program beside them."""
    last = len(run.steps) - 1
    count = min(_ROWS, last + 1)
    rows = []
    for number in (round(i * last / max(1, count - 1)) for i in range(count)):
        step = run.steps[number]
        values = [f"{step.loss:.4f}", f"{step.gradient_norm:.4f}"]
        if run.reference:
            other = run.reference[number]
            pairs = (step.loss, other.loss, step.gradient_norm, other.gradient_norm)
            values = [*(f"{value:.6f}" for value in pairs), f"{run.differences[number]:.1e}"]
        # the first step also compiles
        speed = f"{step.tokens_per_second:,.0f}" if step.number else "compiles"
        rows.append([str(step.number), *values, f"{step.seconds:.3f} s", speed])
    names = ("loss", "spmd", "grad norm", "spmd", "diff") if run.reference else ("loss", "gradient norm")
    return make_table(("step", *names, "step time", "tokens/s"), rows)


def plan_text(command: Sequence[str], environment: Mapping[str, str], configuration: Mapping[str, Any]) -> str:
    """Return the text of ``--dry-run``: lines to paste into a shell, then the configuration."""
    lines = ["# environment", *(f"export {key}={shlex.quote(value)}" for key, value in environment.items())]
    lines += ["# command", shlex.join(command)]
    lines += ["# configuration", *(f"#   {key}: {json.dumps(value)}" for key, value in configuration.items())]
    return "\n".join(lines)


def summary(run: Run, checkpoint: int | None = None) -> dict[str, Any]:
    """Return the object that ``--json`` prints after a run. JSON has no NaN: a number that is not finite is null."""
    paths = run.paths
    values: dict[str, Any] = {**schedule_choice(paths.schedule), "checkpoint": checkpoint}
    values |= {"steps": list(map(asdict, run.steps)), "evaluations": run.evaluations}
    if run.reference:
        values |= {"reference": list(map(asdict, run.reference)), "difference": max(run.differences)}
    values |= {"output": str(paths.output), "metrics_file": str(paths.metrics), "log": str(paths.log)}
    values |= {"error": run.error and str(run.error), "exit_code": run.error.exit_code if run.error else 0}
    return json.loads(json.dumps(values), parse_constant=lambda _name: None)


def schedule_choice(file: Path) -> dict[str, Any]:
    """Return the choice of ``--schedule auto``; nothing under another schedule."""
    return {"schedule": json.loads(file.read_text())} if file.exists() else {}


def report(job: Job, run: Run, console: Console) -> int:
    """Write the outcome of a run, and print its results and why it ended; return its exit code."""
    o, paths, steps, error = job.flags, run.paths, run.steps, run.error
    newest = max(look(o.checkpoint) if o.checkpoint else (), default=None)
    last = max((step.number for step in steps), default=None)
    outcome.write(error, paths.outcome, outcome.name_process(paths.rank, o.nodes), step=last, checkpoint=newest)
    if isinstance(error, errors.UnreadError):
        raise error
    if o.json and not paths.rank:
        print(json.dumps(summary(run, newest)))
    if schedule := schedule_choice(paths.schedule):
        console.print(f"{schedule['schedule']['text']}\nschedule {paths.schedule}\n")
    console.print(step_table(run))
    for evaluation in run.evaluations:
        console.print(f"evaluated after step {evaluation['step']}: loss {evaluation['loss']:.4f}")
    if run.reference:
        console.print(f"largest difference {max(run.differences):.1e}, at most {TOLERANCE:.0e} allowed")
    console.print(f"metrics {paths.metrics}")
    if not error and not run.planned:  # a job that is run again until it succeeds has succeeded
        console.print(f"ok: checkpoint {newest} is after the last of --num-steps {o.num_steps}; nothing is left to do")
    elif not error:
        agree = f"; the same without the pipeline, in {job.model.resolved.get('dtype')}" if run.reference else ""
        console.print(f"ok: {len(steps)} steps, loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}{agree}")
    elif not (error.shared and paths.rank):  # else another process tells
        print_tail(error)
        # A run that was refused, or ran to its end, left nothing to go on from; errors of checkpoints tell themselves.
        ended = isinstance(error, errors.FlagError | errors.LossNotFallingError | errors.DisagreementError)
        state = "" if ended or type(error) is errors.CheckpointError else f"; {state_line(o.checkpoint)}"
        who = f" ({error.who})" if o.nodes > 1 and error.who else ""
        print(f"error: {error}{state}{who}", file=sys.stderr)
    return error.exit_code if error else 0


def print_tail(error: errors.LauncherError) -> None:
    """Print the end of the log of a trainer that failed, indented."""
    if isinstance(error, errors.TrainerFailedError) and error.log and error.log.exists():
        lines = error.log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(f"  | {line}" for line in lines[-_TAIL:]), file=sys.stderr)


class UnblockedOutput(io.TextIOBase):
    """A text stream in place of another one. It leaves out what its reader does not take."""

    def __init__(self, stream: TextIO) -> None:
        """Write with a descriptor of its own, as all that have the stream's would get errors else."""
        super().__init__()
        self.fileno, self.isatty, self.writable = stream.fileno, stream.isatty, stream.writable  # type: ignore[method-assign]
        self._descriptor = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self._patience = _PATIENCE

    def write(self, text: str) -> int:
        """Write text, and wait while it is read. Raises ``BrokenPipeError`` where nobody reads any more."""
        data = text.encode("utf-8", "backslashreplace")
        while data and select.select([], [self._descriptor], [], self._patience)[1]:
            self._patience = _PATIENCE
            with suppress(BlockingIOError):
                data = data[os.write(self._descriptor, data) :]
        if data:  # we wait no second time for who takes nothing
            self._patience = 0.0
        return len(text)


def unblock_output() -> None:
    """Let nobody hold up this process who does not read what it prints: a pager, a terminal that was stopped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, AttributeError):  # a terminal of another user; none at all
            if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) or stream.isatty():
                setattr(sys, name, UnblockedOutput(stream))
