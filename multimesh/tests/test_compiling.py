"""Programs are compiled once each, in several threads, and one compilation serves equal stages."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, TRANSFORMER, Model
from multimesh.core._compat import executables
from pipelines import Split, gradient, submeshes

import multimesh as mm

ROWS, SIZE, STAGES = 8, 2, 4


def inputs(model: Model, split: Split) -> tuple[Any, Any]:
    params = model.init(STAGES)
    return split.place(params, model.owners(params)), jax.device_put(model.batch(ROWS, 0))


def same_bits(one: Any, other: Any) -> bool:
    return all(map(np.array_equal, map(np.asarray, jax.tree.leaves(one)), map(np.asarray, jax.tree.leaves(other))))


def test_programs_are_compiled_once_each_and_at_the_same_time(monkeypatch):
    split = Split(submeshes(2, (2,)))
    placed, batch = inputs(MLP, split)
    lowered = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS)).lower(placed, batch)
    names: list[str] = []
    barrier = threading.Barrier(2, timeout=120)  # two compilations must be under way at once to get past it
    compile_program = jax.stages.Lowered.compile

    def compile_together(self: Any, *args: Any, **options: Any) -> Any:
        names.append(self._lowering._name)
        if len(names) <= 2:
            barrier.wait()
        return compile_program(self, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_together)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    monkeypatch.setattr(executables, "code_key", lambda *_: None)  # every kernel has its own program
    compiled = lowered.compile()
    assert len(names) == len(compiled.plan.kernels)
    assert not barrier.broken


@pytest.mark.telling("two devices")
@pytest.mark.parametrize(
    ("model", "shape"),
    [(MLP, (1,)), (MLP, (1, 2)), (TRANSFORMER, (1, 2))],
    ids=["one device", "two devices", "transformer"],
)
def test_equal_stages_share_one_compilation_and_stay_on_their_devices(monkeypatch, compilations, model, shape):
    split = Split(submeshes(STAGES, shape))
    placed, batch = inputs(model, split)
    function: Callable[..., Any] = gradient(model, split, size=SIZE, rows=ROWS)
    counts, results = [], []
    for explicit in (False, True):
        if explicit:
            monkeypatch.setattr(executables, "code_key", lambda *_: None)
        lowered = mm.jit(function).lower(placed, batch)
        before = len(compilations)
        compiled = lowered.compile()
        counts.append(len(compilations) - before)
        results.append(compiled(placed, batch))
    assert counts[1] == len(compiled.plan.kernels)
    assert counts[0] <= counts[1] - 2  # forward and backward of the two stages between the first and the last
    assert same_bits(*results)
    for grads, params in zip(jax.tree.leaves(results[0][1]), jax.tree.leaves(placed), strict=True):
        assert grads.devices() == params.devices()


def test_a_program_that_cannot_be_loaded_elsewhere_is_compiled_there(monkeypatch, compilations):
    monkeypatch.setattr(executables, "on_other_devices", lambda *_: None)
    split = Split(submeshes(STAGES, (2,)))
    lowered = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS)).lower(*inputs(MLP, split))
    before = len(compilations)
    assert len(lowered.compile().compiled_plan.executables) == len(compilations) - before


def test_shared_programs_are_analysed_like_others():
    split = Split(submeshes(STAGES, (2,)))
    compiled = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS)).lower(*inputs(MLP, split)).compile()
    flops = [cost["flops"] for cost in compiled.cost_analysis()]
    assert flops[1] == flops[2] > 0
    scratch = [memory["scratch"] for memory in compiled.memory_analysis()]
    assert scratch[1] == scratch[2]


LEVEL = "xla_backend_optimization_level"


@pytest.mark.parametrize(
    ("compiler_options", "flags", "expected"),
    [
        (None, "", {LEVEL: 2}),
        ({"xla_embed_ir_in_executable": False}, "", {"xla_embed_ir_in_executable": False, LEVEL: 2}),
        ({LEVEL: 1}, "", {LEVEL: 1}),
        (None, f"--{LEVEL}=3", {}),
    ],
    ids=["default", "other options", "given", "in XLA_FLAGS"],
)
def test_what_plans_on_cpus_are_compiled_with_unless_told_otherwise(monkeypatch, compiler_options, flags, expected):
    split = Split(submeshes(2, (2,)))
    lowered = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS)).lower(*inputs(MLP, split))
    calls: list[Any] = []
    compile_program = jax.stages.Lowered.compile

    def note_options(self: Any, options: Any = None) -> Any:
        calls.append(options)
        return compile_program(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", note_options)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setenv("XLA_FLAGS", flags)  # XLA itself has read it before
    lowered.compile(compiler_options)
    assert all(options == expected for options in calls)
    assert calls


YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
has_ynnpack = pytest.mark.skipif(not executables.takes_option(YNNPACK, ""), reason="this jaxlib has no YNNPACK")


@pytest.fixture(scope="module")
def products() -> Any:
    """A stage with the many small products of attention, and one with large products by weights."""

    def stages(x: jax.Array, w: jax.Array) -> jax.Array:
        attention, mlp = submeshes(2, (1,))
        with mm.task(mesh=attention, name="attention"):
            heads = x.reshape(8, 64, 4, 64)
            x = jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", heads, heads), heads).reshape(x.shape)
        with mm.task(mesh=mlp, name="mlp"):
            return jnp.tanh(x @ w) @ w

    return mm.jit(stages).lower(jnp.ones((512, 256)), jnp.ones((256, 256)))


@has_ynnpack
def test_ynnpack_gets_the_products_that_gain_by_it(products: Any):
    compiled = products.compile().compiled_plan
    pairs = zip(compiled.plan.kernels, compiled.executables, strict=True)
    assert {kernel.name: "__ynn_fusion" in executable.as_text() for kernel, executable in pairs} == {
        "attention": False,
        "mlp": True,
    }


@has_ynnpack
@pytest.mark.parametrize(("options", "flags"), [({YNNPACK: "LIBRARY_FUSION_TYPE_DOT"}, ""), (None, f"--{YNNPACK}=x")])
def test_a_choice_of_the_user_about_ynnpack_stays(monkeypatch, products: Any, options: Any, flags: str):
    monkeypatch.setenv("XLA_FLAGS", flags)  # XLA itself has read it before
    compiled = products.compile(options).compiled_plan
    assert all("__ynn_fusion" in executable.as_text() for executable in compiled.executables)


def scaled_by(halve: Callable[..., Any]) -> Any:
    """Return a function that says by itself how it is partitioned, as cuDNN's attention does."""

    def partition(factor: float, mesh: Any, operands: Any, result: Any) -> Any:
        shardings = tuple(x.sharding for x in operands)
        return mesh, lambda x: halve(x) * factor, result.sharding, shardings

    @functools.partial(custom_partitioning, static_argnums=(1,))
    def scale(x: jax.Array, factor: float) -> jax.Array:
        return halve(x) * factor

    scale.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda factor, mesh, operands, result: operands[0].sharding,
        sharding_rule="i j -> i j",
    )
    return scale


@pytest.mark.parametrize(
    ("factors", "functions", "compiled"),
    [((2.0, 2.0), (0, 0), 1), ((2.0, 3.0), (0, 0), 2), ((2.0, 2.0), (0, 1), 2)],
    ids=["like", "other static arguments", "other functions"],
)
def test_stages_that_partition_by_a_function_share_a_compilation_where_the_function_is_one(
    compilations, factors, functions, compiled
):
    scales = [scaled_by(lambda x: x / 2), scaled_by(lambda x: x / 4)]
    meshes, layout = submeshes(2, (2,)), P("data")

    def stages(x: jax.Array) -> jax.Array:
        for mesh, factor, function in zip(meshes, factors, functions, strict=True):
            with mm.task(mesh=mesh, name="stage"):
                x = mm.with_sharding_constraint(scales[function](jnp.tanh(x), factor), layout)
        return x

    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(meshes[0], layout))
    lowered = mm.jit(stages).lower(x)
    before = len(compilations)
    run = lowered.compile()
    assert len(compilations) - before == compiled
    expected = x
    for factor, function in zip(factors, functions, strict=True):
        expected = jnp.tanh(expected) / (2, 4)[function] * factor
    np.testing.assert_allclose(run(x), expected, rtol=1e-6)
