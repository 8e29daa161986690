"""Flax modules, linen and NNX: placed by their scopes, as tasks, cut by ``mm.pipeline``, and with layouts in types."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from pipelines import SCHEDULES, Split, assert_at_home, assert_same, microbatched, submeshes
from test_pipelining import assert_trains_alike, microbatch_of
from typed_models import HIDDEN, check, looped, typed_meshes

import multimesh as mm

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.flax

WIDTH, ROWS, SIZE, LAYERS = 16, 8, 2, 4
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X.sum(-1, keepdims=True))}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(2 * WIDTH)(h)))


class Decoder(nn.Module):
    layers: int = LAYERS
    block: type = Block

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = self.block(name=f"layers_{i}")(x)
        return nn.Dense(1, name="head")(x)


class Scanned(nn.Module):
    """Two stages that each scan two layers."""

    @nn.compact
    def __call__(self, x):
        for s in range(2):
            one = lambda block, x, _: (block(x), None)  # noqa: E731
            stack = nn.scan(one, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x = stack(Block(name=f"stage_{s}"), x, None)[0]
        return nn.Dense(1, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class NnxDecoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layers_{i}"):
                x = layer(x)
        with jax.named_scope("head"):
            return self.head(x)


MODULES = {
    "listed": Decoder,
    "rematted": lambda: Decoder(block=nn.remat(Block)),
    "scanned": Scanned,
    "nnx": lambda: NnxDecoder(nnx.Rngs(0)),
}


def functional(module):
    """A module as a function of parameters and rows, and its parameters."""
    if isinstance(module, nn.Module):
        return module.apply, module.init(jax.random.key(0), X)
    graph, params = nnx.split(module)
    return lambda params, x: nnx.merge(graph, params)(x), params


def loss_of(apply):
    return lambda params, batch: jnp.mean(jnp.square(apply(params, batch["x"]) - batch["y"]))


def owners(params):
    """Layers 0 and 1, or a scan of them, are of stage 0; the others and the head of stage 1."""

    def stage(path, _):
        name = re.search(r"(layers|stage)\D+(\d)", jax.tree_util.keystr(path))
        return (1,) if name is None else (int(name[2]) // (2 if name[1] == "layers" else 1),)

    return jax.tree.map_with_path(stage, params)


@pytest.mark.longer
@pytest.mark.telling("scanned-1f1b-inside", "nnx-1f1b-inside", "nnx-1f1b-outside")
@pytest.mark.parametrize(
    ("name", "schedule", "where"),
    [*itertools.product(("listed", "rematted", "scanned"), SCHEDULES, ["inside"]),
     ("nnx", "1f1b", "inside"), ("nnx", "1f1b", "outside")],
)  # fmt: skip
def test_registered_scopes(name, schedule, where):
    split = Split(submeshes(2, (2,)))
    apply, params = functional(MODULES[name]())

    def step(loop):
        if where == "inside":
            return loop(jax.value_and_grad(loss_of(apply)), size=SIZE, argnum=1)
        return jax.value_and_grad(loop(loss_of(apply), size=SIZE, argnum=1))

    with (
        mm.register_task(r"(?:layers_[01]|stage_0)(?!\d)", mesh=split.mesh(0)),
        mm.register_task(r"(?:layers_[23]|stage_1|head)(?!\d)", mesh=split.mesh(1)),
    ):
        pipelined_step = mm.jit(step(functools.partial(mm.microbatch, schedule=schedule)))
        actual = pipelined_step(split.place(params, owners(params)), BATCH)
    expected = jax.jit(step(microbatched))(params, BATCH)
    assert_same(jax.tree.leaves(actual), jax.tree.leaves(expected))
    assert_at_home(split, actual[1], owners(params))


def test_modules_of_linen_as_tasks():
    """Names of parameters do not change: parameters of the plain model fit."""
    split = Split(submeshes(2, (2,)))

    class Tasks(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(LAYERS):
                x = mm.task(Block(name=f"layers_{i}"), name=f"layer{i}", mesh=split.mesh(i // 2))(x)
            return mm.task(nn.Dense(1, name="head"), name="head", mesh=split.mesh(1))(x)

    (apply, params), (apply_alone, expected) = functional(Tasks()), functional(Decoder())
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    actual = mm.jit(mm.microbatch(jax.value_and_grad(loss_of(apply)), size=SIZE, argnum=1))(expected, BATCH)
    plain_step = microbatched(jax.value_and_grad(loss_of(apply_alone)), size=SIZE, argnum=1)
    assert_same(actual, jax.jit(plain_step)(expected, BATCH))
    assert_at_home(split, actual[1], owners(expected))


@pytest.mark.parametrize("make", [Block, lambda: NnxBlock(nnx.Rngs(0))], ids=["linen", "nnx"])
def test_a_module_as_a_task(make):
    split, module = Split(submeshes(2, (2,))), make()
    apply, params = functional(module)

    def f(params, x):
        if make is Block:
            return mm.task(module, name="block", mesh=split.mesh(1)).apply(params, x)
        return mm.task(nnx.merge(nnx.graphdef(module), params), name="block", mesh=split.mesh(1))(x)

    y = mm.jit(f)(params, X)
    assert set(y.devices()) == split.devices(1)
    assert_same(y, apply(params, X))


@pytest.mark.longer
@pytest.mark.telling("scanned")
@pytest.mark.parametrize("model", [Decoder(layers=8), Scanned()], ids=["listed", "scanned"])
def test_a_model_trains_as_it_is(model):
    apply, params = functional(model)
    loss = loss_of(apply)
    piped = mm.pipeline(loss, submeshes(4, (1,)))
    cuts = piped.cuts(params, microbatch_of(BATCH))
    assert cuts.slowest < 1.1
    assert cuts.sent <= 3 * 2 * WIDTH * 4  # a cut in each quarter
    assert_trains_alike(loss, piped, params, BATCH)


@pytest.mark.longer
def test_the_table_of_cuts_names_modules():
    apply, params = functional(Decoder(layers=8))
    lines = [s.line for s in mm.pipeline(loss_of(apply), submeshes(4, (1,))).cuts(params, microbatch_of(BATCH)).stages]
    assert [line.partition(" in ")[2] for line in lines[1:]] == [f"Decoder/layers_{i}/LayerNorm_0" for i in (2, 4, 6)]


class TypedLayer(nnx.Module):
    """Parameters with `nnx.with_partitioning`, and modules that are told ``out_sharding``."""

    def __init__(self, rngs):
        kernel = nnx.initializers.lecun_normal()
        options = {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=nnx.with_partitioning(kernel, (None, "model")), **options)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=nnx.with_partitioning(kernel, ("model", None)), **options)

    def __call__(self, x):
        h = jnp.tanh(self.up(x, out_sharding=P("data", "model")))
        return x + self.down(h, out_sharding=P("data", None))


@pytest.mark.longer
@pytest.mark.telling("task")
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_typed_modules(form):
    """Loss and gradients of a pipeline over microbatches, and the types of both."""
    meshes = typed_meshes()
    with jax.set_mesh(meshes[0]):
        graphs, states = zip(*(nnx.split(TypedLayer(nnx.Rngs(n))) for n in range(4)), strict=True)

    def loss(stage):
        def f(states, x):
            for n, (graph, state) in enumerate(zip(graphs, states, strict=True)):
                x = stage(n // 2, lambda state, x, graph=graph: nnx.merge(graph, state)(x))(state, x)
            return jnp.square(x - 1).mean()

        return f

    def place(mesh, state):
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), NamedSharding(mesh, x.sharding.spec)), state)

    rows = jax.device_put(X, NamedSharding(meshes[0], P("data")))
    placed, plain_state = ([place(meshes[n // k], state) for n, state in enumerate(states)] for k in (2, 4))
    fn = jax.value_and_grad(mm.pipeline(loss(plain), meshes) if form == "pipeline" else loss(Split(meshes)))
    step = mm.microbatch(fn, size=4, argnum=1, reduce="mean")
    check(step, looped(jax.value_and_grad(loss(plain))), (placed, rows), (plain_state, rows), meshes[0])
