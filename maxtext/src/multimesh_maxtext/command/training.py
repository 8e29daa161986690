"""The trainer: a child process that never outlives us, followed step by step to its end."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from multimesh.launch import end_with_parent
from multimesh_maxtext.command import logs, reasons
from multimesh_maxtext.command.checkpoint import Beginning, explain
from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.command.launch import Launch
from multimesh_maxtext.command.report import Evaluation, Step, judge, progress
from multimesh_maxtext.command.reserve import mark_run
from multimesh_maxtext.command.told import HoldUps
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import (
    LauncherError,
    MissingPartError,
    ProcessLostError,
    StoppedEarlyError,
    TrainerFailedError,
    UnreadError,
)
from multimesh_maxtext.handoff import SECONDS

_PATIENCE = 5.0  # seconds that a trainer gets to end by itself before it is killed
_POLL = 0.1  # seconds between looks at the metrics file
_HOLD = 4.0  # seconds that a trainer gets to end because another process of its job has

_SAME = 2.0  # seconds within which signals are one: a batch system may tell a process by two ways

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run: of batch systems, of a closed terminal, and of ``sbatch --signal=USR1@300``."""

_ASKED = "the step in flight ends, and a checkpoint is written; a second signal ends all at once"

Tell = Callable[[Mapping[str, float]], object]
"""Called with the record of each step and evaluation."""


@dataclass(frozen=True)
class Outcome:
    """The steps and evaluations that completed, the error (``None`` for a success), and the log."""

    steps: list[Step]
    evaluations: list[Evaluation]
    error: LauncherError | None
    log: Path


def train(
    job: Job, start: Launch, paths: Paths, console: Console, begin: Beginning, tell: Sequence[Tell] = ()
) -> Outcome:
    """Start the trainer, show its progress, tell it to others, and judge the run."""
    o = job.options
    if not o.json:
        console.print(_headline(job), highlight=False)
        console.print(f"output {paths.output}\nlog    {paths.log}", highlight=False)
        if o.checkpoint:
            console.print(f"the newest {o.keep_checkpoints} checkpoints are kept (--keep-checkpoints)", highlight=False)
        if o.nodes > 1 and not o.output:
            console.print("other processes log to temporary folders of their own; --output DIR keeps all in one")
    before = keep_before(paths.metrics, begin.step)
    skip = paths.metrics.stat().st_size if paths.metrics.exists() else 0
    follower = Follower(paths.metrics, skip=skip, tell=tell)
    hold = _HOLD if o.nodes > 1 else 0.0
    try:
        steps, returncode = follow(
            follower, start, paths, console, begin, total=o.num_steps, quiet=o.json, hold=hold, saves=bool(o.checkpoint)
        )
    except BrokenPipeError:
        raise UnreadError(
            "nobody reads the output any more (a closed pipe), so the trainer was stopped; write it to a file"
        ) from None
    error: LauncherError | None = None
    try:
        judge(
            steps,
            expected=o.num_steps,
            returncode=returncode,
            log=paths.log,
            before=before,
            first=begin.step,
            several=o.nodes > 1,
        )
    except (TrainerFailedError, StoppedEarlyError) as ended:
        log = logs.read_log(paths.log)
        lost = [said for said in reasons.LOST.findall(log) if " ended with exit code " not in said]
        if o.nodes > 1 and lost and returncode != -signal.SIGKILL:  # any other failure comes from that
            error = ProcessLostError(
                f"{lost[0]}, {reasons.count_steps(ended)}; {reasons.resume_advice(o.checkpoint)}; see {paths.log}"
            )
        else:
            known: LauncherError | None = reasons.read_refusal(log) or reasons.read_meeting(log, returncode)
            known = known or reasons.out_of_memory(log, o.platform, ended) or explain(log, o.checkpoint)
            error = known or reasons.explain_stop(log, ended)
    except LauncherError as wrong:
        error = wrong
    return Outcome(steps, follower.evaluations, error, paths.log)


def _headline(job: Job) -> str:
    o = job.options
    use = "in the pipeline" if o.pp > 1 else "accumulated"
    sizes = job.pieces if o.staged else ()
    dealt = f" dealt {' '.join(map(str, sizes))}" if len(set(sizes)) > 1 else ""
    return (
        f"MaxText, backend {o.backend}, {job.devices} {o.platform} devices: {o.grid}; "
        f"{job.model.layers} layers{dealt}; batch {job.batch} = {job.microbatches} microbatches {use}"
    )


def follow(
    follower: Follower,
    start: Launch,
    paths: Paths,
    console: Console,
    begin: Beginning,
    *,
    total: int,
    quiet: bool,
    hold: float = 0.0,
    saves: bool = False,
) -> tuple[list[Step], int]:
    """Run the trainer to its end; its steps and its exit code.

    Where one of several processes fails, a launcher ends the others, perhaps before they have learnt of it. So a
    process that is told to end waits ``hold`` seconds for its trainer, and returns its code, not that of an interrupt.
    A trainer that ``saves`` writes a checkpoint first, and ends by itself; a second signal ends it at once. Once it has
    saved, it does not matter how it ends.
    """
    steps: list[Step] = []
    log, told, terminated = _Tail(paths.log), HoldUps(), False

    def look_on() -> None:
        if not console.quiet:
            told.show(log.lines())
        logs.bound_log(paths.log)
        for step in follower.poll():
            if not steps:
                mark_run(paths.output)
            steps.append(step)
            show(step)

    with (
        progress(console, total, quiet=quiet) as show,
        trainer(start, paths, inherited=begin.inherited) as process,
        asking(process, quiet=console.quiet) if saves else nullcontext(),
    ):
        try:
            running = True
            while running:
                try:
                    process.wait(_POLL)
                    running = False
                except subprocess.TimeoutExpired:
                    pass
                look_on()
        except Terminated:
            terminated = True
            if hold:
                keep_code()
            _reap(process, hold)
            look_on()
        saved = saves and reasons.has_saved(logs.read_log(paths.log))
        if saved or (hold and process.returncode):
            keep_code()
        cut = process.returncode is None
    killed = cut or process.returncode in (-signal.SIGTERM, -signal.SIGKILL)
    if killed and saved:
        return steps, 0
    # Only this command sends SIGTERM to a trainer: that of one that saves came before it trained.
    if killed and (terminated or (saves and process.returncode == -signal.SIGTERM)):
        raise Terminated
    return steps, process.returncode


@contextmanager
def trainer(launch: Launch, paths: Paths, *, inherited: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Start the trainer with its output in the log; on leaving, it and all its children are gone.

    It inherits the given file descriptors.
    """
    environment = {**os.environ, **launch.environment}
    logs.name_older(paths.log).unlink(missing_ok=True)
    paths.log.write_bytes(b"")
    with paths.log.open("ab") as log:
        try:
            process = subprocess.Popen(
                launch.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=inherited,
                preexec_fn=_following(),
            )
        except OSError as error:
            raise MissingPartError(
                f"{launch.command[0]} cannot be started ({error.strerror}); run ./bootstrap.sh"
            ) from error
    with _guard(process.pid):
        try:
            yield process
        finally:
            _end(process)


def _following() -> Callable[[], object]:
    """Return what the child does first: leave SIGUSR1, which Slurm sends to all processes, to us; end when we die."""
    bind = end_with_parent()

    return lambda: (signal.signal(signal.SIGUSR1, signal.SIG_IGN), bind and bind())


@contextmanager
def _guard(group: int) -> Iterator[None]:
    """Let a shell kill a group of processes if this process dies first: also those that read data for the trainer."""
    # What a shell puts into the background has no stdin of its own.
    kill = 'exec 3<&0 >/dev/null 2>&1; { read -r _ <&3 || kill -s KILL -- "-$1"; } &'
    shell = ["/bin/sh", "-c", kill, "guard", str(group)]
    guard = subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True)
    guard.wait()  # it goes on behind the shell
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            guard.communicate(b"\n")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGKILL)  # to the trainer SIGTERM may be a question
        _reap(process, _PATIENCE)
        os.killpg(process.pid, signal.SIGKILL)
    _reap(process, math.inf)


def _reap(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a process: ``Popen.wait`` never returns where an interrupt left its lock taken."""
    end = time.monotonic() + seconds
    while process.returncode is None and time.monotonic() < end:
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:  # it was reaped, and the interrupt came before that was noted
            process.returncode = -signal.SIGKILL
            break
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(_POLL)


class Terminated(KeyboardInterrupt):
    """One of `SIGNALS` came: from a batch system, or with a closed terminal."""


@contextmanager
def asking(process: subprocess.Popen[bytes], *, quiet: bool) -> Iterator[None]:
    """Let a signal ask a trainer to save and end. One that comes later is treated as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    asked = math.inf

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if time.monotonic() - asked > _SAME:
            before[number](number, frame)
        if asked == math.inf:
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            if not quiet:
                os.write(2, f"{signal.Signals(number).name}: {_ASKED}\n".encode())

    before |= {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is ask:
                signal.signal(number, handler)


def keep_code() -> None:
    """Ignore SIGTERM from now on: this process ends by itself, with a code that says more."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Treat signals of a batch system and of a closed terminal like Ctrl-C, so that clean-up runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Follower:
    """Reads the steps of a run as they are written.

    Attributes
    ----------
    evaluations
        Those read so far.
    """

    def __init__(self, metrics: Path, *, skip: int = 0, tell: Sequence[Tell] = ()) -> None:
        """Follow the metrics, of which ``skip`` bytes are an earlier run's; each of ``tell`` gets the other records."""
        self._metrics = _Tail(metrics, skip)
        self._tell = tell
        self.evaluations: list[Evaluation] = []

    def poll(self) -> list[Step]:
        """Return the steps completed since the last poll."""
        records = [record for record in map(_parse, self._metrics.lines()) if record]
        # MaxText also writes the running means of an evaluation, which have no total.
        done = [record for record in records if "eval/total_loss" in record]
        for record in records:
            for tell in self._tell if record in done or "learning/loss" in record else ():
                tell(record)
        self.evaluations += [Evaluation(int(record["step"]), record["eval/avg_loss"]) for record in done]
        return [_step(record) for record in records if "learning/loss" in record]


def _step(record: dict[str, float]) -> Step:
    return Step(
        number=int(record["step"]),
        loss=record["learning/loss"],
        gradient_norm=record.get("learning/raw_grad_norm", record.get("learning/grad_norm", float("nan"))),
        seconds=record.get(SECONDS, math.nan),
        tokens=record["learning/total_weights"],
    )


def keep_before(metrics: Path, step: int) -> list[Step]:
    """Cut the records of a step and all later ones off a metrics file; return the steps that remain.

    The evaluation after the step before it stays.
    """
    end = position = 0
    if metrics.exists():
        for line in metrics.read_bytes().splitlines(keepends=True):
            position += len(line)
            record = _parse(line.decode("utf-8", "replace")) or {}
            if record.keys() & {"learning/loss", "eval/total_loss"} and record["step"] < step:
                end = position
        os.truncate(metrics, end)
    return Follower(metrics).poll()


def _parse(line: str) -> dict[str, float] | None:
    """Return a record; ``None`` for a torn line, which MaxText leaves where it empties the file."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


class _Tail:
    """Complete lines that were appended to a file since the last look; the file may not exist yet, or be emptied."""

    def __init__(self, path: Path, skip: int = 0) -> None:
        self._path = path
        self._offset = skip

    def lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        yield from data[:end].decode("utf-8", "replace").splitlines()
