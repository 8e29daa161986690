"""For launchers: processes of one job on this machine that end together. Nothing here imports JAX.

``python -m multimesh spawn`` and MaxText's ``--spawn`` are made of this. A launcher of your own may be::

    from multimesh import launch

    job, count = launch.job_variables(), 4
    variables = [job | launch.process_variables(rank, count) for rank in range(count)]
    sys.exit(launch.run_together([[sys.executable, "train.py"]] * count, variables))
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from multimesh.errors import MissingPartError, UsageError
from multimesh.processes.launchers import ADDRESS, LAUNCHERS, Launcher

__all__ = [
    "ADDRESS",
    "LAUNCHERS",
    "Launcher",
    "end_with_parent",
    "free_port",
    "job_variables",
    "process_variables",
    "run_together",
]

_POLL = 0.1  # seconds between looks at the processes
_PATIENCE = 10.0  # seconds that the others get to end when one has failed, and that all get when told to end
_HELD = 1.0  # seconds that a process outside of the job, which inherited a pipe, may hold up the end
_PR_SET_PDEATHSIG = 1
_writing = threading.Lock()


def job_variables() -> dict[str, str]:
    """Return environment variables that all processes of a new job on this machine share.

    ``JAX_COORDINATOR_ADDRESS`` has a free port of this machine.
    """
    return {ADDRESS: f"127.0.0.1:{free_port()}"}


def process_variables(rank: int, processes: int) -> dict[str, str]:
    """Return environment variables that number a process of a job, for ``mm.distributed.initialize()``.

    On GPUs each process takes the one of its number.

    Parameters
    ----------
    rank
        Number of the process, from 0.
    processes
        How many processes the job has.

    Raises
    ------
    UsageError
        If ``rank`` is not a number from 0 to ``processes - 1``.
    """
    if not 0 <= rank < processes:
        raise UsageError(f"rank counts from 0 to processes - 1; got rank={rank!r} of {processes!r}")
    return {"MULTIMESH_PROCESSES": str(processes), "MULTIMESH_PROCESS": str(rank)}


def run_together(
    commands: Sequence[Sequence[str]],
    variables: Sequence[Mapping[str, str]],
    *,
    labels: Sequence[str] | None = None,
) -> int:
    """Run commands at once, and wait for all. The first that fails ends all.

    The others then get 10 seconds to end by themselves; who is left gets SIGTERM, and 10 seconds later SIGKILL. If a
    signal ended the first, a line says so: it could not itself. An exception such as ``KeyboardInterrupt`` ends them in
    the same way. On Linux they are killed when this process dies, and also when the thread that called ends.

    Parameters
    ----------
    commands
        Words of each command, the program first.
    variables
        Environment variables of each command, besides those of this process.
    labels
        Text before each line that a command prints, for each command. Lines are then written whole, through this
        process. Without labels commands write to our output themselves, as a terminal's progress bar needs it, and
        lines that are printed at the same time may run into each other.

    Returns
    -------
    int
        0, or the exit code of the first command that failed; the negative number of the signal that ended it.

    Raises
    ------
    UsageError
        If there are not as many ``variables`` or ``labels`` as ``commands``, or a command has no words.
    MissingPartError
        If a program cannot be started. Those that were started are ended.
    """
    if len(commands) != len(variables):
        raise UsageError(f"each command has variables of its own; got {len(commands)} and {len(variables)}")
    if labels is not None and len(labels) != len(commands):
        raise UsageError(f"each command has a label of its own; got {len(commands)} and {len(labels)}")
    if not all(commands):
        raise UsageError(f"a command has no words: give its program first; got {commands}")
    started: list[subprocess.Popen[bytes]] = []
    forwarders: list[threading.Thread] = []
    try:
        for number, (command, env) in enumerate(zip(commands, variables, strict=True)):
            started.append(_start(command, env, None if labels is None else subprocess.PIPE))
            if labels is not None:
                forwarders += _forward(started[-1], labels[number].encode())
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            time.sleep(_POLL)
        code = next(filter(None, codes), 0)
        if code < 0:
            process, name = started[codes.index(code)], signal.Signals(-code).name
            who = f"process {codes.index(code)} of {len(codes)} (pid {process.pid})"
            sys.stderr.write(f"multimesh: {who} was killed by {name}\n")
        _wait(started)
        return code
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        _wait(started)
        for process in started:
            if process.poll() is None:
                process.kill()
        _wait(started)
        until = time.monotonic() + _HELD
        for thread in forwarders:
            thread.join(max(0.0, until - time.monotonic()))


def end_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` for `subprocess.Popen` that makes Linux kill the child when its parent dies.

    Returns
    -------
    A function that the child calls first; None where only Linux could do so. Linux also kills the child when the thread
    that started it ends.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            signal.raise_signal(signal.SIGKILL)

    return bind


def free_port() -> int:
    """Return a port of this machine on which nobody listens now. Another program may take it before you do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: Sequence[str], env: Mapping[str, str], pipe: int | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=os.environ | env, preexec_fn=end_with_parent(), stdout=pipe, stderr=pipe)
    except OSError as error:
        raise MissingPartError(f"{command[0]} cannot be started: {error.strerror}") from error


def _forward(process: subprocess.Popen[bytes], label: bytes) -> Iterator[threading.Thread]:
    """Start to write the lines of a process to our own output and error output, each at once and with a label."""

    def forward(target: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            line = label + line.removesuffix(b"\n") + b"\n"
            with _writing:
                while line:
                    line = line[os.write(target, line) :]

    for target, pipe in ((1, process.stdout), (2, process.stderr)):
        thread = threading.Thread(target=forward, args=(target, pipe), daemon=True)
        thread.start()
        yield thread


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(_POLL)
