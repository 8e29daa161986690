"""Trainers: child processes that never outlive us; and the signals that end them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from multimesh_maxtext import outcome
from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.command.job import Paths
from multimesh_maxtext.command.translate import Launch
from multimesh_maxtext.errors import CheckpointError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run: Ctrl-C, of batch systems, of a closed terminal, and of ``sbatch --signal=USR1@300``."""

# Slurm and a terminal send USR1 and INT to all, and we say what ends. A shell that no process waits for kills the
# trainer's group, also those that read data for it, when we end: however that is, our end of its pipe is closed then.
_GUARDED = """
trap '' USR1 INT
exec 3<&0 </dev/null
( /bin/sh -c 'read -r _; kill -s KILL 0' guard "$$" <&3 & )
exec 3<&-
exec "$@"
"""

_POLL = 0.1  # seconds between looks at the trainers and their records
_SAME = 2.0  # seconds within which signals are one: a batch system may tell a process by two ways
_PATIENCE = 10.0  # seconds that the other trainers get to end by themselves when one has failed
_TAIL = 20  # lines of a failed trainer's log

Start = tuple[Launch, Paths]
"""A trainer to start, and where it writes."""


class StopRequest:
    """Counts the signals that tell this process to end. Before it trains the first raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        """Begin with none."""
        self.count, self.name, self.trains, self._newest = 0, "", False, -_SAME

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Take note of a signal."""
        first, now = not self.count, time.monotonic()
        if now - self._newest > _SAME:
            self.count, self.name = self.count + 1, signal.Signals(number).name
        self._newest = now
        if first and not self.trains:
            raise KeyboardInterrupt


def run_trainers(
    starts: Sequence[Start], look_on: Callable[[], bool], stop: StopRequest
) -> tuple[list[int | None], str]:
    """Run the trainers of a job to their end.

    ``look_on`` is called every moment, and once after the end. It says whether there is something to save: the first
    signal lets the trainers do so, and end. Otherwise it ends them at once, as the second one does. When one has
    failed, the others get some seconds to end.

    Returns their exit codes, None for one that we ended; and the name of the signal that ended them, if one did.
    """
    has_asked, until = False, math.inf
    with ExitStack() as stack:
        processes = [stack.enter_context(_trainer(*start)) for start in starts]
        while True:
            codes, now = [process.poll() for process in processes], time.monotonic()
            saves = look_on()
            if None not in codes or now > until or stop.count > 1 or (stop.count and not saves):
                # A signal that came when they had ended changes nothing, but Slurm may send it to them as well.
                codes = [process.poll() for process in processes]
                stopped = has_asked or any(code is None or code < 0 for code in codes)
                return codes, stop.name if stopped else ""
            if any(codes):
                until = min(until, now + _PATIENCE)
            if stop.count and not has_asked:
                has_asked = True
                for process in processes:
                    process.send_signal(signal.SIGTERM)
                if not starts[0][1].process:  # of several commands the first speaks
                    print(f"{stop.name}: the step in flight ends, then the state is saved", file=sys.stderr)
            time.sleep(_POLL)


@contextmanager
def _trainer(start: Launch, paths: Paths) -> Iterator[subprocess.Popen[bytes]]:
    """Start a trainer with its output in the log; on leaving, it and all its children are gone."""
    outcome.reserve(paths.outcome)
    with (
        paths.log.open("wb") as log,
        subprocess.Popen(
            ("/bin/sh", "-c", _GUARDED, "trainer", *start.command),
            env={**os.environ, **start.environment},
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
            with suppress(ProcessLookupError):
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
        steps = look(checkpoints)
    except CheckpointError:
        return f"--checkpoint {checkpoints} cannot be read"
    if steps:
        return f"checkpoint {steps[-1]} is complete: start the same line with --resume"
    return "no checkpoint is complete: start the same line again"
