"""Virtual devices are made by one line, before JAX starts; after that the line says what is wrong."""

import subprocess
import sys

import jax
import pytest
from spawning import CLEAN

import multimesh as mm

PROGRAM = """
import os, jax, multimesh as mm
mm.virtual_devices(4)
assert [d.platform for d in jax.devices()] == ["cpu"] * 4
assert os.environ["NPROC"] == "64"
mm.virtual_devices(4)  # they are there
try:
    mm.virtual_devices(8)
except mm.UsageError as error:
    print(error)
"""


def test_devices_are_made_before_jax_starts():
    child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=CLEAN, check=True)
    assert child.stdout.startswith("virtual_devices(8): JAX has started already, with 4 devices (cpu); call it before")


LAPACK = """
import ctypes, re, jax.numpy as jnp, multimesh as mm
mm.virtual_devices(2)
jnp.linalg.eigh(jnp.eye(2))  # loads SciPy's LAPACK
(path,) = {*re.findall(r"/.*libscipy_openblas-.*", open("/proc/self/maps").read())}
print(ctypes.CDLL(path).scipy_openblas_get_num_threads())
"""


def test_lapack_has_one_thread():
    """On more, `eigh` of order 256 on eight devices took a minute in place of half a second."""
    env = {name: value for name, value in CLEAN.items() if name != "OPENBLAS_NUM_THREADS"}
    child = subprocess.run([sys.executable, "-c", LAPACK], capture_output=True, text=True, env=env, check=True)
    assert child.stdout == "1\n"


def test_devices_that_are_there_may_stay():
    mm.virtual_devices(len(jax.devices()))


@pytest.mark.parametrize("count", [0, 2.5, "8"])
def test_a_number_is_needed(count):
    with pytest.raises(mm.UsageError, match="virtual_devices: the number of devices"):
        mm.virtual_devices(count)
