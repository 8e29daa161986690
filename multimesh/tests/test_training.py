"""Optimizer steps leave the state that plain jit leaves, on the stages' own devices; so does mixed precision."""

import jax
import jax.numpy as jnp
import optax
import pytest
from models import DROPOUT, MLP, MOE, TRANSFORMER, plain
from optimizing import OPTIMIZERS, ROWS, SIZE, check, run
from pipelines import SCHEDULES, Split, assert_at_home, assert_same, gradient, submeshes

import multimesh as mm


@pytest.mark.telling("mlp-gpipe")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", [MLP, TRANSFORMER, MOE], ids=lambda m: m.name)
def test_adamw(model, schedule):
    check(model, OPTIMIZERS["adamw"](), schedule, Split(submeshes(2, (2, 2))), 2)


@pytest.mark.longer
@pytest.mark.telling("clip")
@pytest.mark.parametrize("name", ["clip", "schedule", "multisteps"])
def test_optimizers(name):
    check(TRANSFORMER, OPTIMIZERS[name](), "1f1b", Split(submeshes(2, (2,))), 2)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("model", [DROPOUT, MOE], ids=lambda m: m.name)
def test_every_optimizer(model, name, schedule):
    check(model, OPTIMIZERS[name](), schedule, Split(submeshes(4, (2,))), 4)


@pytest.mark.longer
def test_dropout_key_carried_through_steps():
    """A typed PRNG key is part of the state: split on every step, folded into every row's key."""
    optimizer = optax.sgd(0.1)

    def step_of(stage, schedule):
        def step(params, key, batch):
            key, now = jax.random.split(key)
            rows = jax.random.split(now, ROWS)
            _, grads = gradient(DROPOUT, stage, size=SIZE, rows=ROWS, schedule=schedule)(params, batch | {"key": rows})
            return optax.apply_updates(params, optimizer.update(grads, optimizer.init(params))[0]), key, jnp.float32(0)

        return step

    split = Split(submeshes(2, (2,)))
    params = DROPOUT.init(2)
    want = run(jax.jit(step_of(plain, None)), DROPOUT, params, jax.random.key(3))
    got = run(mm.jit(step_of(split, "1f1b")), DROPOUT, params, jax.random.key(3))
    assert_same(got, want)


BFLOAT16 = 4e-2  # ten roundings of 2**-8: programs end elsewhere once a function is split, and round there


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


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
