"""The trainer as a child process that never outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from multimesh.errors import MissingPartError
from multimesh_maxtext.translate import Launch, Paths

_PATIENCE = 5.0  # seconds that a trainer gets to end by itself before it is killed


@contextmanager
def trainer(launch: Launch, paths: Paths, *, inherited: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Start the trainer with its output in the log; on leaving, it and all its children are gone.

    It inherits the given file descriptors.
    """
    environment = {**os.environ, **launch.environment}
    with paths.log.open("wb") as log:
        try:
            process = subprocess.Popen(
                launch.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=inherited,
            )
        except OSError as error:
            raise MissingPartError(
                f"{launch.command[0]} cannot be started ({error.strerror}); run ./bootstrap.sh"
            ) from error
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP (a batch system, a closed terminal) like Ctrl-C, so that clean-up runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
