"""A random signal at a random moment to a random process of a run; then the same line goes on, and loses nothing.

``KILL_LOOP_SEED`` draws other runs, ``KILL_LOOP_RUNS`` more or fewer; ``pytest -s`` shows the table as it grows.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from killing import Job, records, trainers

from multimesh_maxtext.command.environment import CACHE_SWITCH

SEED = int(os.environ.get("KILL_LOOP_SEED", "20261128"))
RUNS = int(os.environ.get("KILL_LOOP_RUNS", "60"))
STEPS, EVERY = 100, 10
"""Steps of a run, and between two saves. A save is written while training goes on, and the next one waits for it."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP)
PLACES = ("launcher", "trainer 0", "trainer 1")
START = 20.0
"""Seconds that a run starts and compiles; half of the signals come within them, the others after a random step."""

LIMIT = 240.0
CODES = {0, 17, 18, 130, -signal.SIGKILL, -signal.SIGUSR1, -signal.SIGTERM, -signal.SIGINT}
"""Of a run that got a signal: it was done, lost a process, saved, was interrupted; or the launcher died of it."""

LINE = (f"checkpoint_period={EVERY}", f"--num-steps={STEPS}")


@dataclass(frozen=True)
class Shot:
    """A signal, where it goes, and when: seconds after the start, or after a step."""

    signal: signal.Signals
    place: str
    seconds: float
    step: int | None


def read_losses(job: Job) -> list[str]:
    """The record of each step, to the last bit, but for which process was the slowest."""
    losses = [
        {key: x for key, x in step.items() if not key.startswith("processes/")} for step in records(job.folder / "out")
    ]
    return [json.dumps(record, sort_keys=True) for record in losses]


def draw(chance: random.Random) -> Shot:
    step = chance.randrange(STEPS) if chance.random() < 0.5 else None
    seconds = chance.uniform(0, 0.2 if step is not None else START)
    return Shot(chance.choice(SIGNALS), chance.choice(PLACES), seconds, step)


def shoot(shot: Shot, job: Job, launcher: subprocess.Popen[bytes]) -> list[int]:
    """Send the signal at its moment; return who was there to get it."""
    if shot.step is not None:
        while launcher.poll() is None and f"\nstep {shot.step} of " not in job.output.replace("\r", "\n"):
            time.sleep(0.002)
    time.sleep(shot.seconds)
    _, trainer, rank = shot.place.partition("trainer ")
    targets = trainers(job.folder / "out", int(rank)) if trainer else [launcher.pid]
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, shot.signal)
    return targets if launcher.poll() is None else []


def wait_for_end(shot: Shot, targets: list[int], launcher: subprocess.Popen[bytes]) -> int:
    """Wait for the launcher. One that was stopped goes on after a while: nobody ends it."""
    if shot.signal == signal.SIGSTOP and shot.place == "launcher":
        time.sleep(3)
        for pid in targets:
            os.kill(pid, signal.SIGCONT)
    try:
        return launcher.wait(LIMIT)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it did not end within {LIMIT:.0f} s") from None


def check_last_line(job: Job, code: int) -> None:
    """The last line says which checkpoint is complete, or that none is."""
    last = job.output.strip().splitlines()[-1]
    newest = job.checkpoints()[-1:]
    if code == 0:
        assert last.startswith(f"ok: {STEPS} steps"), last
    elif newest:
        assert f"checkpoint {newest[0]} is complete: start the same line with --resume" in last, last
    else:
        assert "no checkpoint is complete: start the same line again" in last, last


def check_end(job: Job, shot: Shot, code: int) -> None:
    never_came = {2} if shot.signal == signal.SIGSTOP else set[int]()  # a process that was stopped before all met
    assert code in CODES | never_came, job.output
    by_signal = shot.place == "launcher" and code == -shot.signal  # nobody is there to print a last line
    assert job.processes(patience=15) == []
    if not by_signal:
        check_last_line(job, code)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(6 * 3600)
def test_a_random_signal_costs_no_step(root: Path, tmp_path: Path):
    print(f"\nKILL_LOOP_SEED={SEED} KILL_LOOP_RUNS={RUNS}")
    chance = random.Random(SEED)
    variables = {CACHE_SWITCH: "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    reference = Job(root, tmp_path / "reference", **variables)
    assert reference.start(*LINE).wait(LIMIT) in (0, 13)
    expected = read_losses(reference)
    failures = []
    print("run  signal   to         moment           code  steps  newest  resumes  result")
    for number in range(RUNS):
        shot, job = draw(chance), Job(root, tmp_path / f"run-{number}", **variables)
        try:
            row, result = play(job, shot, expected), "equal"
        except AssertionError as error:
            row, result = "", f"WRONG: {str(error).splitlines()[0]}"
            failures.append((number, shot, str(error)[:2000]))
            for pid in job.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        moment = f"{shot.seconds:.2f} s" if shot.step is None else f"step {shot.step} + {shot.seconds:.2f} s"
        print(f"{number:3}  {shot.signal.name:8} {shot.place:10} {moment:16} {row:27} {result}", flush=True)
    assert failures == []


def play(job: Job, shot: Shot, expected: list[str]) -> str:
    """Start a run, send it a signal, go on; return a row of the table."""
    launcher = job.start(*LINE)
    targets = shoot(shot, job, launcher)
    code = wait_for_end(shot, targets, launcher)
    check_end(job, shot, code)
    metrics, newest = job.folder / "out/metrics.jsonl", job.checkpoints()[-1:]
    steps = (
        len([line for line in metrics.read_text().splitlines() if "learning/loss" in line]) if metrics.exists() else 0
    )
    if code == 18:
        assert newest == [steps - 1], (newest, steps)
    assert steps - 1 - (newest[0] if newest else -1) < 2 * EVERY, (newest, steps)
    exit_code = job.start(*LINE, "--resume").wait(LIMIT)
    output = job.output
    assert exit_code in (0, 13), output[-2000:]
    numbers = [int(step) for step in re.findall(rf"^step (\d+) of {STEPS} ", output, re.MULTILINE)]
    assert numbers[:1] in ([], [newest[0] + 1 if newest else 0]), (numbers[:1], newest)
    assert read_losses(job) == expected
    checkpoint, first = (newest or ["none"])[0], (numbers or ["-"])[0]
    return f"{code:4}  {steps:5}  {checkpoint:>6}  {first:>7}" + " (missed)" * (not targets)
