"""Leaves that no task reads: what is made of each stays on the submesh that it is given on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, submeshes

import multimesh as mm

VALUES = list(np.random.default_rng(0).normal(size=(4, 4, 4)).astype(np.float32))


def on(meshes, values=VALUES):
    return [jax.device_put(v, NamedSharding(m, P("data"))) for v, m in zip(values, meshes, strict=True)]


def average(old, new):
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)


def clipped(leaves):
    norm = optax.global_norm(leaves)
    return jax.tree.map(lambda v: v / jnp.maximum(norm, 1), leaves)


WITHOUT_TASKS = {
    "an average": lambda leaves: average(leaves, [2 * v for v in leaves]),
    "clipping by the norm of all": clipped,
    "the same": lambda leaves: leaves,
    "zeros": lambda leaves: jax.tree.map(jnp.zeros_like, leaves),
    "an update": lambda leaves: optax.adam(0.1).update(leaves, optax.adam(0.1).init(leaves))[0],
    "integers": lambda leaves: [jnp.sign(v).astype(jnp.int32) + 1 for v in leaves],
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", WITHOUT_TASKS)
def test_a_function_without_tasks(case, kind):
    meshes = [Mesh(m.devices, m.axis_names, axis_types=(kind,)) for m in submeshes(4)]
    step = mm.jit(WITHOUT_TASKS[case])
    actual = step(on(meshes))
    assert_same(actual, jax.jit(WITHOUT_TASKS[case])(VALUES))
    assert [v.sharding.mesh for v in actual] == meshes
    compiled = len(step.compiled)
    step(on(meshes))
    assert len(step.compiled) == compiled


def test_what_no_task_reads_is_made_on_the_first_submesh_that_has_a_task():
    """Submeshes stand in the order in which the function, or the forward pass of its gradient, comes to them."""
    second, first = submeshes(2, (1,))

    def f(x, y):
        return jnp.sum(mm.task(jnp.cos, mesh=second)(mm.task(jnp.sin, mesh=first)(x))), jnp.cos(y)

    assert mm.jit(f)(*VALUES[:2])[1].devices() == set(first.devices.flat)
    for fn in (f, jax.grad(f, has_aux=True)):
        assert mm.jit(fn).plan(*VALUES[:2]).submeshes == (first, second)


def test_a_scalar_of_all_and_its_gradient():
    norm = mm.jit(optax.global_norm)
    leaves = on(submeshes(4))
    assert_same(norm(leaves), optax.global_norm(VALUES))
    grads = jax.grad(norm)(leaves)
    assert_same(grads, jax.grad(optax.global_norm)(VALUES))
    assert [g.devices() for g in grads] == [v.devices() for v in leaves]
    assert_same(norm(VALUES), optax.global_norm(VALUES))  # one program, on one device
    assert_same(norm(leaves[:1] * 4), optax.global_norm(VALUES[:1] * 4))


@pytest.mark.parametrize("first", ["placed", "not placed"])
def test_an_average_beside_a_task(first):
    """Parameters are with their tasks; of their average, which no task reads, each leaf is where it is given."""
    meshes = submeshes(4)
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{s}", mesh=m) for s, m in enumerate(meshes[:2])]

    def step(params, mean, x):
        for task, w in zip(tasks, params, strict=True):
            x = task(w, x)
        return x, average(mean, [2 * v for v in mean])

    jitted = mm.jit(step)
    if first == "not placed":
        jitted(VALUES[:2], VALUES, np.ones((2, 4), np.float32))
    out, mean = jitted(on(meshes[:2], VALUES[:2]), on(meshes), np.ones((2, 4), np.float32))
    assert [v.devices() for v in mean] == [set(m.devices.flat) for m in meshes]
    assert_same(mean, average(VALUES, [2 * v for v in VALUES]))
    assert out.devices() == set(meshes[1].devices.flat)
    jitted(on(meshes[:2], VALUES[:2]), mean, np.ones((2, 4), np.float32))
    assert len(jitted.compiled) == (1 if first == "placed" else 2)


def test_results_that_come_in_again_are_compiled_once():
    """Arrays that were placed by default come back where they were: that is no other signature."""
    meshes = submeshes(2)
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{s}", mesh=m) for s, m in enumerate(meshes)]

    @mm.jit
    def step(params, mean, x):
        for task, w in zip(tasks, params, strict=True):
            x = task(w, x)
        return [0.9 * w for w in params], average(mean, params)

    params, mean = VALUES[:2], VALUES[:2]
    for _ in range(3):
        params, mean = step(params, mean, np.ones((2, 4), np.float32))
    assert len(step.compiled) == 1
    assert [v.devices() for v in mean] == [v.devices() for v in params]
