"""examples/variable_work.py: each recipe has the loss and the gradients of plain jit, as a pipeline."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_gpt_example import CLEAN

from tests.xla_flags import QUICK

SCRIPT = Path(__file__).parents[2] / "examples" / "variable_work.py"
RECIPES = ["packed", "another batch size", "small last batch", "two losses", "gradient penalty", "evaluation"]


@pytest.mark.longer
def test_its_losses_and_gradients_are_those_of_plain_jit():
    flags = " ".join(("--xla_force_host_platform_device_count=4", *QUICK))
    env = CLEAN | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    run = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    _, *lines, programs = run.stdout.splitlines()
    assert programs == "2 programs for two numbers of rows"
    assert [line[:22].strip() for line in lines] == RECIPES
    for line in lines:
        ours, plain, error = line[22:].split()
        assert abs(float(ours) - float(plain)) < 1e-4
        assert error == "-" or float(error) < 1e-5
