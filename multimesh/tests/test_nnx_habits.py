"""Flax NNX: what its users are used to works, or an error says what to write instead. Nothing is lost in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import submeshes

import multimesh as mm

nnx = pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.flax
WIDTH, ROWS, SIZE = 8, 16, 8
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


class Model(nnx.Module):
    """It counts how often it dropped, and keeps statistics of its batches."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + self.dropout(jnp.tanh(layer(x)))
        return self.norm(x)


def loss_of(model, x):
    return jnp.mean((model(x) - jnp.sin(x)) ** 2)


def both():
    model = Model()
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


def train(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return value


def test_an_object_that_a_jitted_function_changes_is_refused():
    model, optimizer = both()
    with pytest.raises(mm.UsageError, match=r"train changes Model\.\S+ of a Flax NNX object .* this change is lost"):
        mm.jit(train)(model, optimizer, X)


def test_an_object_that_a_function_only_reads_is_an_argument():
    model = Model().layers[0]
    front, _ = submeshes(2, (1,))
    actual = mm.jit(mm.task(lambda layer, x: layer(x), "layer", mesh=front))(model, X)
    np.testing.assert_allclose(actual, model(X), rtol=1e-5)


def test_a_task_that_changes_an_object_is_refused():
    front, _ = submeshes(2, (1,))
    with pytest.raises(mm.UsageError, match=r"task 'mine' changes Model\.\S+count\S* of a Flax NNX object"):
        mm.jit(mm.task(loss_of, "mine", mesh=front))(Model(), X)


@pytest.mark.parametrize("captured", [True, False])
def test_an_object_of_another_trace_is_told_with_the_users_line(captured):
    model = Model()
    loop = mm.microbatch(lambda x: loss_of(model, x) if captured else 0.0, size=SIZE)
    inside = mm.microbatch(nnx.value_and_grad(loss_of), size=SIZE, argnum=1)
    with pytest.raises(
        mm.UsageError, match=r"test_nnx_habits.py:\d+: microbatch is traced, and may not change an object"
    ):
        mm.jit(loop)(X) if captured else mm.jit(inside)(model, X)


def stepped(meshes):
    """The form that the page on any model shows: objects are merged inside, and their state is returned."""
    graph, state = nnx.split(both())

    def loss(params, x, graph, stats):
        model = nnx.merge(graph, params, stats, copy=True)
        value = loss_of(model, x)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    gradients = jax.value_and_grad(mm.pipeline(loss, meshes), has_aux=True)

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        layout, params, stats = nnx.split(model, nnx.Param, ...)

        def one(params, x, stats):
            (value, stats), grads = gradients(params, x, layout, stats)
            return stats, (value, grads)

        stats, (value, grads) = mm.microbatch(one, size=SIZE, argnum=1, carry=2, reduce="mean")(params, x, stats)
        optimizer.update(model, grads)
        nnx.update(model, stats)
        return nnx.state((model, optimizer)), value

    return state, step


@pytest.mark.longer
def test_an_optimizer_and_a_model_with_state_train_as_under_plain_jit():
    """Dropout that counts and batch statistics, in two stages: the loop hands both from one microbatch to the next."""
    state, step = stepped(submeshes(2, (1,)))
    pipelined_step, reference = mm.jit(step), jax.jit(stepped(None)[1])
    wanted_state = state
    for _ in range(3):
        state, value = pipelined_step(state, X)
        wanted_state, reference_value = reference(wanted_state, X)
        np.testing.assert_allclose(value, reference_value, rtol=1e-5)
    model, optimizer = both()
    nnx.update((model, optimizer), state)
    assert int(model.dropout.rngs.count[...]) == 3 * 4 * ROWS // SIZE
    assert int(optimizer.step[...]) == 3
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
