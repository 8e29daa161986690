"""examples/gpt.py: as a pipeline, as one program and in two processes it has one row of losses."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from spawning import free_port

from tests.xla_flags import QUICK

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
CLEAN = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC")}

pytestmark = pytest.mark.flax


def train(folder, *flags, processes=1):
    """Metrics of a run, a row a step, and what process 0 printed."""
    port, started = free_port(), []
    env = CLEAN | {"XLA_FLAGS": " ".join(QUICK), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for number in range(processes):
        several = ("--processes", str(processes), "--process", str(number), "--coordinator", f"127.0.0.1:{port}")
        command = [sys.executable, str(GPT), "--save", str(folder), *flags, *(several if processes > 1 else ())]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=env, **pipes))
    told = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0] * processes, told
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    return rows, told[0][0]


def numbers(rows, name):
    return np.array([float(row[name]) for row in rows if row[name]])


def assert_alike(rows, wanted):
    for name in ("loss", "gradient", "evaluation"):
        np.testing.assert_allclose(numbers(rows, name), numbers(wanted, name), rtol=1e-4)


@pytest.mark.full
def test_a_pipeline_and_one_program_have_the_same_losses(tmp_path):
    small = ("--layers", "2", "--steps", "3", "--every", "2")
    rows, told = train(tmp_path / "pipeline", "--stages", "2", *small)
    one, plain = train(tmp_path / "one", "--stages", "1", *small)
    assert_alike(rows, one)
    assert len(rows) == 3
    assert len(numbers(rows, "evaluation")) == 2
    assert "the slowest stage has" in told
    assert "the slowest stage has" not in plain


@pytest.mark.full
def test_a_run_goes_on_where_the_last_one_ended(tmp_path):
    """Four stages in two processes, then in one, beside one program that is not interrupted."""
    whole, _ = train(tmp_path / "whole", "--stages", "1", "--steps", "8")
    assert numbers(whole, "loss")[-1] < 0.75 * numbers(whole, "loss")[0]
    first, _ = train(tmp_path / "parts", "--steps", "4", processes=2)
    assert len(first) == 4
    rows, told = train(tmp_path / "parts", "--steps", "8")
    assert "step 4: " in told
    assert "step 3: " not in told
    np.testing.assert_allclose(numbers(rows, "loss"), numbers(whole, "loss"), rtol=1e-4)
    assert list((tmp_path / "parts").glob("events.*"))
