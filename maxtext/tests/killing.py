"""Real MaxText, killed at a moment, and what its run wrote."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Moment = Callable[[subprocess.Popen[str], int], None]

SMALL = (
    *("--num-layers=2", "--model-dims=32", "--num-heads=2", "--sequence-length=32", "--batch-size=4", "--pp=2"),
    *("--microbatch-size=2", "dtype=float32"),
)


class Job:
    """A run of two processes in a folder; its output goes to a file, so that nothing holds it up."""

    def __init__(self, root: Path, folder: Path, *words: Any, **variables: str) -> None:
        self.folder, self.said = folder, folder / "said"
        line = [sys.executable, str(root / "maxtext/run.py"), *SMALL, "--spawn", "--nodes=2", "--cpus=1"]
        line += [f"--text={root / 'LICENSE'}", f"--output={folder / 'out'}", f"--checkpoint={folder / 'ck'}"]
        folder.mkdir(exist_ok=True)
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [*line, *map(str, words)], stdout=said, stderr=said, env=os.environ | variables, start_new_session=True
            )

    def command_lines(self) -> dict[int, str]:
        """Processes whose command line names the folder."""
        named = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                named[int(path.parent.name)] = path.read_text()
        return {pid: words for pid, words in named.items() if str(self.folder) in words}

    def children(self) -> list[int]:
        """The commands that the launcher started; none once it has ended."""
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            return [int(pid) for pid in children.read_text().split()]
        return []

    def checkpoints(self) -> list[int]:
        """Complete checkpoints."""
        return sorted(int(path.name) for path in (self.folder / "ck").glob("*") if path.name.isdigit())


def records(output: Path) -> list[dict[str, Any]]:
    """All that a run computed; times and memory differ from run to run."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not re.search("seconds|per_sec|memory|mfu", key)}
        for line in lines
    ]


def trainers(folder: Path, rank: int) -> Iterator[int]:
    """Processes that train as one rank of a run in a folder; not the launchers that wait for them."""
    own = f"metrics_file={folder}/{f'process-{rank}/' if rank else ''}metrics.jsonl"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if own.encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def killed(root: Path, arguments: tuple[Any, ...], moment: Moment) -> str:
    """Start a run and kill its trainer at a moment; return what run.py says."""
    line = [sys.executable, str(root / "maxtext/run.py"), *map(str, arguments)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for printed in process.stdout:  # the trainer is there when run.py says so
        if printed.startswith("starting MaxText"):
            break
    children: list[str] = []
    while not children:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    trainer = int(children[0])
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


def after_step(number: int) -> Moment:
    """The moment when a step, or one after it, is printed: a run may go on from a checkpoint of a later one."""

    def moment(process: subprocess.Popen[str], _trainer: int) -> None:
        assert process.stdout is not None
        for printed in process.stdout:
            step = re.match(r"step (\d+) of ", printed)
            if step and int(step[1]) >= number:
                return
        pytest.fail("the run ended before it could be killed")

    return moment
