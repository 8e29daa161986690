"""Compiled kernels in a folder: written by one process, loaded by another, and refused where they do not belong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.runtime import precompiled
from test_topologies import lowered

import multimesh as mm

TRAINER = """
import sys
import jax, numpy as np
import multimesh as mm
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mm.virtual_devices(8)
meshes = [Mesh(row, ("data",)) for row in np.array(jax.devices()).reshape(4, 2)]

def loss(params, x, key):
    for number, mesh in enumerate(meshes):
        def stage(w, x, key=None):
            x = x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape)
            return jax.numpy.tanh(x @ w)
        given = (params[number], x) if number else (params[number], x, key)
        x = mm.task(stage, f"stage{number}", mesh=mesh)(*given)
    return (x ** 2).mean()

def step(params, x, key):
    gradients = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=8, schedule="1f1b", reduce="mean")
    value, grads = gradients(params, x, key)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

params = [np.random.default_rng(n).normal(size=(16, 16)).astype(np.float32) for n in range(4)]
given = params, jax.device_put(np.ones((32, 16), np.float32), NamedSharding(meshes[0], P("data"))), jax.random.key(7)
if sys.argv[1] == "save":
    compiled = mm.jit(step, donate_argnums=0).lower(*given).compile()
    compiled.save(sys.argv[2])
else:
    from multimesh.runtime import compile
    compile._Lowered.compile = None  # of kernels
    train = mm.jit(step, donate_argnums=0, precompiled=sys.argv[2])
    compiled = train.prepare(*given)
    assert not any(compiled.compile_seconds), compiled.compile_seconds
    assert compiled.memory_analysis() and "HloModule" in compiled.as_text()
for _ in range(3):
    params, value = compiled(params, *given[1:])
    print(float(value).hex(), [np.asarray(w).tobytes().hex()[:64] for w in params])
"""


def trained(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


def test_another_process_loads_what_one_compiled_and_trains_alike(tmp_path):
    first, second = (trained(tmp_path, how, str(tmp_path / "kernels")) for how in ("save", "load"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.count("\n") == 3
    assert first.stdout == second.stdout
    manifest = json.loads((tmp_path / "kernels" / "manifest.json").read_text())
    assert len(manifest["files"]) < len(manifest["kernels"])  # stages that are alike are kept once
    assert {path.name for path in (tmp_path / "kernels").iterdir()} == {"manifest.json", *manifest["files"].values()}


def product(axis_type=AxisType.Auto, dtype="float32", kind=None):
    mesh = Mesh(np.array(jax.devices()[2:4]), ("x",), axis_types=(axis_type,))
    given = jax.ShapeDtypeStruct((8, 8), dtype, sharding=NamedSharding(mesh, P("x"), memory_kind=kind))
    return mm.task(lambda a, b: (a + a, (a.astype("float32") * b.astype("float32")).sum()), "product", mesh=mesh), given


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_layouts_and_types_come_back(tmp_path, axis_type, dtype):
    task, given = product(axis_type, dtype)
    compiled = mm.jit(task).lower(given, given).compile()
    compiled.save(tmp_path / "kernels")
    loaded = mm.jit(task, precompiled=tmp_path / "kernels")
    arrays = [jax.device_put(np.full((8, 8), 3, dtype), given.sharding) for _ in range(2)]
    want, got = compiled(*arrays), loaded(*arrays)
    assert jax.tree.map(lambda x: (x.sharding, x.dtype), got) == jax.tree.map(lambda x: (x.sharding, x.dtype), want)
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(one, "float32"), np.asarray(other, "float32"))


@pytest.fixture
def folder(tmp_path):
    low, _ = lowered(jax.devices()[:8])
    low.compile().save(tmp_path / "kernels")
    return tmp_path / "kernels"


def altered(folder, **changes):
    file = folder / "manifest.json"
    found = {**json.loads(file.read_text()), **changes}
    del found["sha256"]
    file.write_text(json.dumps({**found, "sha256": precompiled._digest(found)}))


def refusal(folder, devices=None, **options):
    low, _ = lowered(jax.devices()[:8] if devices is None else devices)
    with pytest.raises(mm.UsageError) as caught:
        low.compile(precompiled=folder, **options)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"jax": "0.9.0", "jaxlib": "0.9.0"}}, "was compiled for jax 0.9.0, and here is"),
        ({"devices": ["NVIDIA H100 9.0"]}, "was compiled for NVIDIA H100 9.0, and the plan's devices are CPU "),
        ({"processes": [4, 4]}, "was compiled for processes with 4, 4 devices, and the plan's have 8;"),
        ({"flags": ["--xla_a=1"]}, "was compiled for XLA's --xla_a=1, and here is"),
    ],
)
def test_kernels_for_something_else_are_refused(folder, changes, message):
    altered(folder, **changes)
    line = refusal(folder)
    assert message in line
    assert "precompile again" in line


def test_another_plan_is_refused(folder):
    low, _ = lowered(jax.devices()[:8], rows=64)
    with pytest.raises(
        mm.UsageError, match=r"has no kernel '.*' of this plan, but .*; precompile again with this func"
    ):
        low.compile(precompiled=folder)


def test_other_options_for_xla_are_refused(folder):
    line = refusal(folder, compiler_options={"xla_cpu_enable_fast_math": True})
    assert "XLA's defaults, and here is --xla_cpu_enable_fast_math=True; precompile again" in line


def test_flags_that_change_no_code_are_not_compared(folder, monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", f"{__import__('os').environ['XLA_FLAGS']} --xla_dump_to=x --xla_gpu_autotune_level=0"
    )
    low, _ = lowered(jax.devices()[:8])
    low.compile(precompiled=folder)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert "and here is --xla_cpu_enable_fast_math=true" in refusal(folder)


def test_a_damaged_or_missing_file_is_refused_before_xla_sees_it(folder, monkeypatch):
    monkeypatch.setattr("multimesh.core._compat.stored_executables.from_bytes", None)
    name = next(iter(json.loads((folder / "manifest.json").read_text())["files"].values()))
    whole = (folder / name).read_bytes()
    for file in folder.glob("[0-9a-f]*"):
        file.write_bytes(file.read_bytes()[:-1])
    assert "does not hold the bytes that were written; copy it again" in refusal(folder)
    for file in folder.glob("[0-9a-f]" * 64):
        file.unlink()
    assert "No such file or directory; copy the folder again, whole" in refusal(folder)
    assert len(whole) > 1000


def test_a_folder_without_or_with_a_broken_manifest_is_refused(folder, tmp_path):
    assert "name a folder that Compiled.save has written" in refusal(tmp_path / "nothing")
    text = (folder / "manifest.json").read_text()
    for damaged in ("{", "[]", "{}", text.replace("CPU ", "GPU "), text.replace('"plan": "', '"plan": "f')):
        (folder / "manifest.json").write_text(damaged)
        assert re.search(r"manifest.json is damaged \(.*\); copy the folder again", refusal(folder))


def test_a_folder_is_written_once(folder):
    low, _ = lowered(jax.devices()[:8])
    with pytest.raises(mm.UsageError, match="holds kernels already; choose another folder"):
        low.compile().save(folder)


def test_kernels_that_xla_has_loaded_cannot_be_written(folder, tmp_path):
    """XLA would write them without their code, and a call would fail."""
    low, _ = lowered(jax.devices()[:8])
    with pytest.raises(mm.UsageError, match="loaded from precompiled=, and XLA writes only what it compiled"):
        low.compile(precompiled=folder).save(tmp_path / "again")
    given = {"jax_compilation_cache_dir": str(tmp_path / "cache"), "jax_enable_compilation_cache": True}
    kept = {name: getattr(jax.config, name) for name in given}
    for name, value in given.items():
        jax.config.update(name, value)
    try:
        compiled = low.compile()
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)
    with pytest.raises(mm.UsageError, match="may be from jax_compilation_cache_dir"):
        compiled.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_kernel_that_calls_python_cannot_be_written(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))

    def back(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    compiled = mm.jit(mm.task(back, "back", mesh=mesh)).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()
    with pytest.raises(mm.UsageError, match="kernel 'back' calls back into Python, so it can't be written"):
        compiled.save(tmp_path / "kernels")


def test_a_function_without_tasks_has_no_kernels_to_load(tmp_path):
    with pytest.raises(mm.MultiMeshError, match="nothing in this function is a task"):
        mm.jit(lambda x: x, precompiled=tmp_path)(1.0)
    with pytest.raises(mm.UsageError, match="jit: precompiled must be a path"):
        mm.jit(lambda x: x, precompiled=3)


@pytest.mark.compile_gpu
def test_kernels_for_gpus_that_are_not_there_are_written_and_held_against_a_job(tmp_path):
    """All but the load: that needs the GPUs."""
    devices = mm.topology("h100", nodes=2, gpus=4)
    low, _ = lowered(devices)
    low.compile().save(tmp_path / "kernels")
    manifest = json.loads((tmp_path / "kernels" / "manifest.json").read_text())
    assert manifest["devices"] == ["NVIDIA H100 80GB HBM3 9.0"]
    assert manifest["processes"] == [1] * 8
    assert manifest["versions"]["jax-cuda12-plugin"]
    assert "devices of multimesh.topology are not there" in refusal(tmp_path / "kernels", devices)
    assert "NVIDIA H100 80GB HBM3 9.0, and the plan's devices are" in refusal(
        tmp_path / "kernels", mm.topology("b200", nodes=2, gpus=4)
    )
    assert "1, 1, 1, 1, 1, 1, 1, 1 devices, and the plan's have 4, 4;" in refusal(
        tmp_path / "kernels", mm.topology("h100", nodes=2, gpus=4, process_per="node")
    )
    assert "and the plan's devices are CPU" in refusal(tmp_path / "kernels")
