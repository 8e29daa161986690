"""States that microbatches hand on (``carry=``), in containers that can't be compared or built from anything."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import Split, both, submeshes

import multimesh as mm

SIZE, COUNT, WIDTH = 4, 4, 8
SPLIT = Split(submeshes(2, (1,)))
ROWS = np.random.default_rng(0).normal(size=(SIZE * COUNT, WIDTH)).astype(np.float32)

pytestmark = pytest.mark.flax


class Net(eqx.Module):
    """Two layers with a batch norm between them."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        one, other = jax.random.split(key)
        self.first = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=one)  # of which a norm loses all
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="rows", mode="batch")
        self.last = eqx.nn.Linear(WIDTH, 3, key=other)


@pytest.mark.longer
@pytest.mark.telling("1f1b", "auto")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "auto"])
def test_a_state_of_equinox_is_handed_on(schedule):
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def make(on, loop):
        def begin(model, x, state):
            def one(x, state):
                return model.norm(model.first(x), state)

            return jax.vmap(one, in_axes=(0, None), out_axes=(0, None), axis_name="rows")(x, state)

        def body(params, x, state):
            def loss(params):
                model = eqx.combine(params, static)
                h, new = on(0, begin)(model, x, state)
                return jnp.mean(on(1, lambda model, h: jax.vmap(model.last)(jnp.tanh(h)))(model, h) ** 2), new

            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return new, (value, grads)

        return loop(body, size=SIZE, argnum=1, carry=2)

    new, _ = both(make, params, ROWS, state, split=SPLIT, schedule=schedule)
    assert {frozenset(x.devices()) for x in jax.tree.leaves(new)} == {frozenset(SPLIT.devices(0))}


@jax.tree_util.register_pytree_node_class
class Sealed:
    """A container that refuses to be compared, and to hold what is no array."""

    def __init__(self, mean):
        assert hasattr(mean, "shape") or type(mean) is object, f"built from {mean!r}"
        self.mean = mean

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("compared")

    def tree_flatten(self):
        return (self.mean,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def move_state(on, loop, returned=lambda new: new, **options):
    """A loop whose second stage keeps a moving average; ``returned`` is done to the new state."""

    def body(w, x, state):
        y = on(0, lambda w, x: jnp.tanh(x @ w))(w, x)
        new = on(1, lambda state, y: Sealed(0.5 * state.mean + y.mean(0)))(state, y)
        return returned(new), (y.sum(0), Sealed(y[0]))

    return loop(body, size=SIZE, argnum=1, carry=2, **options)


W = np.eye(WIDTH, dtype=np.float32)


def test_containers_are_neither_compared_nor_built_by_the_way():
    actual = both(move_state, W, ROWS, Sealed(jnp.zeros(WIDTH)), split=SPLIT)
    assert isinstance(actual[0], Sealed)
    stack = lambda fn, **options: mm.microbatch(fn, reduce=("mean", "stack"), **options)  # noqa: E731
    _, (_, rows) = mm.jit(move_state(SPLIT, stack))(W, ROWS, Sealed(jnp.zeros(WIDTH)))
    assert rows.mean.shape == (COUNT, WIDTH)


@pytest.mark.parametrize("disable", [False, True])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda new: Sealed(new.mean.astype(jnp.bfloat16)), r"state.* goes in as float32\[8\] and comes out as bf"),
        (lambda new: Sealed(new.mean[:3]), r"state.* goes in as float32\[8\] and comes out as float32\[3\]"),
        (lambda new: (new.mean, new.mean), r"state.* as nothing"),
        (lambda new: {"more": new, "other": new.mean}, r"state.* goes in as float32\[8\] and comes out as nothing"),
        (lambda new: (), r"state.* goes in as float32\[8\] and comes out as nothing"),
    ],
)
def test_the_first_leaf_that_differs_is_named(returned, message, disable):
    step = mm.jit(move_state(SPLIT, mm.microbatch, returned))
    with jax.disable_jit(disable), pytest.raises(mm.UsageError, match=message):
        step(W, ROWS, Sealed(jnp.zeros(WIDTH)))
