"""``--spawn``: all processes of a job on this machine, each the same command as one of several.

With ``--max-restarts`` all start again from the last checkpoint when one of them is lost.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multimesh_maxtext.checkpoint import look
from multimesh_maxtext.errors import ProcessLostError
from multimesh_maxtext.launch import Member
from multimesh_maxtext.options import Options
from multimesh_maxtext.reserve import end_with_parent
from multimesh_maxtext.trainer import Follower
from multimesh_maxtext.translate import Paths

_POLL = 0.1  # seconds between looks at the processes
_PATIENCE = 10.0  # seconds that the others get to end when one has failed, or all when told to

_WIDTH = 160  # of the table: reasons are not broken

_LOST = re.compile(r"^multimesh: (?:.* ends because )?(.* (?:was killed|ended|has been|is gone) .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Loss:
    """A process that was lost.

    Attributes
    ----------
    at
        When the job had ended.
    reason
        What the others say of it.
    done
        How many steps were done by then.
    kept
        How many of them are in the checkpoint from which the job goes on.
    """

    at: datetime
    reason: str
    done: int
    kept: int


def spawn(argv: Sequence[str], options: Options, root: Path | None) -> int:
    """Start the command of every process and wait for them; the first that fails ends all, with its exit code."""
    words = list(_own(argv))
    if not options.output:
        options = Options(**{**vars(options), "output": Path(tempfile.mkdtemp(prefix="multimesh-maxtext-"))})
        words += ["--output", str(options.output)]
    losses: list[Loss] = []
    limit = options.max_restarts or 0
    while (code := _run(words, options, root)) == ProcessLostError.exit_code and len(losses) < limit:
        losses.append(_loss(options))
        words += [] if "--resume" in words else ["--resume"]
        count = f"restart {len(losses)} of at most {limit}"
        print(f"{losses[-1].reason}; all processes start again ({count})", file=sys.stderr)
    if losses:
        Console(stderr=options.json, width=_WIDTH).print(table(losses))
    return code


def _own(argv: Sequence[str]) -> Iterator[str]:
    """The words of a command line that are not for the one that starts the others."""
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
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(options.nodes):
            own = {**os.environ, **shared, "MULTIMESH_MAXTEXT_RANK": str(rank)}
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


def _loss(options: Options) -> Loss:
    """What is known of a process that was lost, from the files of the job."""
    output = options.output or Path()
    paths = Paths("", Path(), output, options.metrics_file or output / "metrics.jsonl")
    logs = [Member(rank).own(paths).log for rank in range(options.nodes)]
    said = [line for log in logs if log.exists() for line in _LOST.findall(log.read_text(errors="replace"))]
    steps = Follower(paths.metrics, paths.log).poll()
    kept = look(options.checkpoint).next_step if options.checkpoint else 0
    done = max(kept, steps[-1].number + 1 if steps else 0)
    return Loss(datetime.now(), said[0] if said else "a process was lost", done, kept)


def table(losses: Sequence[Loss]) -> Table:
    """Return when and why the job started again, and how many steps were computed once more."""
    result = Table(box=None, pad_edge=False)
    for name in ("restart", "at", "steps done", "in checkpoint", "recomputed"):
        result.add_column(name, justify="right")
    result.add_column("because")
    for number, loss in enumerate(losses, 1):
        counts = loss.done, loss.kept, loss.done - loss.kept
        result.add_row(str(number), f"{loss.at:%H:%M:%S}", *map(str, counts), loss.reason)
    return result


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
