"""Gradients are summed over data-parallel devices once, after the loop, wherever that needs no more memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, microbatched, submeshes

import multimesh as mm

MESHES = submeshes(2, (2, 2))
WIDTH, VOCAB, ROWS, SIZE = 8, 6, 16, 4


def front(w, tokens):
    x = w["table"][tokens]
    x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * w["gain"]
    return jnp.tanh(x @ w["up"] + w["bias"])


def back(w, h, y):
    return jnp.mean((jnp.einsum("btd,dhk->bthk", h, w["heads"]).sum((1, 2, 3)) - y) ** 2)


def arguments(dtype=np.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 3, dtype)

    weights = {"table": normal(VOCAB, WIDTH), "gain": normal(WIDTH), "up": normal(WIDTH, WIDTH), "bias": normal(WIDTH)}
    batch = {"x": rng.integers(0, VOCAB, (ROWS, 3)).astype(np.int32), "y": normal(ROWS)}
    return {"front": weights, "back": {"heads": normal(WIDTH, 2, 4)}}, batch


def loss(params, batch, task=lambda fn, name, mesh: fn):
    h = task(front, "front", mesh=MESHES[0])(params["front"], batch["x"])
    return task(back, "back", mesh=MESHES[1])(params["back"], h, batch["y"])


def pipelined_loss(params, batch):
    return loss(params, batch, mm.task)


def place(params, batch, *, rows=("data",)):
    """Parameters, replicated, and batch where they belong."""
    layouts = {"front": NamedSharding(MESHES[0], P()), "back": NamedSharding(MESHES[1], P())}
    data = {"x": NamedSharding(MESHES[0], P(rows)), "y": NamedSharding(MESHES[1], P(rows))}
    return jax.device_put(params, layouts), jax.device_put(batch, data)


def step(fn=pipelined_loss, schedule="1f1b"):
    return mm.jit(mm.microbatch(jax.value_and_grad(fn), argnum=1, size=SIZE, schedule=schedule))


def reference(fn=loss):
    return jax.jit(microbatched(jax.value_and_grad(fn), argnum=1, size=SIZE))(*arguments())


def reduces(step, *args):
    """Return the number of all-reduces in the programs of the loop, and in those after it."""
    compiled = step.prepare(*args)
    counts = {True: 0, False: 0}
    for kernel, program in zip(compiled.plan.kernels, compiled.compiled_plan.executables, strict=True):
        counts[kernel.name[1].isdigit()] += program.as_text().count(" all-reduce(")
    return counts[True], counts[False]


@pytest.mark.telling("zb-h1")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "wavefront"])
def test_once_after_the_loop(schedule):
    """A matrix, an embedding, a norm's gain, a bias, heads and the loss are not reduced in the loop."""
    f = step(schedule=schedule)
    args = place(*arguments())
    assert_same(f(*args), reference())
    assert reduces(f, *args) == (0, 2)
    assert len(f.plan(*args).over) == 6


@pytest.mark.longer
@pytest.mark.telling("1f1b-True", "zb-h1-False")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_sums_of_bfloat16_in_more_bits_are_reduced_once(inside, schedule):
    """The loop adds gradients of bfloat16 in float32: the cast, which is no part of a backward pass, hides nothing."""

    def loop(fn):
        return mm.microbatch(fn, argnum=1, size=SIZE, schedule=schedule, accumulate="float32")

    f = mm.jit(loop(jax.value_and_grad(pipelined_loss)) if inside else jax.value_and_grad(loop(pipelined_loss)))
    args = place(*arguments("bfloat16"))
    count, _ = reduces(f, *args)
    assert count == 1  # the loss, which `back` itself rounds to bfloat16
    expected = jax.jit(microbatched(jax.value_and_grad(loss), argnum=1, size=SIZE))(*arguments())
    for actual, exact in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(actual, "float32"), exact, rtol=0.1, atol=0.05 * np.abs(exact).max())


def test_accumulators_need_no_more_memory():
    args = place(*arguments())
    plan = step().plan(*args)
    for slot in plan.over:
        shard_shape = plan.layout(slot, P()).shard_shape(plan.slots[slot].shape)
        assert shard_shape == (1, *plan.slots[slot].shape[1:])


def test_weights_laid_out_over_the_same_axis_are_left_alone():
    """Fully sharded: the gradient is scattered as it is made, and a term of its own would be the whole gradient."""
    args = place(*arguments())
    params = jax.device_put(args[0], {k: NamedSharding(m, P("data")) for k, m in zip(args[0], MESHES, strict=True)})
    f = step()
    assert not f.plan(params, args[1]).over
    assert_same(f(params, args[1]), reference())


def test_an_axis_of_weights_beside_one_of_rows():
    """Rows over both axes, weights over one of them: only the other waits for the end of the loop."""
    params, batch = place(*arguments(), rows=("data", "model"))
    params["front"]["up"] = jax.device_put(params["front"]["up"], NamedSharding(MESHES[0], P("model")))
    f = step()
    plan = f.plan(params, batch)
    assert {axes for slot, axes in plan.over.items() if plan.slots[slot].submesh == 0} == {("data",)}
    assert {axes for slot, axes in plan.over.items() if plan.slots[slot].submesh == 1} == {("data", "model")}
    assert_same(f(params, batch), reference())


def test_replicated_rows_have_nothing_to_reduce():
    args = place(*arguments(), rows=())
    f = step()
    assert not f.plan(*args).over
    assert_same(f(*args), reference())


def test_a_constraint_lays_rows_out_as_well():
    """Nothing is said of the arguments; the model constrains its activations."""

    def constrained(params, batch):
        def first(w, tokens):
            return front(w, mm.with_sharding_constraint(tokens, P("data")))

        h = mm.task(first, "front", mesh=MESHES[0])(params["front"], batch["x"])
        return mm.task(back, "back", mesh=MESHES[1])(params["back"], h, batch["y"])

    f = step(constrained)
    args = arguments()
    assert {f.plan(*args).slots[slot].submesh for slot in f.plan(*args).over} == {0, 1}
    assert_same(f(*args), reference())


def test_a_gradient_that_something_else_reads_is_reduced_where_it_is_read():
    """The norm of every microbatch's gradient needs the whole gradient in every microbatch."""

    def with_norm(params, batch, fn):
        value, grads = jax.value_and_grad(fn)(params, batch)
        return value, grads, jnp.sum(grads["front"]["up"] ** 2)

    f = mm.jit(mm.microbatch(lambda p, b: with_norm(p, b, pipelined_loss), argnum=1, size=SIZE))
    args = place(*arguments())
    plan = f.plan(*args)
    assert (2, WIDTH, WIDTH) not in {plan.slots[slot].shape for slot in plan.over}
    expected = jax.jit(microbatched(lambda p, b: with_norm(p, b, loss), argnum=1, size=SIZE))(*arguments())
    assert_same(f(*args), expected)


def test_sums_that_are_no_gradients():
    """Counts have terms; a maximum that is summed over microbatches has none, nor has a sum that is narrowed then."""

    def measured(x):
        def inside(x):
            return jnp.sum(x > 0), jnp.max(x), jnp.sum(x.astype(jnp.bfloat16))

        return mm.task(inside, "only", mesh=MESHES[0])(x)

    x = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4) - 9
    f = mm.jit(mm.microbatch(measured, argnum=0, size=SIZE))
    array = jax.device_put(x, NamedSharding(MESHES[0], P("data")))
    count, most, total = f(array)
    parts = [x[k :: ROWS // SIZE] for k in range(ROWS // SIZE)]
    assert (int(count), float(most)) == (int((x > 0).sum()), sum(float(p.max()) for p in parts))
    assert (count.dtype, total.dtype) == (jnp.int32, jnp.bfloat16)
    np.testing.assert_allclose(float(total), x.sum(), rtol=2e-2)
    assert len(f.plan(array).over) == 1


def test_a_weight_of_two_stages():
    """Tied: each submesh sums its own terms; then both are added."""

    def tied(params, batch, task=lambda fn, name, mesh: fn):
        h = task(lambda w, x: jnp.tanh(w["table"][x]), "front", mesh=MESHES[0])(params["front"], batch["x"])
        logits = task(lambda w, h: h @ w["table"].T, "back", mesh=MESHES[1])(params["front"], h)
        return task(lambda z, y: jnp.mean((z.sum((1, 2)) - y) ** 2), "back", mesh=MESHES[1])(logits, batch["y"])

    f = step(lambda p, b: tied(p, b, mm.task))
    args = place(*arguments())
    plan = f.plan(*args)
    assert sorted(plan.slots[s].submesh for s in plan.over if plan.slots[s].shape == (2, VOCAB, WIDTH)) == [0, 1]
    assert_same(f(*args), reference(tied))


def layer(w, x):
    return x + jnp.tanh(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)


def repeat_layers(form):
    """Return a model of four layers, whose parameters are stacks, with a gain that each layer reads."""

    def fn(params, x):
        x, gain = x.astype(jnp.bfloat16 if form == "bfloat16" else x.dtype), params["gain"]
        run = jax.checkpoint(layer) if form == "checkpoint" else layer
        if form == "list":
            for number in range(4):
                x = run(jax.tree.map(lambda a, n=number: a[n], params["layers"]), gain.astype(x.dtype) * x)
        else:
            one = lambda x, w: (run(w, gain.astype(x.dtype) * x), x.mean())  # noqa: E731
            x, _ = jax.lax.scan(one, x, params["layers"], reverse=form == "reverse")
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return fn


@pytest.mark.longer
@pytest.mark.telling("bfloat16")
@pytest.mark.parametrize("form", ["scan", "reverse", "checkpoint", "bfloat16"])
def test_layers_of_a_scan_are_summed_once_as_those_of_a_list_are(form):
    rng = np.random.default_rng(0)
    weights = {name: np.float32(rng.normal(size=(4, WIDTH, WIDTH)) / 3) for name in ("up", "down")}
    params, rows = {"layers": weights, "gain": np.float32(1.1)}, np.float32(rng.normal(size=(ROWS, WIDTH)))
    batch = jax.device_put(rows, NamedSharding(MESHES[0], P("data")))

    def grads(form):
        return mm.jit(mm.microbatch(jax.value_and_grad(mm.pipeline(repeat_layers(form), MESHES)), argnum=1, size=SIZE))

    expected = jax.jit(microbatched(jax.value_and_grad(repeat_layers(form)), argnum=1, size=SIZE))(params, rows)
    assert_same(grads(form)(params, batch), expected, rtol=2e-2 if form == "bfloat16" else 1e-5)
    in_loop, once = reduces(grads(form), params, batch)
    assert in_loop == reduces(grads("list"), params, batch)[0]  # those of the gain, which all layers read
    assert once
