"""Servers that a test run starts: in the background, with a log, waited for until healthy, stopped by process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.parts import packages

_POLL_S = 0.1


@contextmanager
def server(
    argv: Sequence[str],
    log: Path,
    *,
    healthy: Callable[[], bool],
    env: Mapping[str, str] | None = None,
    patience_s=60.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of a block; fail with the end of its log if it dies or never answers."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )
    try:
        wait_for(healthy, f"{argv[0]} is healthy", process=process, log=log, patience_s=patience_s)
        yield process
    finally:
        stop(process)


def wait_for(
    true: Callable[[], bool],
    what: str,
    *,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
    patience_s: float = 60.0,
) -> None:
    """Return when a condition holds; raise when its process ended or patience did."""
    until = time.monotonic() + patience_s
    while not true():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > until:
            said = log.read_text(errors="replace")[-2000:] if log and log.exists() else ""
            raise RuntimeError(f"waited in vain: {what}\n{said}")
        time.sleep(_POLL_S)


def stop(process: subprocess.Popen[bytes], patience_s: float = 30.0) -> None:
    """End a server that we started, and only that."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            _signal(-process.pid, signal.SIGKILL)
            process.wait()


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except PermissionError:  # root's; sudo itself hands SIGTERM on to what it runs
        subprocess.run(packages.as_root("kill", f"-{signum}", "--", str(pid)), check=True)


def runs(pid: int) -> bool:
    """Say whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Say whether something answers on a port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
