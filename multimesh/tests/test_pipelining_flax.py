"""Models in Flax as their authors wrote them, with ``mm.pipeline`` as the only change."""

import jax
import jax.numpy as jnp
import pytest
from pipelines import submeshes
from test_flax_linen import WIDTH, Decoder, Scanned, batch
from test_pipelining import assert_trains_alike, microbatch_of

import multimesh as mm

pytestmark = pytest.mark.flax
LISTED, SCANNED = Decoder(layers=8), Scanned()


def loss_and_params(model):
    def loss(params, batch):
        return jnp.mean(jnp.square(model.apply(params, batch["x"]) - batch["y"]))

    return loss, model.init(jax.random.key(0), batch()["x"])


@pytest.mark.telling("scanned")
@pytest.mark.longer
@pytest.mark.parametrize("model", [LISTED, SCANNED], ids=["listed", "scanned"])
def test_a_model_trains_as_it_is(model):
    loss, params = loss_and_params(model)
    piped = mm.pipeline(loss, submeshes(4, (1,)))
    cuts = piped.cuts(params, microbatch_of(batch()))
    assert cuts.slowest < 1.1
    assert cuts.sent <= 3 * 2 * WIDTH * 4  # a cut in each quarter
    assert_trains_alike(loss, piped, params, batch())


@pytest.mark.longer
def test_the_table_names_modules():
    loss, params = loss_and_params(LISTED)
    lines = [s.line for s in mm.pipeline(loss, submeshes(4, (1,))).cuts(params, microbatch_of(batch())).stages]
    assert [line.partition(" in ")[2] for line in lines[1:]] == [f"Decoder/layers_{i}/LayerNorm_0" for i in (2, 4, 6)]
