"""Gradients inside of stages, differentiated again: forces, gradient penalties, residuals of equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import FORMS, Split, assert_same, scopes, submeshes

import multimesh as mm

WEIGHTS = list(np.random.default_rng(0).normal(size=(4, 4, 4)).astype(np.float32))
X = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
ORDERS = {"1f1b": {"F0", "B0", "B1"}, "gpipe": {"F0", "F1", "B0", "B1"}, "zb-h1": {"F0", "B0", "B1", "W1"}}


def block(w, x):
    """A stage with a force: the gradient of an energy by positions."""
    return jnp.tanh(x @ w) + jax.grad(lambda y: jnp.sin(y @ w).sum())(x)


def energy(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.square(x).sum()


def of_blocks(weights, x):
    for w in weights:
        x = block(w, x)
    return jnp.square(x).sum()


def of_forces(weights, x):
    """The loss of a potential: of its forces, through the whole model, and of its energy."""
    return jnp.square(jax.grad(energy, argnums=1)(weights, x)).sum() + energy(weights, x)


def loop_of(loss, schedule, where):
    if where == "inside":
        return mm.microbatch(jax.value_and_grad(loss), size=2, argnum=1, schedule=schedule)
    return jax.value_and_grad(mm.microbatch(loss, size=2, argnum=1, schedule=schedule))


def cells(plan):
    return {f"{run.cell.phase}{run.cell.stage}" for run in plan.runs if run.cell}


@pytest.mark.telling("inside-context-1f1b", "outside-scope-gpipe", "inside-context-zb-h1")
@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_every_form_of_a_task(where, form, schedule):
    split = Split(submeshes(2), form)

    def loss(weights, x):
        x = split(0, block)(weights[0], x)
        return split(1, lambda w, x: jnp.square(block(w, x)).sum())(weights[1], x)

    step = mm.jit(loop_of(loss, schedule, where))
    with scopes(split, 2):
        assert cells(step.plan(WEIGHTS[:2], X)) == ORDERS[schedule]
        loss_and_grads = step(WEIGHTS[:2], X)
    assert_same(loss_and_grads, jax.jit(jax.value_and_grad(of_blocks))(WEIGHTS[:2], X))
    for stage, g in enumerate(loss_and_grads[1]):
        assert g.devices() == split.devices(stage)


@pytest.mark.telling("inside-of_blocks-1f1b", "outside-of_forces-zb-h1")
@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("loss", [of_blocks, of_forces], ids=lambda f: f.__name__)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_loss_without_marks(where, loss, schedule):
    step = mm.jit(loop_of(mm.pipeline(loss, submeshes(2)), schedule, where))
    shared = {"F1"} if loss is of_blocks else set()  # the block that both stages have is no part of the joined kernel
    assert cells(step.plan(WEIGHTS, X)) == ORDERS[schedule] | shared
    assert_same(step(WEIGHTS, X), jax.jit(jax.value_and_grad(loss))(WEIGHTS, X))


@pytest.mark.parametrize("loss", [energy, of_forces], ids=lambda f: f.__name__)
def test_a_train_step_without_marks(loss):
    """Its own backward pass goes back through the stages; a gradient inside of its loss is a part of the forward."""
    step = mm.jit(
        mm.microbatch(mm.pipeline(jax.value_and_grad(loss), submeshes(2)), size=2, argnum=1, schedule="gpipe")
    )
    assert cells(step.plan(WEIGHTS, X)) == ORDERS["gpipe"]
    assert_same(step(WEIGHTS, X), jax.jit(jax.value_and_grad(loss))(WEIGHTS, X))
