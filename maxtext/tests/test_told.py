"""Who holds up the others: lines of the trainer's log that go to stderr as well."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from killing import trainers

from multimesh_maxtext.command.told import HoldUps, read_speeds
from multimesh_maxtext.handoff import MEDIAN, SLOWEST, WORST
from multimesh_maxtext.trainer.speeds import Speeds


def test_a_process_that_holds_up_others_is_shown_with_its_stack_and_nothing_else(capsys: pytest.CaptureFixture):
    told = HoldUps()
    first = "multimesh: process 1 of 2 (n2, pid 7) is in step 875 for 121 s, all others are in step 876"
    told.show(["step 3 is done", first])
    told.show(
        ["\0\0Thread 0x1 (most recent call first):", '  File "train.py", line 3 in step', "step 4 is done", "  x"]
    )
    told.show(["multimesh: process 0 of 2 waits for process 1 of 2 (n2, pid 7)", "multimesh: compiled in 3 s"])
    assert capsys.readouterr().err.splitlines() == [
        first,
        "Thread 0x1 (most recent call first):",
        '  File "train.py", line 3 in step',
        "multimesh: process 0 of 2 waits for process 1 of 2 (n2, pid 7)",
    ]


def test_so_many_lines_are_shown_of_a_run(capsys: pytest.CaptureFixture):
    told = HoldUps()
    told.show(["multimesh: process 1 of 2 is in step 1 for 9 s"] * 1000)
    assert len(capsys.readouterr().err.splitlines()) == 400


def test_a_slow_process_is_named_beside_the_median(capsys: pytest.CaptureFixture):
    speeds = Speeds((0.010, 0.011, 0.016, 0.010), ("n1", "n1", "n2", "n2"))
    line = speeds.line(101)
    assert line.startswith("multimesh: process 2 of 4 (on n2) is slow after step 101: a product takes 16.00 ms ")
    HoldUps().show([line])
    assert capsys.readouterr().err == f"{line}\n"
    assert speeds.scalars() == {MEDIAN: pytest.approx(0.0105), WORST: 0.016, SLOWEST: 2.0}
    assert not Speeds((0.010, 0.011), ("n1", "n2")).line(1)


def test_the_newest_comparison_is_read(tmp_path: Path):
    rows = [{"step": 1, MEDIAN: 1.0, WORST: 2.0, SLOWEST: 1.0}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_speeds(tmp_path / "metrics.jsonl") == {"median_seconds": 1.0, "worst_seconds": 2.0, "slowest": 1.0}
    assert read_speeds(tmp_path / "none") == {}


SIZES = "--sequence-length 32 --model-dims 32 --num-heads 2 --batch-size 8 --microbatch-size 2 --num-steps 4"


@pytest.mark.full
@pytest.mark.multiprocess
def test_a_process_on_a_busy_core_is_named_in_a_real_run(root: Path, tmp_path: Path):
    """The trainer of process 1 shares a core with programs that spin, from the middle of the run."""
    line = [sys.executable, root / "maxtext/run.py", "--spawn", "--nodes", "2", "--cpus", "1", "--pp", "2"]
    line += [*SIZES.split(), "--num-steps", "103", "--output", tmp_path]
    job = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert any(said.startswith("step 1 of") for said in job.stdout)
    slow, core = next(trainers(tmp_path, 1)), {min(os.sched_getaffinity(0))}
    spins = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    for number in (*(each.pid for each in spins), *map(int, os.listdir(f"/proc/{slow}/task"))):
        os.sched_setaffinity(number, core)
    try:
        _, errors = job.communicate(timeout=400)
    finally:
        for each in (job, *spins):
            each.kill()
    assert job.returncode in (0, 13), errors
    (said,) = re.findall("multimesh: process .* is slow after step 101: .*", errors)
    assert re.match(r"multimesh: process 1 of 2 \(on \S+\) .*: a product takes [\d.]+ ms on its devices", said)
    assert read_speeds(tmp_path / "metrics.jsonl")["slowest"] == 1
