"""Five optimizer steps leave the state that plain jit leaves, on the stages' own devices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from models import DROPOUT, MLP, MOE, TRANSFORMER, plain
from optimizing import OPTIMIZERS, ROWS, SIZE, check, run
from pipelines import SCHEDULES, Split, assert_same, gradient, submeshes

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
@pytest.mark.parametrize("name", ["clip"])
def test_four_stages(name):
    check(TRANSFORMER, OPTIMIZERS[name](), "1f1b", Split(submeshes(4, (2,))), 4)


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


@pytest.mark.longer
def test_a_global_norm_over_all_stages():
    split = Split(submeshes(4, (2,)))
    params, batch = MLP.init(4), MLP.batch(ROWS, 0)

    def norm(stage, schedule):
        def f(params, batch):
            _, grads = gradient(MLP, stage, size=SIZE, rows=ROWS, schedule=schedule)(params, batch)
            return optax.global_norm(grads), optax.global_norm(params)

        return f

    assert_same(mm.jit(norm(split, "gpipe"))(params, batch), jax.jit(norm(plain, None))(params, batch))
