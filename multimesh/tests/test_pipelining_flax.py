"""Models in Flax as their authors wrote them, with ``mm.pipeline`` as the only change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import submeshes
from test_pipelining import assert_trains_alike, microbatch_of

import multimesh as mm

nn = pytest.importorskip("flax.linen")
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


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, SEQUENCE + 1)).astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def linen(scanned):
    model = GPT(scanned)

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, batch["x"]), batch["y"]).mean()

    return loss, model.init(jax.random.key(0), batch()["x"])


@pytest.mark.telling("scanned")
@pytest.mark.longer
@pytest.mark.parametrize("scanned", [False, True], ids=["listed", "scanned"])
def test_a_model_trains_as_it_is(scanned):
    loss, params = linen(scanned)
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
