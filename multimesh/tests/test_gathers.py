"""Sharded weights are gathered as often as the program says: in every microbatch, or once before the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.observe.collectives import collective_bytes
from multimesh.observe.kernel_text import read_kernel
from pipelines import submeshes

import multimesh as mm

WIDTH, LAYERS, ROWS, MICROBATCHES = 16, 4, 128, 4  # a microbatch is larger than a weight: else XLA gathers the rows
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SIZE = 4 * WIDTH * WIDTH  # bytes of the weights of a layer


def loss(weights, x, place):
    for n, w in enumerate(weights):
        x = place(n, lambda w, x: jnp.tanh(x @ w))(w, x)
    return place(LAYERS - 1, lambda x: jnp.sum(x**2))(x)


def steps(meshes, schedule, once, rows=ROWS):
    def place(n, fn):
        return mm.task(fn, mesh=meshes[n % 2])

    def laid(spec):
        return lambda n, w: place(n, lambda w: lax.with_sharding_constraint(w, spec))(w)

    def step(weights, x):
        used = [laid(P())(n, w) for n, w in enumerate(weights)] if once else weights
        total, grads = mm.microbatch(
            lambda rows: jax.value_and_grad(loss)(used, rows[0], place),
            size=rows // MICROBATCHES, schedule=schedule, interleave=2,
        )((x,))  # fmt: skip
        grads = [laid(P("fsdp"))(n, g) for n, g in enumerate(grads)]
        return total, [place(n, lambda w, g: w - 0.1 * g)(w, g) for n, (w, g) in enumerate(zip(weights, grads))]  # noqa: B905

    return step


@pytest.mark.telling("looped-bfs")
@pytest.mark.parametrize("schedule", ["looped-bfs", "interleaved"])
def test_weights_that_are_gathered_before_the_loop_are_gathered_once(schedule):
    """Their gradients are then summed in whole terms, each on its device, and reduced once."""
    meshes = [Mesh(m.devices.reshape(-1), ("fsdp",)) for m in submeshes(2, (2,))]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(LAYERS)]
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    total, grads = jax.jit(jax.value_and_grad(lambda ws: loss(ws, x, lambda _, fn: fn)))(values)
    gathered, reduced = [], []
    for once in (False, True):
        weights = [jax.device_put(w, NamedSharding(meshes[n % 2], P("fsdp"))) for n, w in enumerate(values)]
        rows = jax.device_put(x, NamedSharding(meshes[0], P("fsdp")))
        compiled = mm.jit(steps(meshes, schedule, once), donate_argnums=0).lower(weights, rows).compile()
        costs = compiled.cost_analysis()
        gathered.append(sum(cost["all-gather"] for cost in costs))
        reduced.append(sum(cost["all-reduce"] for cost in costs))
        found, made = compiled(weights, rows)
        np.testing.assert_allclose(found, total, rtol=1e-6)
        for new, w, g in zip(made, values, grads, strict=True):
            assert new.sharding.spec == P("fsdp")
            np.testing.assert_allclose(new, w - 0.1 * g, rtol=1e-5, atol=1e-6)
    assert gathered[1] == LAYERS * SIZE
    assert gathered[0] >= MICROBATCHES * gathered[1]
    assert LAYERS * SIZE <= reduced[1] < LAYERS * SIZE + SIZE  # gradients, and the loss
    assert reduced[0] >= (MICROBATCHES - 1) * reduced[1]


def test_of_weights_and_rows_the_smaller_are_gathered():
    """Rows at most as large as a weight are gathered in its place, so that fewer bytes move; a weight has one size."""
    meshes = [Mesh(m.devices.reshape(-1), ("fsdp",)) for m in submeshes(2, (2,))]
    moved = {}
    for count in (16, 64, 128):
        weights = [
            jax.device_put(jnp.ones((WIDTH, WIDTH)), NamedSharding(meshes[n % 2], P("fsdp"))) for n in range(LAYERS)
        ]
        rows = jax.device_put(jnp.ones((count, WIDTH)), NamedSharding(meshes[0], P("fsdp")))
        compiled = mm.jit(steps(meshes, "looped-bfs", False, count)).lower(weights, rows).compile()
        moved[count] = sum(cost[name] for cost in compiled.cost_analysis() for name in COLLECTIVES)
    assert moved[16] < 0.7 * moved[64]
    assert moved[64] == moved[128]


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    (mesh,) = submeshes(1, (2,))
    axis = mesh.axis_names[0]

    def scanned(weights, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    weights = jax.device_put(jnp.ones((3, 8, 8)), NamedSharding(mesh, P(None, axis)))
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P(axis)))
    text = jax.jit(scanned).lower(weights, x).compile().as_text()
    assert collective_bytes(read_kernel(text).collectives) == {"all-gather": 3 * 4 * 8 * 8}
    assert collective_bytes(read_kernel("").collectives) == {}
