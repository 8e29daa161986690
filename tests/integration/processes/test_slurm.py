"""Processes of the library under a real Slurm of two nodes: they find each other, agree, and end together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.parts import processes

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
for number in range(20):
    got = mm.distributed.gather(step(w, x)[0])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    if number == 5 and job.rank == 1:
        LAST
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("last", "flag", "code", "told"),
    [
        ("pass", "", 0, "done"),
        ("raise ValueError('a fault')", "", 1, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} failed "),
        ("os.kill(os.getpid(), 9)", "", 137, f"0 of 2 {WHO} ends because process 1 of 2 {WHO} was killed by SIGKILL"),
        ("pass", "--xla_cpu_enable_fast_math=true", 1, f"process 0 of 2 {WHO} has nothing where process 1 of 2 {WHO}"),
    ],
    ids=["ends", "fails", "is killed", "has another flag"],
)
def test_two_nodes(cluster: dict[str, str], tmp_path: Path, last: str, flag: str, code: int, told: str) -> None:
    """Without Slurm's help: where it ends the others itself, its own code may be that of its SIGTERM."""
    script = tmp_path / "job.py"
    script.write_text(JOB.replace("LAST", last))
    own = {"PYTHONPATH": f"{ROOT}/multimesh/src", "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    own["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{processes.free_port()}"  # the nodes have names for Slurm only
    word = f'if [ "$SLURM_PROCID" = 1 ]; then export XLA_FLAGS="{flag}"; fi; exec {sys.executable} {script}'
    argv = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "bash", "-c", word]
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(argv, env=clean | cluster | own, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert re.search(told, said), said
    assert flag or len(re.findall(r"process \d of 2 on \S+, found by Slurm: one process per device", said)) == 2, said
