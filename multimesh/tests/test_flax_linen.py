"""Flax linen modules: unchanged, placed by the scopes that linen opens, or wrapped one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import SCHEDULES, Split, assert_at_home, assert_same, microbatched, submeshes

import multimesh as mm

nn = pytest.importorskip("flax.linen")
pytestmark = pytest.mark.flax

WIDTH, ROWS, SIZE, LAYERS = 16, 8, 2, 4


class Block(nn.Module):
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        return x + nn.Dense(self.width)(nn.tanh(nn.Dense(2 * self.width)(h)))


class Decoder(nn.Module):
    layers: int = LAYERS

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = Block(name=f"layers_{i}")(x)
        return nn.Dense(1, name="head")(x)


class Scanned(nn.Module):
    """Two stages that each scan two layers."""

    @nn.compact
    def __call__(self, x):
        for s in range(2):
            stack = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x = stack(Block(name=f"stage_{s}"), x, None)[0]
        return nn.Dense(1, name="head")(x)


class Rematted(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = nn.remat(Block)(name=f"layers_{i}")(x)
        return nn.Dense(1, name="head")(x)


def batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1, keepdims=True))}


def step_of(module, loop):
    def loss(params, b):
        return jnp.mean(jnp.square(module.apply(params, b["x"]) - b["y"]))

    return lambda params, b: loop(jax.value_and_grad(loss), size=SIZE, argnum=1)(params, b)


def stage_of(path):
    """layers_0, layers_1 on stage 0; layers_2, layers_3 and the head on stage 1."""
    name = jax.tree_util.keystr(path)
    return (0,) if any(s in name for s in ("layers_0", "layers_1", "stage_0")) else (1,)


def owners(params):
    return jax.tree.map_with_path(lambda path, _: stage_of(path), params)


@pytest.mark.longer
@pytest.mark.telling("Scanned-1f1b")
@pytest.mark.parametrize(
    ("cls", "schedule"),
    list(itertools.product([Decoder, Rematted, Scanned], SCHEDULES)),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_registered_scopes(cls, schedule):
    split = Split(submeshes(2, (2,)))
    module = cls()
    params = module.init(jax.random.key(0), batch()["x"])
    with (
        mm.register_task(r"(?:layers_[01]|stage_0)(?!\d)", mesh=split.mesh(0)),
        mm.register_task(r"(?:layers_[23]|stage_1|head)(?!\d)", mesh=split.mesh(1)),
    ):
        step = mm.jit(step_of(module, lambda f, **kw: mm.microbatch(f, schedule=schedule, **kw)))
        got = step(split.place(params, owners(params)), batch())
    assert_same(got, jax.jit(step_of(module, microbatched))(params, batch()))
    assert_at_home(split, got[1], owners(params))


def test_a_module_as_a_task():
    """Names of parameters do not change: parameters of the plain model fit."""
    split = Split(submeshes(2, (2,)))

    class Split2(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(LAYERS):
                x = mm.task(Block(name=f"layers_{i}"), name=f"layer{i}", mesh=split.mesh(i // 2))(x)
            return mm.task(nn.Dense(1, name="head"), name="head", mesh=split.mesh(1))(x)

    params = Decoder().init(jax.random.key(0), batch()["x"])
    assert jax.tree.structure(Split2().init(jax.random.key(0), batch()["x"])) == jax.tree.structure(params)
    got = mm.jit(step_of(Split2(), mm.microbatch))(params, batch())
    assert_same(got, jax.jit(step_of(Decoder(), microbatched))(params, batch()))
    assert_at_home(split, got[1], owners(params))


def test_a_whole_module_as_a_task():
    split = Split(submeshes(2, (2,)))
    module = Block()
    params = module.init(jax.random.key(0), batch()["x"])
    f = mm.task(module, name="block", mesh=split.mesh(1))
    y = mm.jit(lambda p, x: f.apply(p, x))(params, batch()["x"])
    assert set(y.devices()) == split.devices(1)
    assert_same(y, module.apply(params, batch()["x"]))
