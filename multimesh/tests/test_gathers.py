"""Sharded weights are gathered as often as the program says: in every microbatch, or once before the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.observe.kernel_text import read_kernel
from multimesh.passes.pipeline import PASSES
from pipelines import submeshes

import multimesh as mm

WIDTH, LAYERS, ROWS, MICROBATCHES = 16, 4, 128, 4  # a microbatch is larger than a weight: else XLA gathers the rows
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SIZE = 4 * WIDTH * WIDTH  # bytes of the weights of a layer


def loss(weights, x, place):
    for n, w in enumerate(weights):
        x = place(n, lambda w, x: jnp.tanh(x @ w))(w, x)
    return place(LAYERS - 1, lambda x: jnp.sum(x**2))(x)


def steps(meshes, schedule, gather_once, rows=ROWS):
    def place(n, fn):
        return mm.task(fn, mesh=meshes[n % 2])

    def laid(spec):
        return lambda n, w: place(n, lambda w: lax.with_sharding_constraint(w, spec))(w)

    def step(weights, x):
        gathered = [laid(P())(n, w) for n, w in enumerate(weights)] if gather_once else weights
        total, grads = mm.microbatch(
            lambda rows: jax.value_and_grad(loss)(gathered, rows[0], place),
            size=rows // MICROBATCHES, schedule=schedule,
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
        value, updated = compiled(weights, rows)
        np.testing.assert_allclose(value, total, rtol=1e-6)
        for new, w, g in zip(updated, values, grads, strict=True):
            assert new.sharding.spec == P("fsdp")
            np.testing.assert_allclose(new, w - 0.1 * g, rtol=1e-5, atol=1e-6)
    assert gathered[1] == LAYERS * SIZE
    assert gathered[0] >= MICROBATCHES * gathered[1]
    assert LAYERS * SIZE <= reduced[1] < LAYERS * SIZE + SIZE  # gradients, and the loss
    assert reduced[0] >= (MICROBATCHES - 1) * reduced[1]


def test_a_stage_that_goes_forward_and_back_gathers_a_weight_once():
    """One that is scaled before both products: the joined kernel scales it once, too."""
    meshes = [Mesh(m.devices.reshape(-1), ("fsdp",)) for m in submeshes(2, (2,))]

    def loss(weights, x):
        x = mm.task(lambda w, x: jnp.tanh(x @ w), "front", mesh=meshes[0])(weights[0], x)
        return mm.task(lambda w, x: jnp.sum((x @ (w * 2)) ** 2), "back", mesh=meshes[1])(weights[1], x)

    layouts = [NamedSharding(mesh, P("fsdp")) for mesh in meshes]
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32", sharding=layout) for layout in layouts]
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32", sharding=layouts[0])
    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=ROWS // MICROBATCHES, schedule="1f1b")
    compiled = mm.jit(step).lower(weights, x).compile()
    programs = zip(compiled.plan.kernels, compiled.collectives(), strict=True)
    (last,) = (collectives for kernel, collectives in programs if kernel.name == "B1.back")
    arrays = [shape for collective in last if collective.kind == "all-gather" for _, shape in collective.arrays]
    assert arrays == [(WIDTH, WIDTH)]


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    (mesh,) = submeshes(1, (2,))
    axis = mesh.axis_names[0]

    def scanned(weights, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    weights = jax.device_put(jnp.ones((3, 8, 8)), NamedSharding(mesh, P(None, axis)))
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P(axis)))
    text = jax.jit(scanned).lower(weights, x).compile().as_text()
    assert read_kernel(text).costs["all-gather"] == 3 * 4 * 8 * 8
    assert not any(read_kernel("").costs.values())


def attention_and_mlp(layout, weights, x):
    """Products of query, key and value, and of gate and up, of an activation whose tokens the devices share."""
    query, key, value, out, gate, up, down = weights
    tokens, features = layout(None, "model"), layout(None, None, "model")
    x = lax.with_sharding_constraint(x, tokens)
    heads = [lax.with_sharding_constraint(x @ w, features) for w in (query, key, value)]
    x = lax.with_sharding_constraint(x + (heads[0] * jnp.tanh(heads[1]) + heads[2]) @ out, tokens)
    wide = [lax.with_sharding_constraint(x @ w, features) for w in (gate, up)]
    return lax.with_sharding_constraint(x + (jnp.tanh(wide[0]) * wide[1]) @ down, tokens)


def layer(devices, backward):
    """The function in one task and as plain JAX, and the types of its arguments."""
    mesh = Mesh(np.array(devices), ("model",))
    columns, rows = (NamedSharding(mesh, P(*spec)) for spec in ((None, "model"), ("model", None)))
    weights = [
        jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32", sharding=rows if n in (3, 6) else columns) for n in range(7)
    ]

    def loss(layout, weights, x):
        return jnp.sum(attention_and_mlp(layout, weights, x) ** 2)

    def reference(weights, x):
        return loss(lambda *spec: NamedSharding(mesh, P(*spec)), weights, x)

    def task(weights, x):
        return mm.task(lambda weights, x: loss(P, weights, x), "layer", mesh=mesh)(weights, x)

    fns = [jax.grad(fn, argnums=(0, 1)) if backward else fn for fn in (task, reference)]
    return fns, (weights, jax.ShapeDtypeStruct((1, 64, WIDTH), "float32", sharding=NamedSharding(mesh, P())))


@pytest.mark.parametrize("backward", [False, True])
def test_a_shared_gather_changes_no_value(backward):
    fns, types = layer(jax.devices()[:4], backward)
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype("f") / 4, x.sharding), types)
    assert any(
        op.prim.name == "sharding_constraint" for kernel in mm.jit(fns[0]).plan(*types).kernels for op in kernel.ops
    )
    for a, b in zip(*(jax.tree.leaves(jit(fn)(*arrays)) for jit, fn in zip((mm.jit, jax.jit), fns)), strict=True):  # noqa: B905
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.compile_gpu
@pytest.mark.parametrize("shared", [False, True])
def test_an_activation_that_several_products_read_is_gathered_once(monkeypatch, shared):
    """XLA gathers it for each where a device has one row; without the pass a finding says so."""
    if not shared:
        monkeypatch.setitem(PASSES, "share_gathers", lambda plan, _: plan)
    mesh = Mesh(np.array(mm.topology("h100", gpus=4)), ("model",))

    def products(weights, x):
        x = lax.with_sharding_constraint(jnp.tanh(x), P(None, "model"))
        return [lax.with_sharding_constraint(x @ w, P(None, None, "model")) for w in weights]

    w = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), "bfloat16", sharding=NamedSharding(mesh, P(None, "model")))
    x = jax.ShapeDtypeStruct((1, 32, WIDTH), "bfloat16", sharding=NamedSharding(mesh, P(None, "model")))
    compiled = mm.jit(mm.task(products, "products", mesh=mesh)).lower([w] * 3, x).compile()
    ((gather,),) = compiled.collectives()
    assert len(gather.arrays) == (1 if shared else 3)
    texts = [fault.text for fault in compiled.inspect(least=0) if fault.rule == "gathered-again"]
    assert len(texts) == (not shared)
    assert all("gathers the value bf16[32,16] 3 times along 'model'" in text for text in texts)


@pytest.mark.compile_gpu
@pytest.mark.parametrize("rows", [None, "fsdp"])
def test_a_shared_gather_makes_no_exchange_larger(monkeypatch, rows):
    """The layer's weights lie over both axes of a mesh, at widths of a llama, its tokens over one of them."""
    mesh = Mesh(np.array(mm.topology("h100", gpus=4)).reshape(2, 2), ("fsdp", "model"))

    def loss(weights, x):
        layout = lambda *spec: NamedSharding(mesh, P(rows, *spec[1:]))  # noqa: E731
        return jnp.sum(attention_and_mlp(layout, weights, x).astype("float32") ** 2)

    shapes = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
    weights = [
        jax.ShapeDtypeStruct(
            s, "bfloat16", sharding=NamedSharding(mesh, P(*("fsdp", "model")[:: -1 if n in (3, 6) else 1]))
        )
        for n, s in enumerate(shapes)
    ]
    x = jax.ShapeDtypeStruct((8, 2048, 4096), "bfloat16", sharding=NamedSharding(mesh, P(rows)))
    sizes = []
    for _ in range(2):
        step = mm.jit(jax.grad(mm.task(loss, "layer", mesh=mesh), argnums=(0, 1)))
        (cost,) = step.lower(weights, x).compile().cost_analysis()
        sizes.append(sum(cost[kind] for kind in COLLECTIVES))
        monkeypatch.setitem(PASSES, "share_gathers", lambda plan, _: plan)
    assert sizes[0] < 0.97 * sizes[1]
