"""Examples: what they print beside plain jit is the same; gpt.py has one row of losses in every way that it runs."""

import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from spawning import CLEAN, free_port

import multimesh as mm
from tests.xla_flags import QUICK

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


def train(folder, *flags, processes=1):
    """Metrics of a run, a row a step, and what process 0 printed."""
    port, children = free_port(), []
    env = CLEAN | {"XLA_FLAGS": " ".join(QUICK), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for number in range(processes):
        several = ("--processes", str(processes), "--process", str(number), "--coordinator", f"127.0.0.1:{port}")
        command = [sys.executable, str(GPT), "--save", str(folder), *flags, *(several if processes > 1 else ())]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen(command, env=env, **pipes))
    outputs = [process.communicate(timeout=600) for process in children]
    assert [process.returncode for process in children] == [0] * processes, outputs
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    return rows, outputs[0][0]


def numbers(rows, name):
    return np.array([float(row[name]) for row in rows if row[name]])


def assert_alike(rows, expected):
    for name in ("loss", "gradient", "evaluation"):
        np.testing.assert_allclose(numbers(rows, name), numbers(expected, name), rtol=1e-4)


@pytest.mark.flax
@pytest.mark.full
def test_a_pipeline_and_one_program_have_the_same_losses(tmp_path):
    small = ("--layers", "2", "--steps", "3", "--every", "2")
    rows, output = train(tmp_path / "pipeline", "--stages", "2", *small)
    one, reference = train(tmp_path / "one", "--stages", "1", *small)
    assert_alike(rows, one)
    assert len(rows) == 3
    assert len(numbers(rows, "evaluation")) == 2
    assert "the slowest stage has" in output
    assert "the slowest stage has" not in reference


@pytest.mark.flax
@pytest.mark.full
def test_a_run_goes_on_where_the_last_one_ended(tmp_path):
    """Four stages in two processes, then in one, beside one program that is not interrupted."""
    complete, _ = train(tmp_path / "whole", "--stages", "1", "--steps", "8")
    assert numbers(complete, "loss")[-1] < 0.75 * numbers(complete, "loss")[0]
    first, _ = train(tmp_path / "parts", "--steps", "4", processes=2)
    assert len(first) == 4
    rows, output = train(tmp_path / "parts", "--steps", "8")
    assert "step 4: " in output
    assert "step 3: " not in output
    np.testing.assert_allclose(numbers(rows, "loss"), numbers(complete, "loss"), rtol=1e-4)
    assert list((tmp_path / "parts").glob("events.*"))


@pytest.mark.flax
@pytest.mark.full
@pytest.mark.compile_gpu
@pytest.mark.parametrize("device", ["h100", "b200"])
def test_it_is_compiled_for_gpus_that_are_not_there(device):
    """Four stages of two devices, no two of which are alike; `.ci/run full-compile-gpu`, nightly."""
    example = runpy.run_path(str(GPT))
    grid = np.array(mm.topology(device, nodes=1, gpus=8)).reshape(4, 2)
    (params, state), step, *_ = example["functions"](8, [Mesh(row, ("data",)) for row in grid])
    rows = jax.ShapeDtypeStruct((example["BATCH"], example["LENGTH"]), "int32")
    types = jax.eval_shape(lambda: (params, state, jax.random.key(0)))
    low = step.lower(*types[:2], {"x": rows, "y": rows}, types[2])
    compiled = low.compile()
    assert len(compiled.compile_seconds) == len(compiled.plan.kernels)
    assert all(seconds > 0 for seconds in compiled.compile_seconds)
    pairs = zip(low.memory_estimate("gpu"), compiled.device_memory(), strict=True)
    assert all(forecast.arguments == memory.arguments for forecast, memory in pairs)


RECIPES = ["packed", "another batch size", "small last batch", "two losses", "gradient penalty", "evaluation"]


def lines_of(name, devices):
    flags = " ".join((f"--xla_force_host_platform_device_count={devices}", *QUICK))
    env = CLEAN | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    run = subprocess.run([sys.executable, GPT.with_name(name)], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()[1:]


@pytest.mark.longer
def test_experts_on_explicit_axes():
    rows = [line.split() for line in lines_of("moe.py", 8)]
    assert [int(step) for step, *_ in rows] == [*range(5)]
    losses = [(float(value), float(expected)) for _, value, expected in rows]
    assert all(abs(value - expected) < 1e-4 for value, expected in losses)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.longer
def test_recipes_of_variable_work():
    *lines, programs = lines_of("variable_work.py", 4)
    assert programs == "2 programs for two numbers of rows"
    assert [line[:22].strip() for line in lines] == RECIPES
    for line in lines:
        value, expected, error = line[22:].split()
        assert abs(float(value) - float(expected)) < 1e-4
        assert error == "-" or float(error) < 1e-5
