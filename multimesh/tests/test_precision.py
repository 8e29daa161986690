"""bfloat16 and mixed precision.

bfloat16 keeps 8 bits of the mantissa: one rounding is a relative 2^-8 = 4e-3. XLA rounds intermediate values where a
program ends, and programs end elsewhere once a function is split, so results agree to a few roundings.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from models import MLP, MOE, TRANSFORMER, plain
from pipelines import SCHEDULES, Split, assert_at_home, assert_same, gradient, submeshes

import multimesh as mm

ROWS, SIZE = 8, 2
BFLOAT16 = 4e-2  # ten roundings


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@pytest.mark.telling("mlp-gpipe")
@pytest.mark.parametrize(
    ("model", "schedule"),
    list(itertools.product([MLP, TRANSFORMER], SCHEDULES)),
    ids=lambda x: getattr(x, "name", x),
)
def test_bfloat16(model, schedule):
    split = Split(submeshes(2, (2,)))
    params = cast(model.init(2), jnp.bfloat16)
    batch = cast(model.batch(ROWS, 0), jnp.bfloat16)
    got = mm.jit(gradient(model, split, size=SIZE, rows=ROWS, schedule=schedule))(params, batch)
    want = jax.jit(gradient(model, plain, size=SIZE, rows=ROWS, schedule=None))(params, batch)
    assert_same(got, want, rtol=BFLOAT16)


@pytest.mark.longer
@pytest.mark.parametrize("model", [MOE, pytest.param(TRANSFORMER, marks=pytest.mark.full)], ids=lambda m: m.name)
def test_mixed(model):
    """float32 parameters and optimizer, bfloat16 arithmetic inside the tasks, float32 gradients."""
    split = Split(submeshes(2, (2,)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    params, batch = model.init(2), model.batch(ROWS, 0)

    def make(stage, schedule):
        def low(loss):
            return lambda p, b: loss(cast(p, jnp.bfloat16), cast(b, jnp.bfloat16)).astype(jnp.float32)

        def step(params, state, batch):
            loss, grads = gradient(model, stage, size=SIZE, rows=ROWS, schedule=schedule, wrap=low)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        return step

    state = optimizer.init(params)
    owners = model.owners(params)
    got = mm.jit(make(split, "1f1b"))(split.place(params, owners), state, batch)
    want = jax.jit(make(plain, None))(params, state, batch)
    assert_same(got, want, rtol=BFLOAT16)
    assert_at_home(split, got[0], owners)
