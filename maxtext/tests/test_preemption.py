"""A signal that ends a run: the step in flight ends, all processes write a checkpoint, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import records

SMALL = (
    *("--num-layers", 2, "--model-dims", 32, "--num-heads", 2, "--sequence-length", 32, "--batch-size", 4),
    *("--microbatch-size", 2, "--pp", 2, "--checkpoint-every", 100000, "dtype=float32"),
    "learning_rate_schedule_steps=1000",
)
TWO = ("--spawn", "--nodes", 2, "--cpus", 1)


def start(root: Path, *words: Any) -> subprocess.Popen[str]:
    line = [sys.executable, str(root / "maxtext/run.py"), *map(str, (*SMALL, *words))]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def after_a_step(job: subprocess.Popen[str]) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step 2 of"):
            return
    pytest.fail(f"it ended before: {job.communicate()}")


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def to_the_launcher(job: subprocess.Popen[str]) -> None:
    job.send_signal(signal.SIGTERM)


def to_the_last_process(job: subprocess.Popen[str]) -> None:
    """A node is taken away: one command of several gets the signal."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGTERM)


@pytest.mark.longer
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.telling("one of two")
@pytest.mark.parametrize(
    ("grid", "tell"),
    [(("--cpus", 2), to_the_launcher), (TWO, to_the_launcher), (TWO, to_the_last_process)],
    ids=["one process", "all processes", "one of two"],
)
def test_no_step_is_lost(
    root: Path, tmp_path: Path, grid: tuple[Any, ...], tell: Callable[[subprocess.Popen[str]], None]
):
    flags = (*grid, "--text", root / "LICENSE", "--output", tmp_path / "out", "--checkpoint", tmp_path / "ck")
    job = start(root, "--num-steps", 100000, *flags)
    after_a_step(job)
    tell(job)
    _, errors = job.communicate()
    assert job.returncode == 18, errors
    assert errors.splitlines()[-1].startswith("error: a signal ended the run after "), errors
    assert errors.count("a checkpoint was written; add --resume") == 1
    done = len(records(tmp_path / "out"))
    assert saved(tmp_path / "ck") == [0, done - 1]  # that of the last step
    again = start(root, "--num-steps", done + 2, "--resume", *flags)
    _, errors = again.communicate()
    assert again.returncode in (0, 13), errors
    assert [record["step"] for record in records(tmp_path / "out")] == list(range(done + 2))


@pytest.mark.longer
@pytest.mark.timeout(1800)
def test_a_second_signal_ends_at_once(root: Path, tmp_path: Path):
    job = start(root, "--cpus", 2, "--num-steps", 100000, "--output", tmp_path, "--checkpoint", tmp_path / "ck")
    after_a_step(job)
    (trainer,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(trainer), signal.SIGSTOP)  # a step that takes too long
    job.send_signal(signal.SIGTERM)
    assert job.stderr is not None
    assert job.stderr.readline().startswith("SIGTERM: the step in flight ends, and a checkpoint is written; a second")
    time.sleep(2.5)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 130
    assert saved(tmp_path / "ck") in ([], [0])
