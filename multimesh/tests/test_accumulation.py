"""Sums over many microbatches of bfloat16 and float16 results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import plain
from pipelines import Split, submeshes

import multimesh as mm

WIDTH, COUNT = 8, 320  # microbatches: more than bfloat16 can count
SPLIT = Split(submeshes(2, (1,)))


def loss(on, params, x):
    for n, (w, b) in enumerate(params):
        x = on(n, lambda w, b, x: jnp.tanh(x @ w + b))(w, b, x)
    return jnp.mean((x.astype(jnp.float32) - 1) ** 2)


def arguments(width, dtype):
    draw = np.random.default_rng(0)
    params = [(draw.normal(size=(width, width)) / np.sqrt(width), 0 * draw.normal(size=width)) for _ in range(2)]
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params), jnp.asarray(draw.normal(size=(COUNT, width)), dtype)


def gradients(width, dtype, where, jit=mm.jit, on=SPLIT, **options):
    params, x = arguments(width, dtype)
    body = functools.partial(loss, on)
    if where == "inside":
        step = mm.microbatch(jax.grad(body), size=1, argnum=1, reduce="mean", **options)
    else:
        step = jax.grad(mm.microbatch(body, size=1, argnum=1, reduce="mean", **options))
    return jit(step)(params, x)


def relative_error(sums, width, dtype):
    """Return the distance of gradients from those of float32, from the same rounded parameters."""
    params, x = jax.tree.map(lambda x: x.astype(jnp.float32), arguments(width, dtype))
    expected = jax.jit(jax.grad(functools.partial(loss, plain)))(params, x)
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (sums, expected)), strict=True)
    ]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)


@pytest.mark.telling("1f1b-inside", "zb-h1-outside")
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_small_results_are_summed_in_float32(where, schedule):
    actual = gradients(WIDTH, jnp.bfloat16, where, schedule=schedule)
    assert {g.dtype for g in jax.tree.leaves(actual)} == {jnp.dtype(jnp.bfloat16)}
    assert relative_error(actual, WIDTH, jnp.bfloat16) < 0.006
    for n, stage in enumerate(actual):
        assert all(g.devices() == SPLIT.devices(n) for g in stage)


@pytest.mark.longer
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_large_ones_where_that_is_asked_for(where):
    width = 260  # more than 65,536 elements
    default, precise = (gradients(width, jnp.bfloat16, where, **g) for g in ({}, {"accumulate": "float32"}))
    assert relative_error(precise, width, jnp.bfloat16) < 0.01
    assert relative_error(default, width, jnp.bfloat16) > 2 * relative_error(precise, width, jnp.bfloat16)
    assert jax.tree.map(lambda g: g.dtype, default) == jax.tree.map(lambda g: g.dtype, precise)


@pytest.mark.telling("inside")
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_accumulators_of_all_stages_have_that_dtype(where):
    params, x = arguments(WIDTH, jnp.float16)
    plan = {}
    for dtype in (None, "float32", "float64", jnp.bfloat16):
        body = functools.partial(loss, SPLIT)
        loop = functools.partial(mm.microbatch, size=1, argnum=1, accumulate=dtype)
        with jax.enable_x64(dtype == "float64"):
            step = mm.jit(loop(jax.grad(body)) if where == "inside" else jax.grad(loop(body)))
            step_plan = step.plan(params, x)
        zeros = {k for k, kernel in enumerate(step_plan.kernels) if kernel.make == "zeros"}
        plan[dtype] = {str(step_plan.slots[s].dtype) for run in step_plan.runs if run.kernel in zeros for s in run.outs}
    assert plan == {None: {"float32"}, "float32": {"float32"}, "float64": {"float64"}, jnp.bfloat16: {"float16"}}


@pytest.mark.parametrize("disable", [False, pytest.param(True, marks=pytest.mark.longer)])
def test_without_submeshes_it_means_the_same(disable):
    with jax.disable_jit(disable):
        rows = jnp.full((COUNT,), 1, jnp.bfloat16)
        total = mm.microbatch(lambda x: (x[0], {"mean": x.mean(), "count": jnp.int32(1)}), size=1)(rows)
        assert [*map(float, jax.tree.leaves(total))] == [COUNT] * 3  # in bfloat16 it would stop at 256
        assert total[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["int32", "nonsense", 3, object()])
def test_what_is_no_floating_dtype_is_refused(dtype):
    with pytest.raises(mm.UsageError, match='microbatch: accumulate must be a floating dtype such as "float32"'):
        mm.microbatch(jnp.sum, size=1, accumulate=dtype)
