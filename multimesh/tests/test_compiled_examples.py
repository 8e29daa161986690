"""README's pipeline and examples/gpt.py, compiled for GPUs that are not there; `.ci/run full-compile-gpu`, nightly."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from test_topologies import lowered

import multimesh as mm

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"

pytestmark = [pytest.mark.full, pytest.mark.compile_gpu, pytest.mark.parametrize("device", ["h100", "b200"])]


def test_readmes_pipeline_is_compiled(device):
    low, _ = lowered(mm.topology(device, nodes=2, gpus=4))
    compiled = low.compile()
    assert len(compiled.kernel_memory()) == len(low.plan.kernels)
    assert {each.kind for kernel in compiled.collectives() for each in kernel} >= {"all-reduce"}


@pytest.mark.flax
def test_the_gpt_example_is_compiled(device):
    """Four stages of two devices, no two of which are alike."""
    example = runpy.run_path(str(GPT))
    grid = np.array(mm.topology(device, nodes=1, gpus=8)).reshape(4, 2)
    (params, state), step, *_ = example["functions"](8, [Mesh(row, ("data",)) for row in grid])
    rows = jax.ShapeDtypeStruct((example["BATCH"], example["LENGTH"]), "int32")
    given = jax.eval_shape(lambda: (params, state, jax.random.key(0)))
    low = step.lower(*given[:2], {"x": rows, "y": rows}, given[2])
    compiled = low.compile()
    assert len(compiled.compile_seconds) == len(compiled.plan.kernels)
    assert all(seconds > 0 for seconds in compiled.compile_seconds)
    pairs = zip(low.memory_estimate("gpu"), compiled.device_memory(), strict=True)
    assert all(forecast.arguments == memory.arguments for forecast, memory in pairs)
