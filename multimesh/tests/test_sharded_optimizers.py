"""State of an optimizer that is laid out over data parallelism, where its parameters are not (ZeRO)."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, microbatched, submeshes

import multimesh as mm

WIDTH, ROWS, SIZE, STAGES = 256, 32, 8, ("front", "back")
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3)),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(1e-3),
}


def loss(params, batch, task=lambda fn, stage: fn):
    h = task(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], "front")(params["front"], batch["x"])
    tail = task(lambda w, h, y: jnp.mean((jnp.tanh(h @ w["a"]) @ w["b"] - y) ** 2), "back")
    return tail(params["back"], h, batch["y"])


def step(optimizer, meshes=None, keep=lambda both: both):
    """Return a training step: in a pipeline over ``meshes``, or as one program."""
    if meshes:
        task = lambda fn, stage: mm.task(fn, stage, mesh=meshes[stage])  # noqa: E731
        gradient_fn = jax.value_and_grad(lambda params, batch: loss(params, batch, task))
        gradient = mm.microbatch(gradient_fn, argnum=1, size=SIZE, schedule="1f1b")
    else:
        gradient = microbatched(jax.value_and_grad(loss), argnum=1, size=SIZE)

    def train(both, batch):
        params, state = both
        value, gradients = gradient(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return keep((optax.apply_updates(params, updates), state)), value

    return train


def init(optimizer):
    keys = iter(jax.random.split(jax.random.key(0), 4))
    params = {stage: {name: jax.random.normal(next(keys), (WIDTH, WIDTH)) / 16 for name in "ab"} for stage in STAGES}
    return params, optimizer.init(params)


def rows():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


def layouts(tree, meshes, spec):
    """Return ``spec`` on the submesh of each array; scalars are whole, on the first."""

    def one(path, x):
        stage = next((part.key for part in path if getattr(part, "key", None) in STAGES), "front")
        return NamedSharding(meshes[stage], spec if x.ndim else P())

    return jax.tree_util.tree_map_with_path(one, tree)


def lay_out(optimizer, meshes):
    """Return the layouts of parameters and state, and of a batch: only the state lies over ``data``."""
    params, state = jax.eval_shape(lambda: init(optimizer))
    both = layouts(params, meshes, P()), layouts(state, meshes, P("data"))
    return both, {"x": NamedSharding(meshes["front"], P("data")), "y": NamedSharding(meshes["back"], P("data"))}


def counts(compiled):
    """Return how many collectives of a kind there are for each submesh, in the loop and after it."""
    counts = collections.Counter()
    looped = {run.kernel for run in compiled.plan.runs if run.cell}
    for number, (kernel, each) in enumerate(zip(compiled.plan.kernels, compiled.collectives(), strict=True)):
        counts.update((c.kind, kernel.submesh, number in looped) for c in each if c.nbytes > 8)  # but for norms
    return counts


@pytest.mark.telling("clipped adamw")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_shardings_say_it(name):
    """Three steps are those of one program, the state stays where it was, and gradients are summed after the loop."""
    optimizer = OPTIMIZERS[name]
    meshes = dict(zip(STAGES, submeshes(2), strict=True))
    places = lay_out(optimizer, meshes)
    train = mm.jit(step(optimizer, meshes), in_shardings=places, donate_argnums=0)
    both, batch = jax.device_put((init(optimizer), rows()), places)
    desired, reference = init(optimizer), jax.jit(step(optimizer))
    kinds = counts(train.lower(both, batch).compile())
    assert {at for _, at, _ in kinds} == {0, 1}
    assert not [at for at in kinds if at[2]]
    for _ in range(3):
        both, value = train(both, batch)
        desired, expected = reference(desired, rows())
        assert_same(value, expected)
    assert_same(both, desired)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), both, places[0])))
    moments = [x for x in jax.tree.leaves(both[1]) if x.ndim]
    assert moments
    assert all(x.sharding.shard_shape(x.shape) == (WIDTH // 2, WIDTH) for x in moments)


@pytest.mark.longer
def test_parallelize_says_it_by_a_constraint():
    """Constraints on the new parameters, whole, and on the new state say how both are made."""
    optimizer = OPTIMIZERS["adamw"]
    meshes = dict(zip(STAGES, submeshes(2), strict=True))
    places, layout = lay_out(optimizer, meshes)

    def keep(both):
        return jax.tree.map(jax.lax.with_sharding_constraint, both, places)

    batch = jax.device_put(rows(), layout)
    train, make = mm.parallelize(
        step(optimizer, meshes, keep), init_params=lambda: init(optimizer), initial_batch=batch
    )
    both = make()
    assert {x.sharding.spec for x in jax.tree.leaves(both[1]) if x.ndim} == {P("data")}
    assert {x.sharding.spec for x in jax.tree.leaves(both[0])} == {P()}
    desired, expected = jax.jit(step(optimizer))(init(optimizer), rows())
    both, value = train(both, batch)
    assert_same((both, value), (desired, expected))


@pytest.mark.compile_gpu
@pytest.mark.telling("clipped adamw")
@pytest.mark.parametrize("name", ["adamw", "clipped adamw"])
def test_a_stage_scatters_gradients_once_and_gathers_parameters_once(name):
    """As XLA compiles it for H100; CPUs have no reduce-scatter."""
    devices = np.array(mm.topology("h100", gpus=4)).reshape(2, 2)
    meshes = {stage: Mesh(row, ("data",)) for stage, row in zip(STAGES, devices, strict=True)}
    places = lay_out(OPTIMIZERS[name], meshes)
    types = jax.eval_shape(lambda: (init(OPTIMIZERS[name]), rows()))
    types_in = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), types, places)
    compiled = mm.jit(step(OPTIMIZERS[name], meshes), donate_argnums=0).lower(*types_in).compile()
    expected = {(kind, submesh, False): 1 for kind in ("reduce-scatter", "all-gather") for submesh in (0, 1)}
    assert counts(compiled) == expected
