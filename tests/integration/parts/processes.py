"""Servers that a test run starts: in the background, with a log, waited for until healthy, stopped by process id."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.integration.parts import packages


@contextlib.contextmanager
def server(
    argv: Sequence[str],
    log: Path,
    *,
    healthy: Callable[[], bool],
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of a block; fail with the end of its log if it dies or never answers."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )
    try:
        wait_for(healthy, f"{argv[0]} is healthy", process=process, log=log)
        yield process
    finally:
        stop(process)


@contextlib.contextmanager
def web_server(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Have a folder, and the programs of its ``cgi-bin``, served by busybox for a block, as ``127.0.0.1:PORT``."""
    port, program = free_port(), packages.need("busybox", "busybox-static")
    argv = [program, "httpd", "-f", "-p", f"127.0.0.1:{port}", "-h", str(folder), *options]
    with server(argv, folder.with_suffix(".log"), healthy=lambda: listens(port), env=env):
        yield f"127.0.0.1:{port}"


def wait_for(
    true: Callable[[], bool],
    name: str,
    *,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
    patience_s: float = 120.0,
) -> None:
    """Return when a condition holds; raise when its process ended, or after a time that is long for a busy machine."""
    until = time.monotonic() + patience_s
    while not true():
        late = time.monotonic() > until or (process is not None and process.poll() is not None)
        if late and not true():
            output = log.read_text(errors="replace")[-2000:] if log and log.exists() else ""
            raise RuntimeError(f"waited in vain: {name}\n{output}")
        time.sleep(0.1)


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


def write_program(path: Path, text: str) -> Path:
    """Write a file that everybody may run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def find(*words: str) -> list[int]:
    """Return the processes of this machine, containers' too, whose command line has all of these among its words."""
    numbers = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            if all(word in command for word in words):
                numbers.append(int(folder.name))
    return numbers


def runs(pid: int) -> bool:
    """Say whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """Return a port of the loopback interface that nobody has: of those that the kernel gives to no connection."""
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def listens(port: int) -> bool:
    """Say whether something answers on a port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
