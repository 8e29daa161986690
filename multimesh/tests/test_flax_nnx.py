"""Flax NNX modules: NNX names no scopes, so a module names those that tasks are registered for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import Split, assert_at_home, assert_same, microbatched, submeshes

import multimesh as mm

nnx = pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.flax

WIDTH, ROWS, SIZE, LAYERS = 16, 8, 2, 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layers_{i}"):
                x = layer(x)
        with jax.named_scope("head"):
            return self.head(x)


def batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1, keepdims=True))}


def step_of(graph, loop):
    def loss(params, b):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(b["x"]) - b["y"]))

    return lambda params, b: loop(jax.value_and_grad(loss), size=SIZE, argnum=1)(params, b)


def stage_of(path):
    """Layers 0 and 1 on stage 0; layers 2 and 3 and the head on stage 1."""
    keys = [getattr(k, "key", getattr(k, "name", None)) for k in path]
    return (0,) if keys[0] == "layers" and int(keys[1]) < 2 else (1,)


def owners(params):
    return jax.tree.map_with_path(lambda path, _: stage_of(path), params)


@pytest.mark.longer
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_module_that_names_its_scopes(where):
    split = Split(submeshes(2, (2,)))
    graph, params = nnx.split(Decoder(nnx.Rngs(0)))
    want = jax.jit(step_of(graph, microbatched))(params, batch())

    def outside(params, b):
        def loss(params, b):
            return jnp.mean(jnp.square(nnx.merge(graph, params)(b["x"]) - b["y"]))

        return jax.value_and_grad(lambda p: mm.microbatch(loss, size=SIZE, argnum=1)(p, b))(params)

    f = step_of(graph, mm.microbatch) if where == "inside" else outside
    with (
        mm.register_task(r"layers_[01](?!\d)", mesh=split.mesh(0)),
        mm.register_task(r"(?:layers_[23](?!\d)|head)", mesh=split.mesh(1)),
    ):
        got = mm.jit(f)(params, batch())
    assert [np.asarray(x).shape for x in jax.tree.leaves(got)] == [x.shape for x in jax.tree.leaves(want)]
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want))
    assert_at_home(split, got[1], owners(params))


def test_a_module_as_a_task():
    split = Split(submeshes(2, (2,)))
    graph, params = nnx.split(Block(nnx.Rngs(0)))

    def f(params, x):
        return mm.task(nnx.merge(graph, params), name="block", mesh=split.mesh(1))(x)

    y = mm.jit(f)(params, batch()["x"])
    assert set(y.devices()) == split.devices(1)
    assert_same(y, nnx.merge(graph, params)(batch()["x"]))
