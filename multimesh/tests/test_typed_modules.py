"""Modules of Flax NNX whose types have layouts, against plain ``jax.jit``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from typed_models import HIDDEN, ROWS, SIZE, WIDTH, check, draw, looped, typed_meshes

import multimesh as mm

MESHES = typed_meshes()
ROWS_SPEC, UP, DOWN = P("data", None), P(None, "model"), P("model", None)

pytestmark = pytest.mark.flax


def squares(y):
    return jnp.square(y - 1).mean()


class Layer(nnx.Module):
    """An NNX block: parameters with `nnx.with_partitioning`, and modules that are told ``out_sharding``."""

    def __init__(self, rngs):
        kernel = nnx.initializers.lecun_normal()
        options = {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=nnx.with_partitioning(kernel, (None, "model")), **options)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=nnx.with_partitioning(kernel, ("model", None)), **options)

    def __call__(self, x):
        h = jnp.tanh(self.up(x, out_sharding=P("data", "model")))
        return x + self.down(h, out_sharding=ROWS_SPEC)


def flax_nnx(mesh_of, form):
    with jax.set_mesh(MESHES[0]):
        layers = [Layer(nnx.Rngs(n)) for n in range(4)]
    graphs, states = zip(*map(nnx.split, layers), strict=True)
    placed = [
        jax.tree.map(lambda x, n=n: jax.device_put(np.asarray(x), NamedSharding(mesh_of(n), x.sharding.spec)), state)
        for n, state in enumerate(states)
    ]

    def loss(states, x):
        for n, (graph, state) in enumerate(zip(graphs, states, strict=True)):

            def run(state, x, graph=graph):
                return nnx.merge(graph, state)(x)

            x = (mm.task(run, f"stage{n // 2}", mesh=MESHES[n // 2]) if form == "task" else run)(state, x)
        return squares(x)

    return loss, placed


@pytest.mark.longer
@pytest.mark.telling("task")
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_training(form):
    """Loss and gradients of a pipeline over microbatches, and the types of both."""
    x = draw(1, ROWS, WIDTH)
    loss, params = flax_nnx(lambda n: MESHES[n // 2], form)
    plain, alone = flax_nnx(lambda _: MESHES[0], "plain")
    loss = mm.pipeline(plain, MESHES) if form == "pipeline" else loss
    loop = functools.partial(mm.microbatch, size=SIZE, argnum=1, reduce="mean")
    rows = jax.device_put(x, NamedSharding(MESHES[0], P("data")))
    grad = jax.value_and_grad
    check(loop(grad(loss)), looped(grad(plain)), (params, rows), (alone, rows), MESHES[0])
