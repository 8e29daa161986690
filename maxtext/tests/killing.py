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
