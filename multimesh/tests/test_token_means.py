"""The mean over tokens: sums of losses and of tokens, divided once. The mean over microbatches is another number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import assert_same, submeshes

import multimesh as mm

COUNT, SIZE, LENGTH, WIDTH = 4, 2, 8, 16
MESHES = submeshes(2, (2,))


def sums(on, params, batch):
    """Sum of the losses over the tokens of a microbatch, and their number."""
    x = batch["x"]
    for n, w in enumerate(params):
        x = on(n, lambda w, x: jnp.tanh(x @ w))(w, x)
    losses = jnp.mean((x - batch["x"]) ** 2, axis=-1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def batches(padded):
    """Rows with as many tokens as their number says; those of one microbatch may be nothing but padding."""
    draw = np.random.default_rng(0)
    mask = (np.arange(LENGTH) < draw.integers(1, LENGTH, (COUNT * SIZE, 1))).astype(np.float32)
    mask[1::COUNT] *= not padded
    params = [draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in MESHES]
    return params, {"x": draw.normal(size=(COUNT * SIZE, LENGTH, WIDTH)).astype(np.float32), "mask": mask}


def divided_once(sums, loop):
    def one(params, batch):
        (total, tokens), grads = jax.value_and_grad(sums, has_aux=True)(params, batch)
        return total, tokens, grads

    def step(params, batch):
        total, tokens, grads = loop(one)(params, batch)
        return total / tokens, jax.tree.map(lambda g: g / tokens, grads)

    return step


def loss_of_sums(sums, loop):
    def loss(params, batch):
        total, tokens = loop(sums)(params, batch)
        return total / tokens

    return jax.value_and_grad(loss)


def placed(n, fn):
    return mm.task(fn, f"stage{n}", mesh=MESHES[n])


@pytest.mark.telling(
    "divided_once-1f1b-False",
    "loss_of_sums-1f1b-True",
    "loss_of_sums-zb-h1-False",
    "divided_once-zb-h1-True",
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.longer)])
@pytest.mark.parametrize("make", [divided_once, loss_of_sums])
def test_sums_divided_once_are_the_mean_over_tokens(make, schedule, padded):
    args = batches(padded)
    loop = functools.partial(mm.microbatch, size=SIZE, argnum=1, schedule=schedule)
    got = mm.jit(make(functools.partial(sums, placed), loop))(*args)
    assert_same(got, jax.jit(make(functools.partial(sums, lambda n, fn: fn), lambda fn: fn))(*args))


@pytest.mark.telling("True")
@pytest.mark.parametrize("padded", [False, True])
def test_the_mean_over_microbatches_is_not(padded):
    args = batches(padded)

    def mean(params, batch):
        total, tokens = sums(placed, params, batch)
        return total / tokens

    naive = mm.jit(mm.microbatch(jax.value_and_grad(mean), size=SIZE, argnum=1, reduce="mean"))(*args)
    right, _ = jax.jit(divided_once(functools.partial(sums, lambda n, fn: fn), lambda fn: fn))(*args)
    assert np.isnan(naive[0]) if padded else abs(naive[0] / right - 1) > 0.01
