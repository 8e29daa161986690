"""The examples of `multimesh.linalg`, `multimesh.fft` and collectives, each in processes of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from spawning import ON_CPU, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
CLEAN = ON_CPU | {"NPROC": "64"}


def run(*command, **env):
    command = [str(part) for part in command]
    child = subprocess.run(command, capture_output=True, text=True, env=CLEAN | env, check=False, timeout=600)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


@pytest.mark.full
def test_potrs_in_two_processes():
    """The page's cells, in two processes of four devices; the last two solve in each process, and over all devices."""
    out = run(EXAMPLES / "potrs.sh", PYTHON=sys.executable, COORDINATOR=f"localhost:{free_port()}")
    first, second = re.split("=+ process 1 output =+", out)
    for rank, text in enumerate((first, second)):
        assert f"Rank {rank}\nLocal devices 4\nGlobal devices 8\nWorld size 2\n" in text
        assert "names the axis 'T', and the mesh has 'x', 'y'; using the matrix's own P(None, 'y')" in text
        assert "ok: gathered into each process: [1. " in text
        assert "ok: over all devices: [1. " in text
        assert "[0. 0.]\n [7. 0.]\n [0. 8.]]" in text
    assert "shard\n [[1.]\n [0.]" in first
    assert "[0.]\n [5.]\n [0.]" in second


@pytest.mark.multiprocess
def test_multi_process():
    """The page's grid and shards, in its order, then a pipeline with a stage in each process."""
    out = run(EXAMPLES / "multi_process.sh", PYTHON=sys.executable, COORDINATOR=f"localhost:{free_port()}")
    column = "shard\n [[0. 0.]\n [0. 0.]\n [0. 0.]\n [0. 0.]\n [0. 0.]\n [0. 0.]\n [7. 0.]\n [0. 8.]]"
    for rank, text in enumerate(re.split("=+ process 1 output =+", out)):
        words = [f"Rank {rank}\nLocal devices 4\nGlobal devices 8\nWorld size 2\nDevice grid[[CpuDevice(id=0) "]
        words += ["shard\n " + str(np.eye(8)[:, [n]] * (n + 1)) for n in range(4 * rank, 4 * rank + 4)]
        words += [column, f"gradient of {'second' if rank else 'first'}: (16, 16) on ", "loss ", ", as on one device"]
        places = [text.index(line) for line in words]
        assert places == sorted(places), text
        assert f"gradient of {'first' if rank else 'second'}: elsewhere" in text


def test_fft3d():
    assert "12^3 on 8 devices: P('x', 'y') -> P('y', 'x')" in run(sys.executable, EXAMPLES / "fft3d.py", "12")


def test_allreduce_in_one_process():
    out = run(sys.executable, EXAMPLES / "allreduce.py")
    assert "[[28. 28. 28.]\n" in out
    assert "ok: the sum over 8 devices of 1 processes" in out


@pytest.mark.full
def test_gaussian_process():
    assert run(sys.executable, EXAMPLES / "gaussian_process.py", "256").endswith("ok\n")


@pytest.mark.full
def test_density_field(tmp_path):
    out = run(sys.executable, EXAMPLES / "density_field.py", "64", tmp_path / "field.png")
    assert "8 devices: 1.000000 of the mass painted, 0 of 262144 particles left the halos" in out
    assert re.search(r"with displacements twenty times as large [1-9]\d+ particles leave the halos", out)
    assert (tmp_path / "field.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.full
def test_particle_mesh():
    assert "ok: gradients by 12288 coordinates are those of one device" in run(
        sys.executable, EXAMPLES / "particle_mesh.py", "16"
    )


@pytest.mark.full
def test_structure_grows_on_eight_devices_as_on_one(tmp_path):
    out = run(sys.executable, EXAMPLES / "particle_mesh.py", "64", "--picture", tmp_path / "mass.png")
    assert "mass.png: eight devices and one differ by " in out
    assert (tmp_path / "mass.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.longer
def test_sharded_files(tmp_path):
    out = run(sys.executable, EXAMPLES / "sharded_files.py", "16", tmp_path / "field.zarr")
    assert "ok: 16^3 in field.zarr as P('x', 'y'), read as P(None, ('y', 'x')); its mean is " in out


def mpirun(processes, name="mpirun"):
    if shutil.which(name) is None:
        pytest.skip(f"no {name} on this machine: apt-get install openmpi-bin mpich")
    options = () if "mpich" in name else ("--allow-run-as-root", "--oversubscribe")
    return [name, *options, "-n", processes]


def launch_command(launcher, processes):
    if launcher == "spawn":
        return [sys.executable, "-m", "multimesh", "spawn", "-n", processes]
    return [*mpirun(processes), sys.executable]


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "processes"), [("mpirun", 2), ("mpirun", 4), ("spawn", 2)])
@pytest.mark.parametrize(
    ("example", "text"),
    [
        (("allreduce.py",), "ok: the sum over {0} devices of {0} processes"),
        (("fft3d.py", "16"), "16^3 on 8 devices: P('x', 'y') -> P('y', 'x')"),
        (("gaussian_process.py", "256"), "ok"),
        (("particle_mesh.py", "16"), "ok: gradients by 12288 coordinates are those of one device"),
        (("sharded_files.py", "16"), "ok: 16^3 in field-16.zarr as P('x', 'y'), read as P(None, ('y', 'x'))"),
        (("density_field.py", "32", os.devnull), "8 devices: 1.000000 of the mass painted, 0 of 32768 particles"),
    ],
)
def test_examples_in_several_processes(example, text, launcher, processes):
    out = run(*launch_command(launcher, processes), EXAMPLES / example[0], *example[1:])
    assert text.format(processes) in out


@pytest.mark.full
def test_copies_that_know_nothing_of_each_other_do_not_run():
    """MPICH's processes find each other through mpi4py; without it they end in one line each."""
    command = [str(part) for part in (*mpirun(2, "mpirun.mpich"), sys.executable, EXAMPLES / "allreduce.py")]
    child = subprocess.run(command, capture_output=True, text=True, env=CLEAN, check=False, timeout=600)
    assert child.returncode == 2
    assert child.stderr.count("2 copies of this program were started") == 2
    assert "Traceback" not in child.stderr
    assert "ok" not in child.stdout


@pytest.mark.full
def test_mpich_with_the_right_and_the_wrong_mpi4py(tmp_path):
    """mpi4py of PyPI looks for MPICH under another name than Debian's; with Open MPI a process sees itself only."""
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", tmp_path, "mpi4py"], check=True)
    (library,) = Path("/usr/lib").glob("*/libmpich.so.12")
    (tmp_path / "libmpi.so.12").symlink_to(library)
    env = CLEAN | {"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    command = [*map(str, mpirun(2, "mpirun.mpich")), sys.executable, str(EXAMPLES / "allreduce.py")]

    def start(abi):
        return subprocess.run(
            command, capture_output=True, text=True, env=env | {"MPI4PY_MPIABI": abi}, check=False, timeout=600
        )

    child = start("mpich")
    assert child.returncode == 0, child.stderr
    assert "ok: the sum over 2 devices of 2 processes" in child.stdout
    child = start("openmpi")
    assert child.returncode == 2
    assert "2 copies of this program were started, and mpi4py finds 1: it uses another MPI than mpirun" in child.stderr
    assert "ok" not in child.stdout
