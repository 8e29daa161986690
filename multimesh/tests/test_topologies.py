"""Kernels compiled for GPUs that are not there: README's pipeline, and what is known of each kernel."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.hardware import topologies

import multimesh as mm

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None or importlib.util.find_spec("nvidia") is None,
    reason="requirements/compile-gpu.txt is not installed",
)


def lowered(devices):
    front, back = (Mesh(each, ("data",)) for each in np.array(devices).reshape(2, -1))

    def loss(params, batch):
        hidden = mm.task(lambda w, x: jax.numpy.tanh(x @ w), "front", mesh=front)(params["front"], batch["x"])
        tail = mm.task(lambda w, h, y: jax.numpy.mean((h @ w - y) ** 2), "back", mesh=back)
        return tail(params["back"], hidden, batch["y"])

    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=8, schedule="1f1b", reduce="mean")
    params = {"front": jax.ShapeDtypeStruct((16, 64), "float32"), "back": jax.ShapeDtypeStruct((64, 4), "float32")}
    rows = {"x": ((32, 16), front), "y": ((32, 4), back)}
    batch = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P("data")))
        for name, (shape, mesh) in rows.items()
    }
    return mm.jit(step).lower(params, batch), (params, batch)


def test_a_device_that_nobody_knows_is_refused():
    with pytest.raises(mm.UsageError, match="knows no device 'h1000'; it knows h100, h200, a100; or pass the text"):
        mm.topology("h1000")
    with pytest.raises(mm.UsageError, match='process_per must be "gpu" or "node"'):
        mm.topology("h100", process_per="rack")


def test_without_the_plugin_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topologies, "_PLUGINS", ("no_such_plugin",))
    with pytest.raises(mm.UsageError, match=re.escape("-r requirements/compile-gpu.txt")):
        mm.topology("h100")


@needs_plugin
@pytest.mark.parametrize("per", ["gpu", "node"])
def test_readmes_pipeline_is_compiled_for_eight_h100_and_refuses_to_run(per):
    devices = mm.topology("h100", nodes=2, gpus=4, process_per=per)
    assert len({d.process_index for d in devices}) == (8 if per == "gpu" else 2)
    low, given = lowered(devices)
    compiled = low.compile()
    memory = compiled.kernel_memory()
    assert len(memory) == len(low.plan.kernels)
    assert max(each.arguments for each in memory) >= 16 * 64 * 4  # the weights of the front, and their sums
    assert {each.aliases for each in memory} >= {16 * 64 * 4}
    assert {each.kind for kernel in compiled.collectives() for each in kernel} >= {"all-reduce"}
    assert "HloModule" in compiled.as_text()
    assert all(stats["scratch"] >= 0 for stats in compiled.memory_analysis())
    with pytest.raises(mm.UsageError, match="compiled for devices that are not there"):
        compiled(*given)


def test_a_compiled_function_tells_its_memory_and_collectives_on_cpus_too():
    low, _ = lowered(jax.devices()[:8])
    compiled = low.compile()
    assert all(each.arguments >= 0 and each.temporaries >= 0 for each in compiled.kernel_memory())
    (mesh, _) = low.plan.submeshes
    found = [each for kernel in compiled.collectives() for each in kernel if each.kind == "all-reduce"]
    assert found
    assert all(each.axes(mesh) == ("data",) for each in found)
