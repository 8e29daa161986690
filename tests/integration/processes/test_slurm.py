"""Processes of the library, and of MaxText, under a real Slurm of two nodes: they find each other and end together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.parts import processes

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[3]
WHO = r"\(\S+, pid \d+\)"
JOB = """
import os, sys, jax, numpy as np
import multimesh as mm

job = mm.distributed.initialize()
print(job, flush=True)
front, back = (jax.sharding.Mesh(np.array([d]), "x") for d in jax.devices())


def loss(w, x):
    x = mm.task(lambda w, x: jax.numpy.tanh(x @ w), "first", mesh=front)(w, x)
    return mm.task(lambda x: (x**2).sum(), "second", mesh=back)(x)


step = mm.jit(lambda w, x: mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2)(w, x))
w, x = np.eye(4, dtype=np.float32) / 2, np.arange(32, dtype=np.float32).reshape(8, 4) / 32
with mm.ignore_transforms():
    want = float(jax.jit(loss)(w, x))
for number in range(STEPS):
    got = mm.distributed.gather(step(w, x)[0])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    if number == 5:
        print(f"job {os.environ['SLURM_JOB_ID']}, pid {os.getpid()}", flush=True)
    if number == 5 and job.rank == 1:
        LAST
print("done", flush=True)
"""


def environment(cluster: Mapping[str, str]) -> dict[str, str]:
    """That of srun; the nodes have names for Slurm only, so the coordinator's address is given."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return clean | cluster | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}"}


def alone(cluster: Mapping[str, str]) -> dict[str, str]:
    """That of processes of the library by itself."""
    own = {"PYTHONPATH": f"{ROOT}/multimesh/src", "JAX_NUM_CPU_DEVICES": "1"}
    return environment(cluster) | own


def srun(*argv: str, kill: bool) -> list[str]:
    """One task on each node; ``kill`` says whether Slurm ends the others when one fails."""
    return ["srun", "--nodes=2", "--ntasks-per-node=1", f"--kill-on-bad-exit={int(kill)}", *argv]


@pytest.mark.parametrize("kill", [False, True], ids=["processes end them", "Slurm ends them"])
@pytest.mark.parametrize(
    ("last", "flag", "code", "told"),
    [
        ("pass", "", 0, "done"),
        ("raise ValueError('a fault')", "", 1, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} failed "),
        ("os._exit(3)", "", 3, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "", 137, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} was killed by SIGKILL"),
        ("pass", "--xla_cpu_enable_fast_math=true", 2, f"process 0 of 2 {WHO} has nothing where process 1 of 2 {WHO}"),
    ],
    ids=["ends", "fails", "leaves", "is killed", "has another flag"],
)
def test_two_nodes(
    cluster: dict[str, str], tmp_path: Path, last: str, flag: str, code: int, told: str, kill: bool
) -> None:
    """The code of srun is that of the process that failed, unless Slurm is told to end the other one and is faster."""
    script = tmp_path / "job.py"
    script.write_text(JOB.replace("LAST", last).replace("STEPS", "20"))
    word = f'if [ "$SLURM_PROCID" = 1 ]; then export XLA_FLAGS="{flag}"; fi; exec {sys.executable} {script}'
    argv = srun("bash", "-c", word, kill=kill)
    done = subprocess.run(argv, env=alone(cluster), capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    if kill and code and done.returncode == 128 + signal.SIGTERM:
        told = "process 1 of 2"
    else:
        assert done.returncode == code, said
    assert re.search(told, said), said
    assert flag or len(re.findall(r"process \d of 2 on \S+, found by Slurm: one process per device", said)) == 2, said


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (("allreduce.py",), "ok: the sum over 4 devices of 4 processes"),
        pytest.param(("fft3d.py", "16"), r"16\^3 on 8 devices: P\('x', 'y'\) -> P\('y', 'x'\)", marks=pytest.mark.full),
        pytest.param(("gaussian_process.py", "256"), "ok\n", marks=pytest.mark.full),
        pytest.param(("particle_mesh.py", "16"), "ok: gradients by 12288 coordinates", marks=pytest.mark.full),
        pytest.param(("density_field.py", "32", os.devnull), "8 devices: 1.000000 of the mass", marks=pytest.mark.full),
        pytest.param(("sharded_files.py", "16"), r"ok: 16\^3 in field-16.zarr", marks=pytest.mark.full),
    ],
)
def test_examples_in_four_tasks(cluster: dict[str, str], tmp_path: Path, example: tuple[str, ...], said: str) -> None:
    """As `mpirun` starts them: one job of four processes, and one of them says so."""
    argv = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, f"{ROOT}/examples/{example[0]}", *example[1:]]
    env = alone(cluster) | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(said, done.stdout)) == 1, done.stdout + done.stderr


def test_a_cancelled_job(cluster: dict[str, str], tmp_path: Path) -> None:
    """All processes end, each with a line at most that says why; none is left."""
    script, out, err = tmp_path / "job.py", tmp_path / "out", tmp_path / "err"
    script.write_text(JOB.replace("LAST", "pass").replace("STEPS", "10**9"))
    with out.open("w") as stdout, err.open("w") as stderr:
        job = subprocess.Popen(
            srun(sys.executable, str(script), kill=True), env=alone(cluster), stdout=stdout, stderr=stderr
        )
        try:
            processes.wait_for(lambda: out.read_text().count("pid") == 2, "two processes run", process=job, log=err)
            pids = [int(pid) for pid in re.findall(r"pid (\d+)", out.read_text())]
            (number,) = {*re.findall(r"job (\d+)", out.read_text())}
            start = time.monotonic()
            subprocess.run(["scancel", number], env=alone(cluster), check=True)
            job.wait(30)
        finally:
            processes.stop(job)
    assert time.monotonic() - start < 5
    processes.wait_for(lambda: not any(map(runs, pids)), "all have ended", patience_s=5)
    lines = [line for line in err.read_text().splitlines() if line.startswith("multimesh: ")]
    assert lines, err.read_text()
    # On a busy machine it is cancelled in its first step, or its second.
    ended = rf"process \d of 2 {WHO} was killed by SIGTERM( after (1 step|\d+ steps))?$"
    assert not [line for line in lines if not re.search(ended, line)]
    assert len({re.search(r"process (\d) of 2", line)[1] for line in lines}) == len(lines), lines


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


MAXTEXT = (
    *(str(ROOT / "maxtext/run.py"), "--backend=multimesh", "--pp=2", "--num-steps=3", "--batch-size=8"),
    *("--microbatch-size=2", "--sequence-length=32", "--model-dims=32", "--num-heads=2"),
)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["learning/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def pipeline(folder: Path, *flags: str) -> list[str]:
    """A pipeline of MaxText with one stage in a task on each node; Slurm ends all when one fails."""
    return srun(*MAXTEXT, "--nodes=2", "--cpus=1", f"--output={folder}", *flags, kill=True)


def trainer(metrics: Path) -> int:
    """The process that writes them, and not the launcher that waits for it."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            if "multimesh_maxtext" in words and f"metrics_file={metrics}" in words:
                return int(folder.name)
    raise AssertionError(f"nobody writes {metrics}")


@pytest.mark.full  # a folder of `maxtext/jobs.py` trains one for every change, in test_jobs.py
def test_a_pipeline_of_maxtext(cluster: dict[str, str], tmp_path: Path) -> None:
    """The losses are those of one process."""
    one, env = [*MAXTEXT, "--cpus=2", f"--output={tmp_path / 'one'}"], environment(cluster)
    subprocess.run(one, env=env, capture_output=True, check=True, timeout=300)
    done = subprocess.run(pipeline(tmp_path / "several"), env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok: 3 steps, loss "), done.stdout
    assert len(losses(tmp_path / "one")) == 3
    for folder in ("several", "several/process-1"):
        assert losses(tmp_path / folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.full
def test_a_pipeline_of_maxtext_that_is_killed(cluster: dict[str, str], tmp_path: Path) -> None:
    """Slurm ends the others, whose code does not hide that of the first; it was 130, that of an interrupt, or 143."""
    metrics, err = tmp_path / "several/process-1/metrics.jsonl", tmp_path / "err"
    with err.open("w") as stderr:
        job = subprocess.Popen(
            pipeline(tmp_path / "several", "--num-steps=10000"), env=environment(cluster), stdout=stderr, stderr=stderr
        )
        try:
            processes.wait_for(
                lambda: metrics.exists() and metrics.read_text().count("\n") >= 3,
                "it trains",
                process=job,
                log=err,
                patience_s=300,
            )
            os.kill(trainer(metrics), signal.SIGKILL)
            code = job.wait(60)
        finally:
            processes.stop(job)
    said = err.read_text()
    assert code == 17, said
    assert "the trainer was killed by SIGKILL" in said
    assert re.search(f"ends because process 1 of 2 {WHO} was killed by SIGKILL", said), said
