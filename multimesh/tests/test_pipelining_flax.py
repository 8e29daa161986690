"""Models in Flax as their authors wrote them, with ``mm.pipeline`` as the only change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import submeshes
from test_pipelining import assert_trains_alike, microbatch_of

import multimesh as mm

nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
pytestmark = [pytest.mark.flax]
VOCAB, SEQUENCE, WIDTH, DEPTH = 32, 8, 16, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(h, h, mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(tokens)
        if self.scanned:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(lambda block, x, _: (block(x), None), length=DEPTH, **split)(Block(), x, None)
        else:
            for i in range(DEPTH):
                x = Block(name=f"layers_{i}")(x)
        return embed.attend(nn.LayerNorm()(x))


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class NNXGPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(DEPTH)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, SEQUENCE + 1)).astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def linen(scanned):
    model = GPT(scanned)

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, batch["x"]), batch["y"]).mean()

    return loss, model.init(jax.random.key(0), batch()["x"])


def from_nnx():
    graph, state = nnx.split(NNXGPT(nnx.Rngs(0)))

    def loss(state, batch):
        logits = nnx.merge(graph, state)(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss, state


MODELS = {
    "linen": lambda: linen(False),
    "linen scan": lambda: linen(True),
    "nnx": from_nnx,
}


@pytest.mark.telling("linen scan")
@pytest.mark.longer
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_it_is(name):
    loss, params = MODELS[name]()
    piped = mm.pipeline(loss, submeshes(4, (1,)))
    cuts = piped.cuts(params, microbatch_of(batch()))
    assert cuts.slowest < 1.1
    assert cuts.sent <= 3 * 2 * SEQUENCE * WIDTH * 4 + VOCAB * WIDTH * 4  # a cut in each quarter, the embedding twice
    assert_trains_alike(loss, piped, params, batch())


@pytest.mark.longer
def test_the_table_names_modules():
    loss, params = linen(False)
    lines = [s.line for s in mm.pipeline(loss, submeshes(4, (1,))).cuts(params, microbatch_of(batch())).stages]
    assert [line.partition(" in ")[2] for line in lines[1:]] == [f"GPT/layers_{i}/LayerNorm_0" for i in (2, 4, 6)]
