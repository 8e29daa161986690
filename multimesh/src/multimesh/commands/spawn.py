"""A Python program as several processes of one job on this machine. Nothing here imports JAX."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from multimesh.errors import UsageError
from multimesh.processes import secret

PROCESSES, PROCESS = "MULTIMESH_PROCESSES", "MULTIMESH_PROCESS"
"""How many processes, and which one this is; `multimesh.distributed.initialize` reads these environment variables."""

_POLL = 0.1  # seconds between looks at the processes
_PATIENCE = 10.0  # seconds that the others get to end when one has failed, and that all get when told to end
_PR_SET_PDEATHSIG = 1


def spawn(program: Sequence[str], processes: int) -> int:
    """Start a Python program so often, each time with another number, and wait for all.

    Returns
    -------
    int
        0, or the exit code of the first that failed, 128 more than the number of a signal that ended it. The others
        are ended then.
    """
    if not Path(program[0]).is_file():
        raise UsageError(f"spawn: there is no file {program[0]!r}; give the Python program after the flags")
    shared = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        PROCESSES: str(processes),
        secret.VARIABLE: os.environ.get(secret.VARIABLE) or secrets.token_hex(16),
    }

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    code = together([[sys.executable, *program]] * processes, [shared | {PROCESS: str(n)} for n in range(processes)])
    return code if code >= 0 else 128 - code


def together(commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> int:
    """Run commands at once, each with environment variables of its own; the first that fails ends all.

    Returns its exit code as `subprocess.Popen.returncode` has it, or 0. Whatever ends this process ends them.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command, own in zip(commands, variables, strict=True):
            started.append(subprocess.Popen(command, env=os.environ | own, preexec_fn=end_with_parent()))
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            time.sleep(_POLL)
        code = next(filter(None, codes), 0)
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


def end_with_parent() -> Callable[[], Any] | None:
    """A function for a child process to call first, with which it is killed when this process dies."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            signal.raise_signal(signal.SIGKILL)

    return bind


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(_POLL)
