"""examples/moe.py: experts on a mesh with Explicit axes have the losses of plain jit, as a pipeline."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_gpt_example import CLEAN

from tests.xla_flags import QUICK

MOE = Path(__file__).parents[2] / "examples" / "moe.py"


@pytest.mark.longer
def test_its_losses_are_those_of_plain_jit():
    flags = " ".join(("--xla_force_host_platform_device_count=8", *QUICK))
    env = CLEAN | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    run = subprocess.run([sys.executable, str(MOE)], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line.split() for line in run.stdout.splitlines()[1:]]
    assert [int(step) for step, *_ in rows] == [*range(5)]
    losses = [(float(ours), float(plain)) for _, ours, plain in rows]
    assert all(abs(ours - plain) < 1e-4 for ours, plain in losses)
    assert losses[-1][0] < losses[0][0]
