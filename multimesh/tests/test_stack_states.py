"""Stacks of layers with what others bring: checkpoints, ZeRO, forecasts."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, microbatched, submeshes
from test_stacks import BATCH, LAYERS, MESHES, STATE, WEIGHTS, WIDTH, bytes_of, check, scanned, step_of

import multimesh as mm


def places_of(step, *args):
    """Return the parameters and state that a step takes, as shapes with layouts."""
    shardings = step.lower(*args).compile().input_shardings[0][:2]
    replicated = NamedSharding(MESHES[0], P())
    shape = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s or replicated)  # noqa: E731
    return jax.tree.map(shape, args[:2], shardings, is_leaf=lambda x: x is None)


@pytest.mark.longer
@pytest.mark.parametrize("form", ["ours", "orbax"])
def test_four_stages_save_a_stack_and_two_restore_it(form, tmp_path):
    """One array in a checkpoint; Orbax's own checkpointer does so without a handler of ours."""
    step, (params, state) = check()
    meshes = submeshes(2)
    other = mm.jit(step_of(mm.pipeline(scanned, meshes)))
    like = places_of(other, params, state, BATCH)
    if form == "ours":
        mm.distributed.save(tmp_path / "four", (params, state))
        restored = mm.distributed.restore(tmp_path / "four", like)
    else:
        checkpoint = pytest.importorskip("orbax.checkpoint")
        with checkpoint.StandardCheckpointer() as files:
            files.save(tmp_path / "four", (params, state))
            files.wait_until_finished()
            restored = files.restore(tmp_path / "four", like)
    first, second = bytes_of(restored, meshes)
    assert second >= 3 * STATE // 2
    assert first - second <= 16
    assert_same(jax.device_get(other(*restored, BATCH)), jax.device_get(step(params, state, BATCH)))


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
        actual = jax.device_put((WEIGHTS, optimizer.init(WEIGHTS)), where)
    else:

        def merge_step(params, state, batch):
            *both, value = step(params, state, batch)
            return *jax.tree.map(jax.lax.with_sharding_constraint, tuple(both), where), value

        train, make = mm.parallelize(
            lambda both, batch: merge_step(*both, batch),
            init_params=lambda: (WEIGHTS, optimizer.init(WEIGHTS)),
            initial_batch=BATCH,
        )
        actual, train = make(), lambda *args, run=train: run(args[:2], args[2])
    desired, reference = (WEIGHTS, optimizer.init(WEIGHTS)), jax.jit(step_of(scanned, optimizer, microbatched))
    for _ in range(2):
        *actual, value = train(*actual, BATCH)
        *desired, expected = reference(*desired, BATCH)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_same(jax.device_get(actual), jax.device_get(desired))
    assert actual[1][0].mu["kernel"].sharding.shard_shape((LAYERS, WIDTH, WIDTH)) == (2, WIDTH // 2, WIDTH)
    assert set(bytes_of(actual[1][0].nu)) == {STATE // len(MESHES) // 2}


def test_a_forecast_counts_rows():
    step = mm.jit(step_of(mm.pipeline(scanned, MESHES)))
    args = WEIGHTS, optax.adam(1e-3).init(WEIGHTS), BATCH
    estimates = [stage.arguments for stage in step.lower(*args).memory_estimate()]
    real = bytes_of(step(*args)[:2])
    rows = sum(x.nbytes for x in BATCH.values())
    for estimate, holds in zip(estimates, real, strict=True):
        assert holds <= estimate <= holds + rows + 64
