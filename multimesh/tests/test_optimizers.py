"""Optimizer steps leave the state that plain jit leaves, on the stages' own devices; so does mixed precision."""

import jax
import jax.numpy as jnp
import optax
import pytest
from models import DROPOUT, MLP, MOE, TRANSFORMER, plain
from pipelines import SCHEDULES, Split, assert_at_home, assert_same, gradient, submeshes

import multimesh as mm

ROWS, SIZE, STEPS = 8, 2, 5

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3, eps=1e-4),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-4)),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 5), eps=1e-4),
    "multisteps": lambda: optax.MultiSteps(optax.adamw(1e-3, eps=1e-4), every_k_schedule=2).gradient_transformation(),
}


def train_step(model, stage, optimizer, schedule):
    grads_of = gradient(model, stage, size=SIZE, rows=ROWS, schedule=schedule)

    def step(params, state, batch):
        loss, grads = grads_of(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def run(step, model, params, state):
    losses = []
    for i in range(STEPS):
        params, state, loss = step(params, state, model.batch(ROWS, i))
        losses.append(loss)
    return params, state, losses


def state_owners(optimizer, state, params, owners):
    """The moments of a parameter belong where the parameter does; counters may lie on any one submesh."""
    return optax.tree_map_params(
        optimizer, lambda _, o: o, state, jax.tree.map(lambda _, o: Owner(o), params, owners), transform_non_params=None
    )


class Owner(tuple):
    """A tuple of stages that is one leaf."""


jax.tree_util.register_pytree_node(Owner, lambda o: ((), tuple(o)), lambda aux, _: Owner(aux))


def check(model, optimizer, schedule, split, stages):
    params = model.init(stages)
    owners = model.owners(params)
    reference = jax.jit(train_step(model, plain, optimizer, None))
    expected = run(reference, model, params, optimizer.init(params))

    placed = split.place(params, owners)
    step = mm.jit(train_step(model, split, optimizer, schedule), donate_argnums=(0, 1))
    state = jax.jit(optimizer.init)(params)
    actual = run(step, model, placed, state)
    assert_same(actual, expected)
    assert_at_home(split, actual[0], owners)
    for moments in moments_of(actual[1], params):
        assert_at_home(split, moments, owners)


def moments_of(state, params):
    """Every part of the optimizer's state that is shaped like the parameters."""
    tree = jax.tree.structure(params)
    return [
        part
        for part in jax.tree.leaves(state, is_leaf=lambda x: jax.tree.structure(x) == tree)
        if jax.tree.structure(part) == tree
    ]


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
    expected = run(jax.jit(step_of(plain, None)), DROPOUT, params, jax.random.key(3))
    actual = run(mm.jit(step_of(split, "1f1b")), DROPOUT, params, jax.random.key(3))
    assert_same(actual, expected)


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
    actual = mm.jit(make(split, "1f1b"))(split.place(params, owners), state, batch)
    expected = jax.jit(make(plain, None))(params, state, batch)
    assert_same(actual, expected, rtol=BFLOAT16)
    assert_at_home(split, actual[0], owners)
