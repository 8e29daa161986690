"""The trainer: a child process that never outlives us, followed step by step to its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console

from multimesh_maxtext import outcome
from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.command.checkpoint import PARAMETERS, mark_run
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.member import Member
from multimesh_maxtext.command.report import headline, progress, step_line
from multimesh_maxtext.command.steps import Run, Step, Tell, judge, tail
from multimesh_maxtext.command.translate import CHECKPOINTS, KEEP, Launch
from multimesh_maxtext.errors import CheckpointError, InterruptedRunError, LauncherError, MissingPartError, UnreadError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run: Ctrl-C, of batch systems, of a closed terminal, and of ``sbatch --signal=USR1@300``."""

SPAWNED = "MULTIMESH_MAXTEXT_SPAWNED"
"""Environment variable of the processes of ``--spawn``: who started them says why all ended."""

_NEWS = "multimesh: "
"""Begins the lines of the trainer's log that an operator should see at once: who is lost, or holds up the others."""

# Slurm and a terminal send USR1 and INT to all, and we say what ends. A shell that no process waits for kills the
# trainer's group, also those that read data for it, when we end: however that is, our end of its pipe is closed then.
_GUARDED = """
trap '' USR1 INT
exec 3<&0 </dev/null
( /bin/sh -c 'read -r _; kill -s KILL 0' guard "$$" <&3 & )
exec 3<&-
exec "$@"
"""

_POLL = 0.1  # seconds between looks at the trainer and its metrics
_SAME = 2.0  # seconds within which signals are one: a batch system may tell a process by two ways
_TAIL = 20  # lines of a failed trainer's log


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt`` at the first signal, so that clean-up runs; later ones do not disturb that."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class StopRequest:
    """Counts the signals that tell this process to end."""

    def __init__(self) -> None:
        """Begin with none."""
        self.count, self.name, self._newest = 0, "", -_SAME

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Take note of a signal."""
        now = time.monotonic()
        if now - self._newest > _SAME:
            self.count, self.name = self.count + 1, signal.Signals(number).name
        self._newest = now


@contextmanager
def receiving(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let a function have the `SIGNALS`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def train(
    job: Job,
    start: Launch,
    paths: Paths,
    console: Console,
    first: int,
    this: Member,
    stop: StopRequest,
    tell: Sequence[Tell] = (),
) -> Run:
    """Start the trainer, show its progress, tell it to others, judge the run, and write why it ended.

    ``stop`` receives the signals. One that comes when the trainer has ended does not change the verdict.
    """
    o = job.flags
    if not o.json:
        console.print(f"{headline(job)}\noutput {paths.output}\nlog    {paths.log}")
        if o.checkpoint:
            number = o.values.get(KEEP, CHECKPOINTS[KEEP])
            console.print(f"the newest {number} checkpoints stay ({KEEP}=)")
        if o.nodes > 1 and not o.output:
            console.print("other processes log to temporary folders of their own; --output DIR keeps all in one")
    run, steps = Run(paths, first, tell), range(first, o.num_steps)
    try:
        with progress(console, "starting MaxText; it compiles before the first step", quiet=o.json) as show:
            code = follow(run, lambda step: show(step_line(step, o.num_steps)), start, paths, stop, o.checkpoint)
        ended = outcome.read(paths.outcome)
        if stop.count and not ended and (code < 0 or len(run.steps) < len(steps)):
            raise InterruptedRunError(f"{stop.name} ended the run")
        judge(run, code, ended, steps, several=o.nodes > 1)
    except BrokenPipeError:
        run.error = UnreadError(
            "nobody reads the output any more (a closed pipe), so the trainer was stopped; write it to a file"
        )
    except LauncherError as error:
        run.error = error
        if type(error) is CheckpointError and o.checkpoint and PARAMETERS not in str(error):
            run.error = CheckpointError(f"--checkpoint {o.checkpoint}: {error}")
    write_outcome(run, paths, this, o.checkpoint)
    return run


def write_outcome(run: Run, paths: Paths, this: Member, checkpoints: Path | None) -> None:
    """Write why this process ended, and how far it came, for whoever started it and for the others."""
    newest = look(checkpoints).steps[-1:] if checkpoints else ()
    step, checkpoint = run.steps[-1].number if run.steps else None, newest[0] if newest else None
    outcome.write(run.error, paths.outcome, this.rank, this.count, step=step, checkpoint=checkpoint)


def follow(
    run: Run,
    show: Callable[[Step], object],
    start: Launch,
    paths: Paths,
    stop: StopRequest,
    checkpoints: Path | None = None,
) -> int:
    """Run the trainer to its end, and return its exit code; ``run`` gets its records.

    The first signal lets a trainer that has ``checkpoints``, and has done a step, write one and end; before its first
    step there is nothing to save. It, or the second signal, ends any other at once.
    """
    has_asked, news = False, tail(paths.log)

    def say(line: str) -> None:
        if not paths.process:
            print(line, file=sys.stderr)

    def look_on() -> None:
        for line in next(news):
            if line.startswith(_NEWS):
                say(line)
        steps = run.read()
        if steps and steps == run.steps:
            mark_run(paths.output, checkpoints)
        for step in steps:
            show(step)

    with trainer(start, paths) as process:
        while process.poll() is None and not (stop.count > 1 or (stop.count and not (checkpoints and run.steps))):
            if stop.count and not has_asked:
                has_asked = True
                process.send_signal(signal.SIGTERM)
                say(f"{stop.name}: the step in flight ends, then the state is saved")
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL)
            look_on()
        look_on()
    return process.returncode


@contextmanager
def trainer(launch: Launch, paths: Paths) -> Iterator[subprocess.Popen[bytes]]:
    """Start the trainer with its output in the log; on leaving, it and all its children are gone."""
    if not shutil.which(launch.command[0]):
        raise MissingPartError(f"{launch.command[0]} cannot be started; run ./bootstrap.sh")
    outcome.reserve(paths.outcome)
    with (
        paths.log.open("wb") as log,
        subprocess.Popen(
            ("/bin/sh", "-c", _GUARDED, "trainer", *launch.command),
            env={**os.environ, **launch.environment},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=False,  # it inherits those of locks
        ) as process,
    ):
        try:
            yield process
        finally:
            with receiving(StopRequest()), suppress(ProcessLookupError):  # what ends now cannot be interrupted
                for _ in range(100):  # until all are gone, and hold no lock any more
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    time.sleep(0.01)


def log_tail(log: Path) -> str:
    """Return the end of a failed trainer's log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  | {line}" for line in lines[-_TAIL:])


def state_line(checkpoints: Path | None) -> str:
    """Return what a run that ended early has left, and how to go on."""
    if checkpoints is None:
        return "no checkpoint was written: --checkpoint DIR keeps the state"
    try:
        steps = look(checkpoints).steps
    except CheckpointError:
        return f"--checkpoint {checkpoints} cannot be read"
    if steps:
        return f"checkpoint {steps[-1]} is complete: start the same line with --resume"
    return "no checkpoint is complete: start the same line again"
