"""Real MaxText, killed at a moment, and what its run wrote."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Moment = Callable[[subprocess.Popen[str], int], None]


def records(output: Path) -> list[dict[str, Any]]:
    """Return the numbers that a run computed; times and memory differ from run to run."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not re.search("seconds|per_sec|memory|mfu", key)}
        for line in lines
    ]


def command_lines() -> Iterator[tuple[int, str]]:
    """All processes, and the words of each."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_text(errors="replace")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def trainers(folder: Path, rank: int) -> list[int]:
    """Processes that train as one rank of a run in a folder; not the launchers that wait for them."""
    setting = f"metrics_file={folder}/{f'process-{rank}/' if rank else ''}metrics.jsonl"
    return [pid for pid, words in command_lines() if setting in words.split("\0")]


SMALL = (
    *("--num-layers=2", "--model-dims=32", "--num-heads=2", "--sequence-length=32", "--batch-size=4", "--pp=2"),
    *("--microbatch-size=2", "dtype=float32"),
)
TWO = ("--spawn", "--nodes=2", "--cpus=1")


class Job:
    """A small run on text in a folder, which starts two processes."""

    def __init__(self, root: Path, folder: Path, **variables: str) -> None:
        self.root, self.folder, self.variables = root, folder, variables

    def line(self, *words: object) -> list[str]:
        argv = [sys.executable, str(self.root / "maxtext/run.py"), *SMALL, f"--text={self.root / 'LICENSE'}"]
        return [*argv, f"--output={self.folder / 'out'}", f"--checkpoint={self.folder / 'ck'}", *map(str, words)]

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        """Start it; its output goes to a file, so that nothing holds it up."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "said").open("w") as log:
            argv, variables = self.line(*TWO, *words), os.environ | self.variables
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=variables, start_new_session=True)
        return self.process

    def until(self, condition: Callable[[], object], patience: float = 240.0) -> None:
        """Wait for a moment of the run."""
        deadline = time.monotonic() + patience
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)

    def log(self) -> str:
        """The log of the trainer of process 0."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "out/maxtext.log").read_text(errors="replace")
        return ""

    @property
    def output(self) -> str:
        """Return the output of the newest run."""
        return (self.folder / "said").read_text()

    def processes(self, patience: float = 0.0) -> list[int]:
        """All processes whose command line names the folder, where some do not go in time."""
        deadline = time.monotonic() + patience
        while True:
            pids = [pid for pid, words in command_lines() if str(self.folder) in words]
            if not pids or time.monotonic() > deadline:
                return pids
            time.sleep(0.05)

    def checkpoints(self) -> list[int]:
        """Complete checkpoints."""
        return sorted(int(path.name) for path in (self.folder / "ck").glob("*") if path.name.isdigit())


def kill_run(root: Path, arguments: tuple[Any, ...], moment: Moment) -> str:
    """Start a run and kill its trainer at a moment; return what run.py says."""
    line = [sys.executable, str(root / "maxtext/run.py"), *map(str, arguments)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for text in process.stdout:  # the trainer is there when run.py says so
        if text.startswith("starting MaxText"):
            break
    pids: list[int] = []
    while not pids:
        pids = children(process.pid)
    (trainer,) = pids
    moment(process, trainer)
    os.kill(trainer, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 10
    return errors


def while_saving(folder: Path) -> Moment:
    """The moment when a checkpoint is half-written: the trainer is held there, so that it stays so."""

    def moment(process: subprocess.Popen[str], trainer: int) -> None:
        while process.poll() is None:
            if any(folder.glob("[1-9]*-tmp")):
                os.kill(trainer, signal.SIGSTOP)
                if any(folder.glob("[1-9]*-tmp")):
                    return
                os.kill(trainer, signal.SIGCONT)
        pytest.fail("the run ended before it could be killed")

    return moment
