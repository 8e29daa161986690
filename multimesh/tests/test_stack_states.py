"""Stacks of layers with what others bring: Orbax's own checkpointers, ZeRO, Muon, forecasts."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, microbatched, submeshes
from test_stacks import (
    BATCH,
    LAYERS,
    MESHES,
    STATE,
    WEIGHTS,
    WIDTH,
    check,
    held,
    scanned,
    step_of,
)

import multimesh as mm

MUON = optax.contrib.muon(
    1e-2,
    muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda w: optax.contrib.MuonDimensionNumbers(1, 2) if w.ndim == 3 else None, params
    ),
)


def places_of(step, *args):
    """Return the parameters and state that a step takes, as shapes with layouts."""
    where = step.lower(*args).compile().input_shardings[0][:2]
    whole = NamedSharding(MESHES[0], P())
    shape = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s or whole)  # noqa: E731
    return jax.tree.map(shape, args[:2], where, is_leaf=lambda x: x is None)


@pytest.mark.longer
@pytest.mark.flax
def test_orbax_restores_on_other_stages(tmp_path):
    """Its own checkpointer, without a handler of ours: four stages write a stack, two read it."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    step, (params, state) = check()
    other = mm.jit(step_of(mm.pipeline(scanned, submeshes(2))))
    with checkpoint.StandardCheckpointer() as files:
        files.save(tmp_path / "four", (params, state))
        files.wait_until_finished()
        back = files.restore(tmp_path / "four", places_of(other, params, state, BATCH))
    assert held(back, submeshes(2))[1] >= 3 * STATE // 2
    assert_same(jax.device_get(other(*back, BATCH)), jax.device_get(step(params, state, BATCH)))


@pytest.mark.longer
@pytest.mark.parametrize("form", ["in_shardings", "parallelize"])
def test_moments_over_data(form):
    """ZeRO: a stage has its rows of the moments, and each of its devices a part of these."""
    optimizer = optax.adam(1e-3)
    step = step_of(mm.pipeline(scanned, MESHES), optimizer)
    params, state, _ = mm.jit(step)(WEIGHTS, optimizer.init(WEIGHTS), BATCH)
    over = lambda x: NamedSharding(x.sharding.mesh, P("stage", "data") if x.ndim else P())  # noqa: E731
    where = jax.tree.map(lambda x: x.sharding, params), jax.tree.map(over, state)
    if form == "in_shardings":
        train = mm.jit(step, in_shardings=(*where, None), donate_argnums=(0, 1))
        got = jax.device_put((WEIGHTS, optimizer.init(WEIGHTS)), where)
    else:

        def kept(params, state, batch):
            *both, value = step(params, state, batch)
            return *jax.tree.map(jax.lax.with_sharding_constraint, tuple(both), where), value

        train, make = mm.parallelize(
            lambda both, batch: kept(*both, batch),
            init_params=lambda: (WEIGHTS, optimizer.init(WEIGHTS)),
            initial_batch=BATCH,
        )
        got, train = make(), lambda *args, run=train: run(args[:2], args[2])
    want, plain = (WEIGHTS, optimizer.init(WEIGHTS)), jax.jit(step_of(scanned, optimizer, microbatched))
    for _ in range(2):
        *got, value = train(*got, BATCH)
        *want, known = plain(*want, BATCH)
        np.testing.assert_allclose(value, known, rtol=1e-5)
    assert_same(jax.device_get(got), jax.device_get(want))
    assert got[1][0].mu["kernel"].sharding.shard_shape((LAYERS, WIDTH, WIDTH)) == (2, WIDTH // 2, WIDTH)
    assert set(held(got[1][0].nu)) == {STATE // len(MESHES) // 2}


@pytest.mark.longer
def test_muon_keeps_rows_on_their_stages():
    """Its loop over all layers runs on one stage; what it makes returns to the rows."""
    _, got = check(optimizer=MUON)
    assert max(held(got)) - min(held(got)) <= 64


def test_a_forecast_counts_rows():
    step = mm.jit(step_of(mm.pipeline(scanned, MESHES)))
    args = WEIGHTS, optax.adam(1e-3).init(WEIGHTS), BATCH
    told = [each.arguments for each in step.lower(*args).memory_estimate()]
    real = held(step(*args)[:2])
    rows = sum(x.nbytes for x in BATCH.values())
    for claimed, holds in zip(told, real, strict=True):
        assert holds <= claimed <= holds + rows + 64
