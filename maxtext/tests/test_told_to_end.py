"""Real MaxText that is told to end, at each moment of a run; and one whose disk is full."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from killing import Job, command_lines, records, trainers

from multimesh import launch

SETTINGS, ENDLESS = ("checkpoint_period=50", "learning_rate_schedule_steps=1000"), "--num-steps=100000"
LIMIT = 240
AT_ONCE = 2.0  # seconds, in which the kernel kills the children of a command that has ended


def at_once(job: Job) -> None:
    time.sleep(1)


def at_check(job: Job) -> None:
    job.until(lambda: any("multimesh\0check" in words and str(job.folder) in words for _, words in command_lines()))


def at_compilation(job: Job) -> None:
    """The trainers have met, and no step is done."""
    job.until(lambda: "Gloo" in job.log() and trainers(job.folder / "out", 0))


def at_restore(job: Job) -> None:
    job.until(lambda: trainers(job.folder / "out", 0))  # from here on the log is that of this run
    job.until(lambda: re.search("restor", job.log(), re.IGNORECASE) and "Gloo" in job.log())


def at_step(job: Job) -> None:
    job.until(lambda: "\nstep 7 of" in job.output)


def at_save(job: Job) -> None:
    job.until(lambda: any((job.folder / "ck").glob("[1-9]*-tmp*")))


MOMENTS = {"1 s": at_once, "check": at_check, "compile": at_compilation, "restore": at_restore, "step": at_step}
MOMENTS |= {"save": at_save, "step, one process": at_step}


FULL = pytest.mark.full


@pytest.mark.longer
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.telling("step, one process")
@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=[] if name.startswith("step") else FULL) for name in MOMENTS]
)
def test_a_job_that_is_told_to_end_never_trains_again(root: Path, tmp_path: Path, moment: str):
    """SIGTERM: it saves what it has trained, if it has, and says so; no process stays, and no step comes after.

    The launcher gets it, or one process of two, as where a node is taken away. The same line then goes on.
    """
    resumes, job = moment == "restore", Job(root, tmp_path)
    if resumes:
        assert job.start(*SETTINGS, "--num-steps=52").wait(LIMIT) in (0, 13)
    before = len(records(tmp_path / "out")) if resumes else 0
    job.start(*SETTINGS, ENDLESS, *["--check"] * (moment == "check"), *["--resume"] * resumes)
    MOMENTS[moment](job)
    pids = trainers(tmp_path / "out", 1) if moment == "step, one process" else [job.process.pid]
    os.kill(pids[0], signal.SIGTERM)
    code, output = job.process.wait(LIMIT), job.output
    if moment == "1 s" and not output:  # Python was still loading, and nobody could listen
        assert (code, job.processes(AT_ONCE)) == (-signal.SIGTERM, [])
        return
    last = output.splitlines()[-1]
    metrics, checkpoints = tmp_path / "out/metrics.jsonl", job.checkpoints()
    size = metrics.stat().st_size if metrics.exists() else 0
    assert code == (18 if moment.startswith(("step", "save")) else 130), output
    sentence = (
        f"checkpoint {checkpoints[-1]} is complete: start the same line with --resume"
        if checkpoints
        else "no checkpoint is comp"
    )
    assert sentence in last, last
    if code == 18:
        outcome, step = json.loads((tmp_path / "out/outcome.json").read_text()), records(tmp_path / "out")[-1]["step"]
        assert (outcome["cause"], outcome["step"], outcome["checkpoint"], checkpoints[-1]) == ("preempted", *[step] * 3)
    else:
        assert (len(records(tmp_path / "out")) if size else 0) == before
    assert job.processes(AT_ONCE) == []
    assert (metrics.stat().st_size if metrics.exists() else 0) == size
    if code == 18:
        steps = checkpoints[-1] + 3
        assert job.start(*SETTINGS, f"--num-steps={steps}", "--resume").wait(LIMIT) in (0, 13)
        assert [record["step"] for record in records(tmp_path / "out")] == [*range(steps)]


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_a_second_ctrl_c_waits_for_no_checkpoint_and_leaves_no_process(root: Path, tmp_path: Path):
    """The first one saves. Whoever presses again gets the prompt back when all processes have ended."""
    job = Job(root, tmp_path)
    job.start(*SETTINGS, ENDLESS)
    at_step(job)
    for pid in trainers(tmp_path / "out", 1):
        os.kill(pid, signal.SIGSTOP)  # a checkpoint that takes too long
    job.process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    job.process.send_signal(signal.SIGINT)
    code = job.process.wait(60)
    assert job.processes(AT_ONCE) == []
    last = job.output.splitlines()[-1]
    assert (code, "interrupted" in last or "SIGINT ended the run" in last) == (130, True), job.output
    assert "no checkpoint is complete" in last or f"checkpoint {job.checkpoints()[-1]} is complete" in last


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_output_that_nobody_reads_holds_up_no_end(root: Path, tmp_path: Path):
    """A pipe whose reader lives and does not read, as a pager that was stopped: its 64 KiB are full before the end."""
    line = Job(root, tmp_path).line(*SETTINGS, "--cpus=2", ENDLESS)
    job = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics, deadline = tmp_path / "out/metrics.jsonl", time.monotonic() + LIMIT
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2500:  # lines of 30 bytes: more than a pipe holds
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 18
    outcome = json.loads((tmp_path / "out/outcome.json").read_text())
    step = int(records(tmp_path / "out")[-1]["step"])
    assert (outcome["cause"], outcome["step"], outcome["checkpoint"]) == ("preempted", step, step)
    assert job.stderr is not None
    last = job.stderr.read().decode().splitlines()[-1]
    assert f"checkpoint {step} is complete: start the same line with --resume" in last


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("small", "size"), [("out", "200k"), ("ck", "1m"), ("ck", "600k")])
def test_a_disk_that_is_full_is_named_in_the_last_line(root: Path, tmp_path: Path, small: str, size: str):
    """A file system of its own for each folder in turn: with the output, and with the checkpoints."""
    (tmp_path / small).mkdir()
    line = Job(root, tmp_path).line(*SETTINGS, "--cpus=2", ENDLESS)
    space = ["unshare", "--mount", *["--map-root-user"] * (os.geteuid() != 0)]
    mount = ["sh", "-c", f'mount -t tmpfs -o size={size} none "$0" && exec "$@"', str(tmp_path / small)]
    process = subprocess.run([*space, *mount, *line], capture_output=True, text=True, timeout=LIMIT, check=False)
    last = process.stderr.strip().splitlines()[-1]
    assert process.returncode == 20, process.stderr
    assert re.search(rf"^error: .*{tmp_path}/{small}.*: No space left on device \(ENOSPC\).*; make room", last), last
    assert "checkpoint" in last, last


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_a_process_that_cannot_write_its_part_of_a_checkpoint_ends_all(root: Path, tmp_path: Path):
    """Nobody ends the others for it, as mpirun does not, and Orbax's barrier takes 20 minutes."""
    line = Job(root, tmp_path).line(*SETTINGS, "--model-dims=256", "--nodes=2", "--cpus=1", ENDLESS)
    shared = os.environ | {"OMPI_COMM_WORLD_SIZE": "2"} | launch.job_variables()
    processes = []
    for rank, blocks in (("0", "unlimited"), ("1", "600")):  # of a file, 512 bytes each
        numbers = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        limited = ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", *line]
        processes.append(subprocess.Popen(limited, env=shared | numbers, stderr=subprocess.PIPE, text=True))
    lines = [process.communicate(timeout=LIMIT)[1].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [20, 20], lines
    assert all("File too large (EFBIG)" in last for last in lines), lines
