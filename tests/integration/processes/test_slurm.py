"""Processes of the library under a real Slurm of two nodes: they find each other and end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.parts import processes, slurm
from tooling.core.files import ROOT

pytestmark = pytest.mark.slurm

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
with mm.context(ignore_transforms=True):
    expected = float(jax.jit(loss)(w, x))
for number in range(STEPS):
    value = mm.distributed.gather(step(w, x)[0])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    if number == 5:
        print(f"job {os.environ['SLURM_JOB_ID']}, pid {os.getpid()}", flush=True)
    if number == 5 and job.rank == 1:
        LAST
print("done", flush=True)
"""


def environment(cluster: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun; the nodes have names for Slurm only, so the coordinator's address is given."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    address = f"127.0.0.1:{processes.free_port()}"
    settings = {"PYTHONPATH": f"{ROOT}/multimesh/src", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return clean | cluster | settings | {"JAX_COORDINATOR_ADDRESS": address}


def srun(*argv: str, kill: bool) -> list[str]:
    """One task on each node; ``kill`` says whether Slurm ends the others when one fails."""
    return ["srun", "--nodes=2", "--ntasks-per-node=1", f"--kill-on-bad-exit={int(kill)}", *argv]


@pytest.mark.parametrize("kill", [False, True], ids=["processes end them", "Slurm ends them"])
@pytest.mark.parametrize(
    ("last", "flag", "code", "message"),
    [
        ("pass", "", 0, "done"),
        ("raise ValueError('a fault')", "", 1, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} failed "),
        ("os._exit(3)", "", 17, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} has been out of reach"),
        ("os.kill(os.getpid(), 9)", "", 137, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} has been out of reach"),
        ("pass", "--xla_cpu_enable_fast_math=true", 2, f"process 0 of 2 {WHO} has nothing where process 1 of 2 {WHO}"),
    ],
    ids=["ends", "fails", "leaves", "is killed", "has another flag"],
)
def test_two_nodes(
    cluster: dict[str, str], tmp_path: Path, last: str, flag: str, code: int, message: str, kill: bool
) -> None:
    """The code of srun is the largest, that of the process that failed or of the one that misses it.

    Slurm may be told to end the other one, and be faster.
    """
    script = tmp_path / "job.py"
    script.write_text(JOB.replace("LAST", last).replace("STEPS", "20"))
    word = f'if [ "$SLURM_PROCID" = 1 ]; then export XLA_FLAGS="{flag}"; fi; exec {sys.executable} {script}'
    argv = srun("bash", "-c", word, kill=kill)
    process = subprocess.run(argv, env=environment(cluster), capture_output=True, text=True, timeout=400)
    text = process.stdout + process.stderr
    if kill and code and process.returncode == 128 + signal.SIGTERM:
        message = "process 1 of 2"
    else:
        assert process.returncode == code, text
    assert re.search(message, text), text
    assert flag or len(re.findall(r"process \d of 2 on \S+, found by Slurm: one process per device", text)) == 2, text


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (("allreduce.py",), "ok: the sum over 4 devices of 4 processes"),
        pytest.param(("fft3d.py", "16"), r"16\^3 on 8 devices: P\('x', 'y'\) -> P\('y', 'x'\)", marks=pytest.mark.full),
        pytest.param(("gaussian_process.py", "256"), "ok\n", marks=pytest.mark.full),
        pytest.param(("particle_mesh.py", "16"), "ok: gradients by 12288 coordinates", marks=pytest.mark.full),
        pytest.param(("density_field.py", "32", os.devnull), "8 devices: 1.000000 of the mass", marks=pytest.mark.full),
        pytest.param(("sharded_files.py", "16"), r"ok: 16\^3 in field-16.zarr", marks=pytest.mark.full),
    ],
)
def test_examples_in_four_tasks(cluster: dict[str, str], tmp_path: Path, example: tuple[str, ...], words: str) -> None:
    """As `mpirun` starts them: one job of four processes, and one of them says so."""
    argv = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, f"{ROOT}/examples/{example[0]}", *example[1:]]
    env = environment(cluster) | {"TMPDIR": str(tmp_path)}
    process = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(re.findall(words, process.stdout)) == 1, process.stdout + process.stderr


def test_a_cancelled_job(cluster: dict[str, str], tmp_path: Path) -> None:
    """All processes end by the signal; none is left."""
    script, out, err = tmp_path / "job.py", tmp_path / "out", tmp_path / "err"
    script.write_text(JOB.replace("LAST", "pass").replace("STEPS", "10**9"))
    with out.open("w") as stdout, err.open("w") as stderr:
        job = subprocess.Popen(
            srun(sys.executable, str(script), kill=True), env=environment(cluster), stdout=stdout, stderr=stderr
        )
        try:
            processes.wait_for(lambda: out.read_text().count("pid") == 2, "two processes run", process=job, log=err)
            pids = [int(pid) for pid in re.findall(r"pid (\d+)", out.read_text())]
            (number,) = {*re.findall(r"job (\d+)", out.read_text())}
            start = time.monotonic()
            subprocess.run(["scancel", number], env=environment(cluster), check=True)
            job.wait(120)
        finally:
            processes.stop(job)
    assert time.monotonic() - start < slurm.KILL_WAIT_S, "Slurm had to kill them"
    processes.wait_for(lambda: not any(map(processes.runs, pids)), "all have ended")
