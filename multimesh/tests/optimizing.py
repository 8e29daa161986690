"""Optimizer steps under a schedule and under plain jit, and what both must leave alike."""

import jax
import optax
from models import plain
from pipelines import assert_at_home, assert_same, gradient

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
    want = run(reference, model, params, optimizer.init(params))

    placed = split.place(params, owners)
    step = mm.jit(train_step(model, split, optimizer, schedule), donate_argnums=(0, 1))
    state = jax.jit(optimizer.init)(params)
    got = run(step, model, placed, state)
    assert_same(got, want)
    assert_at_home(split, got[0], owners)
    for moments in moments_of(got[1], params):
        assert_at_home(split, moments, owners)


def moments_of(state, params):
    """Every part of the optimizer's state that is shaped like the parameters."""
    tree = jax.tree.structure(params)
    return [
        part
        for part in jax.tree.leaves(state, is_leaf=lambda x: jax.tree.structure(x) == tree)
        if jax.tree.structure(part) == tree
    ]
