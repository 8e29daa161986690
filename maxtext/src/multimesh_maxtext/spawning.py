"""``--spawn``: all processes of a job on this machine, each the same command as one of several."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from multimesh_maxtext.options import Options
from multimesh_maxtext.reserve import end_with_parent

_POLL = 0.1  # seconds between looks at the processes
_PATIENCE = 10.0  # seconds that the others get to end when one has failed, or all when told to


def spawn(argv: Sequence[str], options: Options, root: Path | None) -> int:
    """Start the command of every process and wait for them; the first that fails ends all, with its exit code."""
    words = [word for word in argv if word != "--spawn"]
    if not options.output:
        words += ["--output", tempfile.mkdtemp(prefix="multimesh-maxtext-")]
    door = [str(root / "maxtext/run.py")] if root else ["-P", "-m", "multimesh_maxtext"]
    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}", "MULTIMESH_MAXTEXT_SIZE": str(options.nodes)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(options.nodes):
            own = {**os.environ, **shared, "MULTIMESH_MAXTEXT_RANK": str(rank)}
            started.append(subprocess.Popen([sys.executable, *door, *words], env=own, preexec_fn=end_with_parent()))
        while any(process.poll() is None for process in started):
            failed = [process.returncode for process in started if process.returncode]
            if failed:
                _wait(started)
                return failed[0]
            time.sleep(_POLL)
        return next((process.returncode for process in started if process.returncode), 0)
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        _wait(started)
        for process in started:
            if process.poll() is None:
                process.kill()


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
