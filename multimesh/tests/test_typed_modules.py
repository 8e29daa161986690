"""Modules of Equinox, Flax NNX and Flax Linen whose types have layouts, against plain ``jax.jit``."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from typed_models import HIDDEN, ROWS, SIZE, WIDTH, check, draw, looped, typed_meshes

import multimesh as mm

MESHES = typed_meshes()
ROWS_SPEC, UP, DOWN = P("data", None), P(None, "model"), P("model", None)

pytestmark = pytest.mark.flax


def squares(y):
    return jnp.square(y - 1).mean()


class Block(eqx.Module):
    """An Equinox block whose products say their layouts."""

    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        h = jnp.einsum("bd,df->bf", x, self.up, out_sharding=P("data", "model"))
        return x + jnp.einsum("bf,fd->bd", jnp.tanh(h), self.down, out_sharding=ROWS_SPEC)


def equinox(mesh_of, form):
    blocks = [Block(draw(n, WIDTH, HIDDEN), draw(50 + n, HIDDEN, WIDTH)) for n in range(4)]
    layouts = [Block(NamedSharding(mesh_of(n), UP), NamedSharding(mesh_of(n), DOWN)) for n in range(4)]

    def loss(blocks, x):
        for n, block in enumerate(blocks):
            run = type(block).__call__
            x = mm.task(run, f"stage{n // 2}", mesh=MESHES[n // 2])(block, x) if form == "task" else run(block, x)
        return squares(x)

    return loss, jax.device_put(blocks, layouts)


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


class Dense(nn.Module):
    """A Linen block whose products say their layouts. JAX refuses ``nn.with_partitioning`` on Explicit axes."""

    @nn.compact
    def __call__(self, x):
        kernel = nn.initializers.lecun_normal()
        up = self.param("up", kernel, (WIDTH, HIDDEN))
        down = self.param("down", kernel, (HIDDEN, WIDTH))
        h = jnp.einsum("bd,df->bf", x, up, out_sharding=P("data", "model"))
        return x + reshard(jnp.einsum("bf,fd->bd", jnp.tanh(h), down, out_sharding=ROWS_SPEC), ROWS_SPEC)


def flax_linen(mesh_of, form):
    module = Dense()
    specs = {"params": {"up": UP, "down": DOWN}}
    made = [{"params": {"up": draw(n, WIDTH, HIDDEN), "down": draw(50 + n, HIDDEN, WIDTH)}} for n in range(4)]

    def layouts(mesh):
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))

    placed = [jax.device_put(w, layouts(mesh_of(n))) for n, w in enumerate(made)]

    def loss(params, x):
        for n, w in enumerate(params):
            x = (mm.task(module.apply, f"stage{n // 2}", mesh=MESHES[n // 2]) if form == "task" else module.apply)(w, x)
        return squares(x)

    return loss, placed


MAKERS = {"equinox": equinox, "nnx": flax_nnx, "linen": flax_linen}


@pytest.mark.longer
@pytest.mark.telling("task-nnx", "pipeline-equinox")
@pytest.mark.parametrize("library", MAKERS)
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_training(library, form):
    """Loss and gradients of a pipeline over microbatches, and the types of both."""
    make = MAKERS[library]
    x = draw(1, ROWS, WIDTH)
    loss, params = make(lambda n: MESHES[n // 2], form)
    plain, alone = make(lambda _: MESHES[0], "plain")
    loss = mm.pipeline(plain, MESHES) if form == "pipeline" else loss
    loop = functools.partial(mm.microbatch, size=SIZE, argnum=1, reduce="mean")
    rows = jax.device_put(x, NamedSharding(MESHES[0], P("data")))
    grad = jax.value_and_grad
    check(loop(grad(loss)), looped(grad(plain)), (params, rows), (alone, rows), MESHES[0])
