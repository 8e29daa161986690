"""Trainers: child processes that never outlive us; the signals that end them; and why each of them ended."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from multimesh_maxtext import errors, outcome
from multimesh_maxtext.command.job import Paths
from multimesh_maxtext.command.translate import Launch

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
_PATIENCE = 10.0  # seconds that the other trainers get to end by themselves when one has ended: it waited for all
_DOUBT = 3.0  # seconds that a process which doubts its own outcome waits for that of another one
_NO_MEMORY = b"std::bad_alloc"  # the C++ library's word for a lack of memory, by which it ends a process

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
    starts: Sequence[Start], look_on: Callable[[], bool], stop: StopRequest, nodes: int = 1
) -> list[errors.LauncherError | None]:
    """Run trainers, of so many ``nodes`` in the job, to their end; return why each ended, None for a success.

    ``look_on`` is called every moment, and once after the end. It says whether there is something to save: the first
    signal lets the trainers do so, and end. Otherwise it ends them at once, as the second one does. When one has
    ended, the others get some seconds to end; the end of one that we ended for that has no reason of its own.
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
                name = stop.name if has_asked or any(code is None or code < 0 for code in codes) else ""
                break
            if set(codes) != {None}:
                until = min(until, now + _PATIENCE)
            if stop.count and not has_asked:
                has_asked = True
                for process in processes:
                    process.send_signal(signal.SIGTERM)
                if not starts[0][1].rank:  # of several commands the first speaks
                    print(f"{stop.name}: the step in flight ends, then the state is saved", file=sys.stderr)
            time.sleep(_POLL)
    if None in codes and not (name or any(codes)):
        print(f"warning: a trainer still ran {_PATIENCE:.0f} s after another had ended, and was ended", file=sys.stderr)
    return [explain_end(code, paths, name, nodes) for code, (_, paths) in zip(codes, starts, strict=True)]


@contextmanager
def _trainer(start: Launch, paths: Paths) -> Iterator[subprocess.Popen[bytes]]:
    """Start a trainer with its output in the log; on leaving, it and all its children are gone."""
    paths.outcome.write_text(outcome.ROOM)  # that of an earlier run is forgotten
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


def explain_end(code: int | None, paths: Paths, stopped_by: str = "", nodes: int = 1) -> errors.LauncherError | None:
    """Return the error of a trainer: the one that it wrote, else what its exit code says; None for a success.

    ``code``: None for one that we ended.
    ``stopped_by``: the name of the signal that ended the run, if one did.
    """
    error = outcome.read(paths.outcome)
    if error is None and code != 0 and stopped_by:
        error = errors.InterruptedRunError(f"{stopped_by} ended the run")
    elif error is None and code == -signal.SIGABRT and _NO_MEMORY in paths.log.read_bytes():
        error = errors.DoesNotFitError(
            f"the memory of this machine did not suffice ({_NO_MEMORY.decode()}); {errors.MORE_MEMORY}"
        )
    elif error is None and code:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        how = f"was killed by {signal.Signals(-code).name}{hint}" if code < 0 else f"failed with exit code {code}"
        lost = errors.ProcessKilledError if code < 0 else errors.ProcessLostError
        kind = lost if nodes > 1 and (code < 0 or code == lost.exit_code) else errors.TrainerFailedError
        error = kind(f"the trainer {how}")
    if error:
        error.who, error.log = error.who or outcome.name_process(paths.rank, nodes), paths.log
    if isinstance(error, errors.TrainerFailedError) and str(paths.log) not in str(error):
        error.args = (f"{error}; see {paths.log}",)
    return error


def find_cause(error: errors.LauncherError, rank: int, places: Sequence[Paths]) -> errors.LauncherError:
    """Return the error of another process of the job where that of this one, of that ``rank``, follows from it.

    ``places``: where all processes write. One that was ended, or which knows that another one was lost, waits some
    seconds for the others, which look for its own error meanwhile.
    """
    outcome.write(error, places[rank].outcome, outcome.name_process(rank, len(places)))
    until = time.monotonic() + _DOUBT
    while error.doubt and not isinstance(error, errors.PreemptedError) and time.monotonic() < until:
        ends = (explain_end(0, place, nodes=len(places)) for place in places)
        first = min(filter(None, ends), key=lambda other: other.doubt, default=error)
        if first.doubt < error.doubt:
            first.shared = True  # the other process tells it
            return first
        time.sleep(0.05)
    return error
