"""`multimesh.linalg` and `multimesh.fft` beside libraries that others wrote: ScaLAPACK, FFTW-MPI, jaxDecomp, mpi4jax.

All of them are slow to get: they install Debian and PyPI packages, as root, and compile. Run them with ``-m full``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

pytestmark = pytest.mark.full

FOREIGN = Path(__file__).parent / "foreign"
JAXDECOMP = "jaxdecomp==0.3.4" if sys.version_info >= (3, 12) else "jaxdecomp==0.3.1"  # the newest for each Python
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none"]
DEBIAN = ["gcc", "openmpi-bin", "libopenmpi-dev", "libscalapack-openmpi-dev", "libfftw3-mpi-dev", "libfftw3-dev"]


def run(*command, **env):
    child = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=os.environ | env, check=False)
    assert child.returncode == 0, f"{command}\n{child.stdout}{child.stderr}"
    return child.stdout


@pytest.fixture(scope="session")
def mpi():
    """Open MPI, ScaLAPACK and FFTW of Debian."""
    if shutil.which("dpkg") is None or shutil.which("apt-get") is None:
        pytest.fail(f"needs Debian's {' '.join(DEBIAN)}")
    if subprocess.run(["dpkg", "-s", *DEBIAN], capture_output=True, check=False).returncode:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *DEBIAN, DEBIAN_FRONTEND="noninteractive")


def install_packages(folder, *packages, **env):
    """A folder with packages from PyPI that the tests' own environment lacks."""
    run(sys.executable, "-m", "pip", "install", "-q", "--target", folder, *packages, **env)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_solutions_are_scalapacks(mpi, tmp_path, ranks):
    n, rng = 320, np.random.default_rng(0)
    a = rng.standard_normal((n, n), dtype=np.float32)
    a, b = a @ a.T / n + np.eye(n, dtype=np.float32), rng.standard_normal(n, dtype=np.float32)
    (tmp_path / "in").write_bytes(a.tobytes() + b.tobytes())
    run("mpicc", "-O2", "-o", tmp_path / "psposv", FOREIGN / "psposv.c", "-lscalapack-openmpi")
    run(*MPIRUN, "-n", ranks, tmp_path / "psposv", n, 32, 1, tmp_path / "in", tmp_path / "out")
    expected = np.fromfile(tmp_path / "out", np.float32)
    for devices, spec in ((2, P("x")), (8, P(None, "x"))):
        matrix = jax.device_put(a, NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("x",)), spec))
        actual = mm.linalg.solve(matrix, b)
        np.testing.assert_allclose(actual, expected, atol=2e-5)
        assert np.linalg.norm(a @ np.asarray(actual) - b) <= 2 * np.linalg.norm(a @ expected - b)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_transforms_are_those_of_fftw(mpi, tmp_path, ranks):
    shape, rng = (8, 12, 10), np.random.default_rng(0)
    x = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    x.tofile(tmp_path / "in")
    run("mpicc", "-O2", "-o", tmp_path / "fftw_mpi", FOREIGN / "fftw_mpi.c", "-lfftw3_mpi", "-lfftw3", "-lm")
    run(*MPIRUN, "-n", ranks, tmp_path / "fftw_mpi", *shape, tmp_path / "in", tmp_path / "out")
    expected = np.fromfile(tmp_path / "out", np.complex128).reshape(shape)
    with jax.enable_x64(True):
        for grid, spec in (((8, 1), P("x")), ((4, 2), P("x", "y"))):
            mesh = Mesh(np.array(jax.devices()).reshape(grid), ("x", "y"))
            actual = mm.fft.fftn(jax.device_put(x, NamedSharding(mesh, spec)))
            np.testing.assert_allclose(mm.fft.unpad(actual, shape), expected, atol=1e-12)


DECOMP = """
import sys
import jax, jaxdecomp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import multimesh as mm

rng = np.random.default_rng(0)
x = (rng.standard_normal((16, 8, 24)) + 1j * rng.standard_normal((16, 8, 24))).astype(np.complex64)
for grid, spec in (((8, 1), P("x", None)), ((4, 2), P("x", "y"))):
    placed = jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()).reshape(grid), ("x", "y")), spec))
    theirs = np.asarray(jaxdecomp.fft.pfft3d(placed))  # Y, Z, X
    np.testing.assert_allclose(mm.fft.fftn(placed), theirs.transpose(2, 0, 1), atol=2e-3)
    ours = mm.fft.fftn(placed, transposed=True)
    np.testing.assert_allclose(ours, theirs if spec[1] is None else theirs.transpose(1, 0, 2), atol=2e-3)
"""


def test_transforms_are_jaxdecomps(tmp_path):
    folder = install_packages(tmp_path / "packages", "--no-deps", JAXDECOMP, "jaxtyping", "wadler-lindig")
    run(sys.executable, "-c", DECOMP, PYTHONPATH=f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


ALLREDUCE = """
import functools
import jax, mpi4jax, numpy as np, jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from mpi4py import MPI

jax.distributed.initialize()
comm = MPI.COMM_WORLD
rank = comm.Get_rank()
arr = jnp.arange(12.0).reshape(3, 4)
expected = jax.jit(lambda arr: mpi4jax.allreduce(arr + rank, op=MPI.SUM, comm=comm))(arr)
mesh = Mesh(np.array(jax.devices()), ("ranks",))
f = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
actual = jax.jit(f(lambda arr: lax.psum(arr + lax.axis_index("ranks"), "ranks")))(np.asarray(arr))
np.testing.assert_array_equal(actual.addressable_data(0), expected)
block = jnp.arange(4.0) + 10 * rank
expected = jax.jit(lambda x: mpi4jax.alltoall(x.reshape(4, 1), comm=comm))(block)
table = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("ranks")), np.asarray(block).reshape(1, 4))
f = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"))
actual = jax.jit(f(lambda x: lax.all_to_all(x, "ranks", 1, 0, tiled=True)))(table)
np.testing.assert_array_equal(actual.addressable_data(0), expected)
expected = jax.jit(lambda x: mpi4jax.sendrecv(x, x, (rank - 1) % 4, (rank + 1) % 4, comm=comm))(block)
actual = jax.jit(f(lambda x: lax.ppermute(x, "ranks", [(i, (i + 1) % 4) for i in range(4)])))(table)
np.testing.assert_array_equal(actual.addressable_data(0)[0], expected)
"""


def test_collectives_are_mpi4jaxs(mpi, tmp_path):
    folder = install_packages(tmp_path / "packages", "mpi4py", "cython", "nanobind", "wheel", "setuptools")
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    build = {"PYTHONPATH": path, "CUDA_PATH": "/usr/local/cuda"}  # no CUDA is needed, only a path
    install_packages(folder, "--no-deps", "--no-build-isolation", "mpi4jax==0.9.0", **build)
    single = {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": path}
    run(*MPIRUN, "-n", 4, sys.executable, "-c", ALLREDUCE, **single)
