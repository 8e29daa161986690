"""The folders of `maxtext/jobs.py` under a real Slurm of two nodes: their own batch scripts, and what restarts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from multimesh_maxtext.command.readiness import UNFIT
from multimesh_maxtext.errors import PreemptedError, ProcessLostError

from tests.integration.parts import processes, slurm
from tests.integration.processes.test_slurm import trainer
from tests.xla_flags import QUICK

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "maxtext"))

import jobs  # noqa: E402

pytestmark = pytest.mark.slurm

TINY = (
    "--no-check --gpus 0 --attention dot_product --sequence-length 32 --model-dims 32 --num-heads 4 --num-steps 3 "
    "dtype=float32 vocab_size=512"
)
"""What every rehearsal scales: CPU devices in place of GPUs and their attention; the sizes of the model; the steps. The
check before training has a rehearsal of its own."""

SCALED = {
    "gpt3-175b-64gpus": "--cpus 4 --pp 4 --tp 2 --interleave 2 --num-layers 8 --batch-size 16",
    "llama3-70b-64gpus": "--cpus 4 --pp 4 --tp 2 --interleave 2 --num-layers 8 --batch-size 16",
    "llama3-8b-16gpus": "--cpus 4 --tp 2 --interleave 2 --num-layers 4",
    "perlmutter": "--cpus 4 --tp 2 --interleave 2 --num-layers 4",
    "slurm": "--cpus 4 --pp 2 --dp 4 --num-layers 2 --batch-size 16",
}
"""... and what each scales besides, to eight devices in two processes. Everything else is the folder's own: its batch
script with its options of sbatch (but for the number of nodes and tasks), its srun line, the script of a process and
its binding, the model's kind, the schedule, microbatch size, contexts and recomputation."""

WHOLE = {
    "gpt3-175b-64gpus": "--cpus 16",
    "llama3-70b-64gpus": "--cpus 16",
    "llama3-8b-16gpus": "--cpus 4",
    "perlmutter": "--cpus 4",
}
"""The very parallelism of a folder, in four processes: as many devices, stages, pieces and layers."""

Submit = Callable[..., "Submitted"]


class Submitted:
    """A batch job."""

    def __init__(self, number: str, log: Path) -> None:
        self.number = number
        self.log = log

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, patience: float = 600.0) -> int:
        """Return the code of a job that ended."""
        until = time.monotonic() + patience
        while (code := slurm.ended(self.number)) is None:
            assert time.monotonic() < until, self.said
            time.sleep(0.5)
        return code


@pytest.fixture
def submit(gpu_cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Give a folder's batch script to Slurm, from this checkout; what still runs at the end is cancelled."""
    for name in ("XLA_FLAGS", "IMAGE"):
        monkeypatch.delenv(name, raising=False)
    # Compiles faster; the numbers are compared with those of one program that is compiled alike.
    for name, value in (
        gpu_cluster | {"CHECKOUT": str(ROOT), "XLA_FLAGS": " ".join(QUICK), "OMP_NUM_THREADS": "1"}
    ).items():
        monkeypatch.setenv(name, value)
    submitted = []

    def give(folder: str, tasks: int, *flags: str) -> Submitted:
        log = tmp_path / "job.log"
        options = ["--parsable", "--nodes=2", f"--ntasks-per-node={tasks // 2}", f"--output={log}"]
        done = subprocess.run(
            ["sbatch", *options, str(ROOT / "maxtext" / folder / "job.sbatch"), *flags], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        submitted.append(Submitted(done.stdout.strip(), log))
        return submitted[-1]

    yield give
    for job in submitted:
        subprocess.run(["scancel", "--quiet", job.number], check=False)


@pytest.mark.stand_in("two Slurm nodes on one machine, CPU devices, tiny dimensions: the folders' scripts as they are")
@pytest.mark.telling("perlmutter")
@pytest.mark.parametrize("folder", SCALED)
def test_a_folder_trains(submit: Submit, folder: str, tmp_path: Path) -> None:
    """Its own script, on devices that are fewer; losses are those of MaxText without the pipeline."""
    rehearse(submit, folder, tmp_path, SCALED[folder], tasks=2)


@pytest.mark.full
@pytest.mark.stand_in("two Slurm nodes on one machine, virtual CPU devices, tiny dimensions: the very parallelism")
@pytest.mark.parametrize("folder", WHOLE)
@pytest.mark.timeout(3600)
def test_a_folder_trains_with_all_of_its_stages_and_pieces(submit: Submit, folder: str, tmp_path: Path) -> None:
    heads = "--model-dims 64 --num-heads 8" if "175b" in folder else ""
    rehearse(submit, folder, tmp_path, f"{WHOLE[folder]} {heads} --num-steps 2", tasks=4, patience=3000)


def rehearse(submit: Submit, folder: str, place: Path, scaled: str, *, tasks: int, patience: float = 600) -> None:
    shown = ["--verify", "--output", str(place / "out")]
    job = submit(folder, tasks, *TINY.split(), *scaled.split(), *shown)
    assert job.wait(patience) == 0, job.said
    last = job.said.splitlines()[-1]
    assert re.fullmatch(r"ok: [23] steps, loss .*; the same without the pipeline, in float32", last), job.said
    assert job.said.count("MaxText, backend multimesh") == 1  # of the processes one speaks
    asked = dict(re.findall(r"--(dp|pp|tp|interleave) (\d+)", described(folder) + scaled))
    grid = " ".join(f"{axis} {asked[axis]}" for axis in ("dp", "tp", "pp", "interleave") if axis in asked)
    assert f"{grid};" in job.said
    assert len([*(place / "out").glob("process-*")]) == tasks - 1


def described(folder: str) -> str:
    job = jobs.find(folder)
    return f"{job.flags} "


def test_batch_scripts_know_the_codes_that_they_look_for() -> None:
    script = jobs.files(jobs.SOURCE)["job.sbatch"]
    assert f"code != {ProcessLostError.exit_code} && code <= 128" in script
    assert f"code == {PreemptedError.exit_code} && warned" in script
    assert f"$output/{UNFIT}" in script


STEPS = 40
TRAINING = (
    *(
        "--no-check",
        "--gpus=0",
        "--cpus=1",
        "--pp=2",
        "--num-layers=2",
        "--batch-size=8",
        "--microbatch-size=2",
        "--seed=1",
    ),
    *("--sequence-length=32", "--model-dims=32", "--num-heads=2", f"--num-steps={STEPS}", "dtype=float32"),
)


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["learning/loss"] for record in records}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rank(output: Path, number: int) -> int:
    """The trainer of a process; its parent is the launcher, whose parent is Slurm's process of the step on its node."""
    return trainer((output if number == 0 else output / f"process-{number}") / "metrics.jsonl")


def step(output: Path, number: int) -> list[int]:
    """Return all of a node that has one process of the job, but for the trainer, which follows its launcher."""
    launcher = parent(rank(output, number))
    return [parent(launcher), launcher]


LOST: dict[str, Callable[[Path], list[int]]] = {
    "a trainer": lambda output: [rank(output, 1)],
    "a launcher": lambda output: [parent(rank(output, 0))],
    "a node's step": lambda output: step(output, 1),
}
"""What is killed in turn, by SIGKILL."""


@pytest.mark.full
def test_a_job_that_loses_processes_starts_again(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times, each from its newest checkpoint; losses are those of a run that nobody interrupts."""
    monkeypatch.setenv("SLURM_WAIT", "5")
    text, output, kept = ["--text", str(ROOT / "LICENSE")], tmp_path / "several", tmp_path / "ck"
    place = ["--output", str(output), "--checkpoint", str(kept), "--checkpoint-every", "2", "--max-restarts", "3"]
    job = submit("slurm", 2, *TRAINING, *place, *text)
    saved = 0

    def newest() -> int:
        return max((int(path.name) for path in kept.glob("*") if path.name.isdigit()), default=-1)

    for number, find in enumerate(LOST.values()):
        begun = f"restart {number} of at most 3"
        processes.wait_for(
            lambda begun=begun, saved=saved: newest() > saved and (begun in job.said or begun[8] == "0"),
            f"{begun}: there is a checkpoint after {saved}",
            patience_s=300,
            log=job.log,
        )
        saved = newest() + 2
        for pid in find(output):
            os.kill(pid, signal.SIGKILL)
    assert job.wait() == 0, job.said
    assert re.search(r"\nok: \d+ steps, loss ", job.said), job.said
    table = job.said.rpartition("\nok: ")[2]
    rows = attempts(table)
    assert [row[:3] for row in rows] == [[str(number), "pp 2", "2"] for number in range(1, 5)], job.said
    assert sum(int(row[4]) for row in rows) == STEPS
    assert re.search(r"process 1 of 2 .* was killed by SIGKILL", rows[0][-1]), job.said
    compare(output, tmp_path / "one", text)


@pytest.mark.telling("scancel --signal=USR1 --batch")
@pytest.mark.parametrize("tell", ["scancel --signal=USR1 --batch", "scontrol requeue"])
def test_a_job_whose_allocation_ends_saves_and_goes_on_in_another_one(
    submit: Submit, tmp_path: Path, tell: str
) -> None:
    """The signal that Slurm sends before the time limit, and a requeue; not a step is lost, and no log."""
    text, output, kept = ["--text", str(ROOT / "LICENSE")], tmp_path / "several", tmp_path / "ck"
    place = ["--output", str(output), "--checkpoint", str(kept), "--checkpoint-every", "100000"]
    job = submit("slurm", 2, *TRAINING, "--num-steps=100000", "--max-restarts=1", *place, *text)

    def trains(after: int) -> bool:
        return (output / "metrics.jsonl").exists() and len(losses(output)) > after

    processes.wait_for(lambda: trains(2), "the first allocation trains", patience_s=300, log=job.log)
    subprocess.run([*tell.split(), job.number], check=True)

    def newest() -> int:  # that of step 0 is written anyway
        return max((int(path.parent.name) for path in kept.glob("[0-9]*/commit_success.txt")), default=0)

    processes.wait_for(lambda: newest() > 0, "it saves", patience_s=60, log=job.log)
    saved = newest()
    processes.wait_for(lambda: trains(saved + 2), "the second one goes on", patience_s=400, log=job.log)
    subprocess.run(["scancel", "--signal=TERM", "--batch", job.number], check=True)
    assert job.wait(120) == PreemptedError.exit_code, job.said
    assert job.said.count("a signal ended the run after ") >= 2
    first, second = attempts(job.said.rpartition("ended because")[2])
    assert (first[3], first[4]) == (f"0-{saved}", str(saved + 1)), job.said  # each step counted
    assert second[3].startswith(f"{saved + 1}-")
    assert all(row[-1].startswith("a signal ended the run") for row in (first, second)), job.said
    assert (output / "maxtext-before-restart-1.log").exists()
    assert [*losses(output)] == list(range(len(losses(output))))


def attempts(table: str) -> list[list[str]]:
    """Number, grid, processes, steps, those that counted and the reason of each attempt, and then of the goodput."""
    rows = re.findall(r"^ *(\d) +[\d:]{8} +(\S.*?) {2,}(\d) +(\S+) +(\d+) +[\d.]+ +(\S.*?) *$", table, re.MULTILINE)
    assert re.search(r"^goodput [\d.]+ %: \d+ steps that counted took [\d.]+ of [\d.]+ seconds$", table, re.MULTILINE)
    return [[*row] for row in rows]


def compare(output: Path, place: Path, text: list[str], steps: int = STEPS) -> None:
    """Compare the losses of a job with those of one process that nobody interrupts."""
    length = ["--cpus=2", f"--num-steps={steps}"]
    alone = [str(ROOT / "maxtext/run.py"), *TRAINING, *length, "--output", str(place), *text]
    subprocess.run(alone, capture_output=True, check=True)
    ours, want = losses(output), losses(place)
    assert [*want] == [*range(steps)]
    # MaxText writes the metrics of a step one step later: those of the last step before a loss may be missing.
    assert len(ours) >= steps - 3
    assert ours == {step: pytest.approx(want[step], rel=1e-5) for step in ours}


@pytest.mark.full
def test_a_job_whose_node_is_drained_goes_on_without_it_and_grows_when_it_returns(
    submit: Submit, tmp_path: Path, gpu_cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes on each of two nodes, then two on one, then four; the losses are those of one process."""
    monkeypatch.setenv("SLURM_WAIT", "5")
    steps = 200
    text, output, kept = ["--text", str(ROOT / "LICENSE")], tmp_path / "several", tmp_path / "ck"
    place = ["--output", str(output), "--checkpoint", str(kept), "--checkpoint-every", "2"]
    going = ["--max-restarts", "2", "--fallback", "dp=1"]
    job = submit("slurm", 4, *TRAINING, f"--num-steps={steps}", "--dp=2", *place, *going, *text)

    def newest() -> int:
        return max((int(path.name) for path in kept.glob("*") if path.name.isdigit()), default=-1)

    def has(step: int, what: str) -> None:
        processes.wait_for(
            lambda: newest() >= step or slurm.ended(job.number) is not None, what, patience_s=900, log=job.log
        )
        assert newest() >= step, job.said

    def tell(node_state: str) -> None:
        line = ["scontrol", "update", "nodename=n2", f"state={node_state}", "reason=test"]
        subprocess.run(line, env=os.environ | gpu_cluster, check=True)

    has(2, "four processes write a checkpoint")
    tell("drain")
    for pid in {*step(output, 2), *step(output, 3)}:
        os.kill(pid, signal.SIGKILL)
    has(newest() + 4, "two processes write a checkpoint")
    tell("resume")
    assert job.wait() == 0, job.said
    rows = attempts(job.said)
    assert [row[1:3] for row in rows] == [["dp 2 pp 2", "4"], ["pp 2", "2"], ["dp 2 pp 2", "4"]], job.said
    assert sum(int(row[4]) for row in rows) == steps
    assert re.search(r"process [23] of 4", rows[0][-1]), job.said
    assert [row[-1] for row in rows[1:]] == ["more processes fit again", "all steps are done"]
    print(job.said)
    compare(output, tmp_path / "one", text, steps)


@pytest.mark.full
def test_a_spare_node_takes_the_place_of_a_lost_one_before_any_smaller_grid(
    submit: Submit, tmp_path: Path, gpu_cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, of which the grid needs one: the second trains on the same grid when the first is gone."""
    monkeypatch.setenv("SLURM_WAIT", "5")
    text, output, kept = ["--text", str(ROOT / "LICENSE")], tmp_path / "several", tmp_path / "ck"
    place = ["--output", str(output), "--checkpoint", str(kept), "--checkpoint-every", "2"]
    job = submit("slurm", 4, *TRAINING, *place, "--max-restarts=2", "--fallback", "pp=1,dp=1", *text)

    def trains(node: str, newer: int) -> int:
        """The trainer of process 0, when it has written a newer checkpoint; it is on that node."""

        def found() -> bool:
            return slurm.ended(job.number) is not None or any(
                path.name.isdigit() and int(path.name) > newer for path in kept.glob("*")
            )

        processes.wait_for(found, f"{node} writes a checkpoint after {newer}", patience_s=600, log=job.log)
        assert slurm.ended(job.number) is None, job.said
        pid = rank(output, 0)
        assert f"SLURMD_NODENAME={node}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return pid

    trains("n1", 0)
    line = ["scontrol", "update", "nodename=n1", "state=drain", "reason=test"]
    subprocess.run(line, env=os.environ | gpu_cluster, check=True)
    try:
        for pid in (rank(output, 1), rank(output, 0)):
            os.kill(pid, signal.SIGKILL)
        newest = max(int(path.name) for path in kept.glob("*") if path.name.isdigit())
        trains("n2", newest + 2)
    finally:
        subprocess.run([*line[:3], "state=resume"], env=os.environ | gpu_cluster, check=True)
    assert job.wait() == 0, job.said
    rows = attempts(job.said)
    assert [row[1:3] for row in rows] == [["pp 2", "2"], ["pp 2", "2"]], job.said
    assert sum(int(row[4]) for row in rows) == STEPS
    print(job.said)
    compare(output, tmp_path / "one", text)


SICK = """#!/bin/sh
case "$*" in *--query-gpu=index*) ;; *) exit ;; esac
[ "$SLURMD_NODENAME" = n1 ] && errors=7
echo "0, 570.1, P0, 1980, 1980, 80000, 81559, ${errors:-0}, 0x0, 40, 16, 16"
"""
"""An nvidia-smi, by which a GPU of node n1 has errors in its memory."""


@pytest.mark.full
@pytest.mark.stand_in("an nvidia-smi that tells of a bad GPU, where there is none")
def test_a_node_that_the_check_finds_unfit_is_named_and_a_spare_one_trains(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid needs one of two nodes. The batch script asks for the check, which n1 does not pass and n2 does."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SICK)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    output = tmp_path / "out"
    checked = [flag for flag in TRAINING if flag != "--no-check"]
    going = ["--checkpoint", str(tmp_path / "ck"), "--max-restarts=1", "--fallback", "pp=1,dp=1"]
    job = submit("slurm", 4, *checked, "--num-steps=3", "--output", str(output), *going)
    assert job.wait(1200) == 0, job.said
    assert job.said.count("FAILED: GPUs: GPU 0 of process 0 of 2") == 1, job.said
    assert "error: --check: these processes cannot run pipelines; at fault: n1; the table above says why" in job.said
    assert "unfit nodes are left out: n1; an operator drains them: scontrol update nodename=n1 " in job.said
    assert job.said.count("ok: these processes can run pipelines") == 1, job.said
    assert "ok: 3 steps, loss " in job.said, job.said
    assert not (output / UNFIT).exists()


def test_a_grid_that_does_not_come_out_is_refused_before_the_job_starts(submit: Submit, tmp_path: Path) -> None:
    """By the batch script's own question, in one line, with the launcher's exit code."""
    place = ["--output", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "ck"), "--max-restarts", "2"]
    job = submit("slurm", 4, *TRAINING, "--dp=2", *place, "--fallback", "dp=3")
    assert job.wait() == 2, job.said
    assert "error: --fallback dp=3: " in job.said
    assert not (tmp_path / "out").exists()
