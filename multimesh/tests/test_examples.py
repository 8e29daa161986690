"""Examples print losses and gradients beside those of plain jit, which are the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_gpt_example import CLEAN

from tests.xla_flags import QUICK

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ["packed", "another batch size", "small last batch", "two losses", "gradient penalty", "evaluation"]

pytestmark = pytest.mark.longer


def printed(name, devices):
    flags = " ".join((f"--xla_force_host_platform_device_count={devices}", *QUICK))
    env = CLEAN | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    run = subprocess.run([sys.executable, EXAMPLES / name], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()[1:]


def test_experts_on_explicit_axes():
    rows = [line.split() for line in printed("moe.py", 8)]
    assert [int(step) for step, *_ in rows] == [*range(5)]
    losses = [(float(ours), float(plain)) for _, ours, plain in rows]
    assert all(abs(ours - plain) < 1e-4 for ours, plain in losses)
    assert losses[-1][0] < losses[0][0]


def test_recipes_of_variable_work():
    *lines, programs = printed("variable_work.py", 4)
    assert programs == "2 programs for two numbers of rows"
    assert [line[:22].strip() for line in lines] == RECIPES
    for line in lines:
        ours, plain, error = line[22:].split()
        assert abs(float(ours) - float(plain)) < 1e-4
        assert error == "-" or float(error) < 1e-5
