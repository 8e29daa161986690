"""``--spawn``: all processes of a job on this machine, each the same command as one of several.

With ``--max-restarts`` all start again from the last checkpoint when one of them is lost.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from multimesh_maxtext.errors import ProcessLostError
from multimesh_maxtext.options import Options
from multimesh_maxtext.reserve import end_with_parent
from multimesh_maxtext.restarts import Loss, announce, find_loss, show
from multimesh_maxtext.translate import Paths

_POLL = 0.1  # seconds between looks at the processes
_PATIENCE = 10.0  # seconds that the others get to end when one has failed, and that all get when told to end
_VARIABLE = "MULTIMESH_JOB_SECRET"  # what proves that a process belongs to the job


def spawn(argv: Sequence[str], options: Options, root: Path | None) -> int:
    """Start the command of every process and wait for them; the first that fails ends all, with its exit code."""
    words = list(_own(argv))
    output = options.output or Path(tempfile.mkdtemp(prefix="multimesh-maxtext-"))
    words += [] if options.output else ["--output", str(output)]
    paths = Paths("", Path(), output, options.metrics_file or output / "metrics.jsonl")
    losses: list[Loss] = []
    limit = options.max_restarts or 0
    while (code := _run(words, options, root)) == ProcessLostError.exit_code and len(losses) < limit:
        losses.append(find_loss(options, paths))
        words = [word for word in words if word not in ("--overwrite", "--resume")] + ["--resume"]
        announce(losses[-1], len(losses), options)
    show(losses, options)
    return code


def _own(argv: Sequence[str]) -> Iterator[str]:
    """The words of a command line for each process, without those for the process that starts them."""
    words = iter(argv)
    for word in words:
        if word == "--max-restarts":
            next(words, None)
        elif word != "--spawn" and not word.startswith("--max-restarts="):
            yield word


def _run(words: Sequence[str], options: Options, root: Path | None) -> int:
    """Run the job once; its exit code."""
    door = [str(root / "maxtext/run.py")] if root else ["-P", "-m", "multimesh_maxtext"]
    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}", "MULTIMESH_MAXTEXT_SIZE": str(options.nodes)}
    shared[_VARIABLE] = os.environ.get(_VARIABLE) or secrets.token_hex(16)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(options.nodes):
            own = {
                **os.environ,
                **shared,
                **{f"MULTIMESH_MAXTEXT_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")},
            }
            started.append(subprocess.Popen([sys.executable, *door, *words], env=own, preexec_fn=end_with_parent()))
        while any(process.poll() is None for process in started):
            if any(process.returncode for process in started):
                break
            time.sleep(_POLL)
        code = next((process.returncode for process in started if process.returncode), 0)
        _wait(started)
        return code if code >= 0 else ProcessLostError.exit_code  # killed, and its trainer with it
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
