"""`python -m multimesh check`, whole, in one process and in four that a real Slurm, Open MPI or MPICH starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.parts import packages, processes

ROOT = Path(__file__).parents[3]
STEPS = ["meeting", "devices", "versions", "shared folder", "products", "collectives in stages"]
LAST = ["plans"]
MPIS = {"mpirun.openmpi": ("openmpi-bin", "Open MPI"), "mpirun.mpich": ("mpich", "MPICH")}
"""Programs, the packages that bring them, and their names in the first row."""


def check(launcher: str, argv: Sequence[str], count: int, folder: Path, more: Mapping[str, str]) -> None:
    """Run the check behind a launcher; every row passes, or has nothing to try on CPU devices."""
    drop = ("OMPI_", "PMI_", "SLURM_", "XLA_FLAGS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)} | dict(more)
    env |= {"PYTHONPATH": f"{ROOT}/multimesh/src", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(4 // count)}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}", "MULTIMESH_START_TIMEOUT": "200"}
    words = [sys.executable, "-m", "multimesh", "check", "--json", "--stages", "2", "--folder", str(folder)]
    done = subprocess.run([*argv, *words], env=env, capture_output=True, text=True, timeout=900, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    rows = {row["name"]: row for row in json.loads(line)["rows"]}
    assert [*rows][: len(STEPS)] == STEPS, said
    assert [*rows][-len(LAST) :] == LAST, said
    assert {row["verdict"] for row in rows.values()} <= {"ok", "-"}, said
    assert all(rows[name]["verdict"] == "ok" for name in (*STEPS, *LAST)), said
    many = f"{count} process{'es' * (count > 1)}"
    assert rows["meeting"]["measured"] == f"{many} on 1 host, found by {launcher}", said
    assert not [*folder.iterdir()]


@pytest.mark.full
@pytest.mark.slurm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, 4])
def test_tasks_of_slurm_pass_every_step(cluster: dict[str, str], tmp_path: Path, count: int) -> None:
    """With four tasks, two on each of two nodes."""
    place = ["--nodes=2", "--ntasks-per-node=2"] if count > 1 else ["--nodes=1", "--ntasks=1"]
    check("Slurm", ["srun", *place], count, tmp_path, cluster)


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("program", MPIS)
def test_processes_of_mpirun_pass_every_step(program: str, tmp_path: Path, count: int) -> None:
    package, name = MPIS[program]
    many = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if name == "Open MPI" else []
    check(name, [packages.need(program, package), *many, "-n", str(count)], count, tmp_path, {})
