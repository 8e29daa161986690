"""The folders of jobs under a real Slurm of two nodes: their own batch scripts, and what requeues them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from multimesh_maxtext.errors import InterruptedRunError, PreemptedError, ProcessLostError, UnfitError

from tests.integration.parts import processes, slurm
from tests.xla_flags import QUICK
from tooling.core.files import ROOT

pytestmark = pytest.mark.slurm

TINY = (
    "--no-check --gpus 0 --attention dot_product --sequence-length 32 --model-dims 32 --num-heads 4 --num-steps 3 "
    "dtype=float32 vocab_size=512"
)
"""What every rehearsal scales: CPU devices in place of GPUs and their attention; the sizes of the model; the steps. The
check before training has a rehearsal of its own."""

SCALED = {
    "gpt3-175b-64gpus": "--cpus 4 --pp 4 --tp 2 --interleave 2 --num-layers 8 --batch-size 16",
    "llama3-70b-64gpus": "--cpus 4 --dp 1 --pp 4 --tp 2 --interleave 2 --partition auto --num-layers 8 --batch-size 16",
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

Submit = Callable[..., "SlurmJob"]


class SlurmJob(NamedTuple):
    """A batch job."""

    number: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, patience: float = 600.0) -> int:
        return slurm.wait(self.number, self.log, patience)


@pytest.fixture
def submit(gpu_cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Give a folder's batch script to Slurm, from this checkout; what still runs at the end is cancelled."""
    monkeypatch.delenv("IMAGE", raising=False)
    # Compiles faster; the numbers are compared with those of one program that is compiled alike.
    variables = {"CHECKOUT": str(ROOT), "XLA_FLAGS": " ".join(QUICK), "OMP_NUM_THREADS": "1"}
    for name, value in (gpu_cluster | variables).items():
        monkeypatch.setenv(name, value)
    jobs = []

    def give(folder: str, tasks: int, *flags: str) -> SlurmJob:
        log = tmp_path / "job.log"
        options = ["--parsable", "--nodes=2", f"--ntasks-per-node={tasks // 2}", f"--output={log}"]
        argv = ["sbatch", *options, str(ROOT / "maxtext" / folder / "job.sbatch"), *flags]
        process = subprocess.run(argv, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        jobs.append(SlurmJob(process.stdout.strip(), log))
        return jobs[-1]

    yield give
    for job in jobs:
        subprocess.run(["scancel", "--quiet", job.number], check=False)


@pytest.mark.full
@pytest.mark.stand_in("two Slurm nodes on one machine, CPU devices, tiny dimensions: the folders' scripts as they are")
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
    flags = ["--verify", "--output", str(place / "out")]
    job = submit(folder, tasks, *TINY.split(), *scaled.split(), *flags)
    assert job.wait(patience) == 0, job.output
    last = job.output.splitlines()[-1]
    assert re.fullmatch(r"ok: [23] steps, loss .*; the same without the pipeline, in float32", last), job.output
    assert job.output.count("MaxText, backend multimesh") == 1  # of the processes one speaks
    text = (ROOT / "maxtext" / folder / "job.sbatch").read_text() + scaled
    axes = dict(re.findall(r"--(dp|pp|tp|interleave) (\d+)", text))
    grid = " ".join(f"{axis} {axes[axis]}" for axis in ("dp", "tp", "pp", "interleave") if axes.get(axis, "1") != "1")
    assert f"{grid};" in job.output
    assert len([*(place / "out").glob("process-*")]) == tasks - 1


def test_batch_scripts_know_the_codes_that_they_look_for() -> None:
    script = (ROOT / "maxtext/slurm/job.sh").read_text()
    lost, saved = ProcessLostError.exit_code, PreemptedError.exit_code
    assert f"warned && (code == {lost} || code == {saved} || code > 128)" in script
    assert InterruptedRunError.exit_code > 128


STEPS = 40
TRAINING = f"""--no-check --gpus=0 --cpus=1 --pp=2 --num-layers=2 --batch-size=8 --microbatch-size=2 --seed=1
--sequence-length=32 --model-dims=32 --num-heads=2 --num-steps={STEPS} dtype=float32""".split()


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
    return {record["step"]: record["learning/loss"] for record in records}


def newest(checkpoints: Path) -> int:
    """The newest complete checkpoint after that of step 0, which is written anyway."""
    return max((int(path.parent.name) for path in checkpoints.glob("[0-9]*/commit_success.txt")), default=0)


def trains(output: Path, after: int) -> bool:
    return (output / "metrics.jsonl").exists() and len(losses(output)) > after


def requeued(job: SlurmJob) -> int:
    """How often Slurm has given the job another allocation."""
    (count,) = re.findall(r"Restarts=(\d+)", slurm.show(job.number)) or ["0"]
    return int(count)


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "while it starts": lambda output: (output / "maxtext.log").exists(),
    "while it trains": lambda output: trains(output, 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_whose_allocation_ends_goes_on_in_another_one_and_not_once_it_is_told_to_end(
    submit: Submit, tmp_path: Path, moment: str
) -> None:
    """By the signal that Slurm sends before the time limit. Not a step is lost; then `scancel` ends it for good."""
    text, output, checkpoints = ["--text", str(ROOT / "LICENSE")], tmp_path / "several", tmp_path / "ck"
    place = ["--output", str(output), "--checkpoint", str(checkpoints), "checkpoint_period=100000"]
    job = submit("slurm", 2, *TRAINING, "--num-steps=100000", *place, *text)
    processes.wait_for(job.log.exists, "it runs")
    processes.wait_for(lambda: MOMENTS[moment](output), moment, patience_s=300, log=job.log)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job.number], check=True)
    processes.wait_for(lambda: requeued(job) == 1, "it is requeued", patience_s=300, log=job.log)
    step = newest(checkpoints)
    assert step > 0 or moment == "while it starts", job.output  # it may train by the time that the signal comes
    processes.wait_for(lambda: trains(output, step + 2), "it goes on", patience_s=400, log=job.log)
    subprocess.run(["scancel", "--signal=TERM", "--batch", job.number], check=True)
    assert job.wait(300) == PreemptedError.exit_code, job.output
    assert requeued(job) == 1
    assert f"checkpoint {newest(checkpoints)} is complete" in job.output.splitlines()[-1] or newest(checkpoints) > step
    assert [*losses(output)] == list(range(len(losses(output))))


@pytest.mark.full
def test_a_job_that_loses_a_process_is_requeued_and_has_the_losses_of_one_that_does_not(
    submit: Submit, tmp_path: Path
) -> None:
    text, output, checkpoints = ["--text", str(ROOT / "LICENSE")], tmp_path / "several", tmp_path / "ck"
    place = ["--output", str(output), "--checkpoint", str(checkpoints), "checkpoint_period=2"]
    job = submit("slurm", 2, *TRAINING, *place, *text)
    processes.wait_for(lambda: newest(checkpoints) > 0, "a checkpoint", patience_s=300, log=job.log)
    # What writes the metrics, and not the launcher that waits for it.
    trainer, *_ = processes.find("\0multimesh_maxtext\0", f"\0metrics_file={output}/process-1/metrics.jsonl\0")
    os.kill(trainer, signal.SIGKILL)
    assert job.wait(900) == 0, job.output
    assert "a process was lost (srun ended with exit code 17)" in job.output

    line = [str(ROOT / "maxtext/run.py"), *TRAINING, "--cpus=2", "--output", str(tmp_path / "one"), *text]
    subprocess.run(line, capture_output=True, check=True)
    actual, expected = losses(output), losses(tmp_path / "one")
    assert [*expected] == [*range(STEPS)]
    # MaxText writes the metrics of a step one step later: those of the last step before a loss may be missing.
    assert len(actual) >= STEPS - 3
    assert actual == {step: pytest.approx(expected[step], rel=1e-5) for step in actual}


SICK = """#!/bin/sh
case "$*" in *--query-gpu=index*) ;; *) exit ;; esac
[ "$SLURMD_NODENAME" = n1 ] && errors=7
echo "0, P0, 80000, 81559, ${errors:-0}, 0x0, 40"
"""
"""An nvidia-smi, by which a GPU of node n1 has errors in its memory."""


@pytest.mark.full
@pytest.mark.stand_in("an nvidia-smi that tells of a bad GPU, where there is none")
def test_a_node_that_the_check_finds_unfit_is_named(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.write_program(tmp_path / "bin/nvidia-smi", SICK)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    flags = [flag for flag in TRAINING if flag != "--no-check"]
    job = submit("slurm", 2, *flags, "--num-steps=3", "--output", str(tmp_path / "out"))
    assert job.wait(1200) == UnfitError.exit_code, job.output
    assert "error: --check: these processes cannot run pipelines; at fault: n1; the table above says why" in job.output
