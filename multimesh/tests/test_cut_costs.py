"""Cuts count what a training step really computes, as XLA counts the operations of its kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from pipelines import assert_same, submeshes

import multimesh as mm

LAYERS, WIDTH, ROWS, SIZE = 8, 32, 64, 32
MESHES = submeshes(4, (1,))
draw = np.random.default_rng(0).normal


def layer():
    return {"up": draw(size=(WIDTH, 2 * WIDTH)) / 6, "down": draw(size=(2 * WIDTH, WIDTH)) / 8}


PARAMS = jax.tree.map(lambda a: a.astype("float32"), [layer() for _ in range(LAYERS)])
BATCH = {name: draw(size=(ROWS, WIDTH)).astype("float32") for name in "xy"}
FRONT, BACK = PARAMS[: LAYERS // 2], PARAMS[LAYERS // 2 :]


def block(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def run(layers, x, block=block):
    for p in layers:
        x = block(x, p)
    return x


def error(x, batch):
    return jnp.mean(jnp.square(x - batch["y"]))


def frozen_loss(params, batch):
    half = LAYERS // 2
    return error(run(params[half:], jax.lax.stop_gradient(run(params[:half], batch["x"]))), batch)


def frozen(back, front, batch):
    return error(run(back, run(front, batch["x"])), batch)


def target(params, fixed, batch):
    """A network, and another one whose parameters follow it: this one has no backward pass."""
    return error(run(params, batch["x"]) - jax.lax.stop_gradient(run(fixed, batch["x"])), batch)


def scanned(params, batch):
    def part(x, stack):
        return jax.lax.scan(lambda x, p: (block(x, p), None), x, stack)[0]

    return error(part(part(batch["x"], jax.lax.stop_gradient(params["front"])), params["back"]), batch)


def checkpointed(params, batch):
    """The front half is computed twice."""
    recompute = jax.checkpoint(run, static_argnums=2)
    half = LAYERS // 2
    return error(run(params[half:], recompute(params[:half], batch["x"], block)), batch)


def saving(params, batch):
    """Its policy saves the wide product, so that only what is cheap is computed twice."""

    def inner(x, p):
        return x + jnp.tanh(checkpoint_name(x @ p["up"], "wide")) @ p["down"]

    policy = jax.checkpoint_policies.save_only_these_names("wide")
    recompute = jax.checkpoint(lambda layers, x: run(layers, x, inner), policy=policy)
    half = LAYERS // 2
    return error(run(params[half:], recompute(params[:half], batch["x"])), batch)


def stack(layers):
    return jax.tree.map(lambda *a: np.stack(a), *layers)


STEPS = {
    "frozen by stop_gradient": (frozen_loss, 0, (PARAMS, BATCH)),
    "frozen arguments": (frozen, 0, (BACK, FRONT, BATCH)),
    "a target network": (target, 0, (PARAMS[:6], PARAMS[2:], BATCH)),
    "checkpointed": (checkpointed, 0, (PARAMS, BATCH)),
    "checkpointed with names": (saving, 0, (PARAMS, BATCH)),
    "another argument": (lambda front, back, batch: frozen(back, front, batch), 1, (FRONT, BACK, BATCH)),
}


def step_of(loss, argnum, args):
    return mm.microbatch(
        jax.value_and_grad(loss, argnums=argnum), size=SIZE, argnum=len(args) - 1, schedule="1f1b", reduce="mean"
    )


def measured(step, args):
    """Operations of each submesh, as XLA counts those of the kernels that ran."""
    return np.array([costs["flops"] for costs in step.cost_analysis(*args)]) * SIZE / ROWS


@pytest.mark.longer
@pytest.mark.parametrize("name", STEPS)
def test_stages_are_even_by_the_operations_that_xla_counts(name):
    """The gradient alone says which arguments are trained."""
    loss, argnum, args = STEPS[name]
    step = mm.jit(step_of(mm.pipeline(loss, MESHES), argnum, args))
    cuts = step.plan(*args).cuts[0]
    estimates, real = np.array([s.time for s in cuts.stages]), measured(step, args)
    np.testing.assert_allclose(estimates, real, rtol=0.1)
    assert real.max() / real.mean() <= 1.2
    assert_same(step(*args), jax.jit(jax.value_and_grad(loss, argnums=argnum))(*args))


def test_rows_of_a_scan_count_as_layers_do():
    """XLA counts the body of a loop once, so that the list of the same layers says what is right.

    A scan has the gradient of the activations for its first trained row too, which nothing needs.
    """
    rows = mm.pipeline(scanned, MESHES).cuts({"front": stack(FRONT), "back": stack(BACK)}, BATCH)
    layers = mm.pipeline(frozen_loss, MESHES).cuts(PARAMS, BATCH)
    one, other = (np.sum([s.work for s in cuts.stages], axis=0) for cuts in (rows, layers))
    np.testing.assert_allclose(one, other, rtol=0.15)


def test_cuts_take_the_trained_arguments():
    assert mm.pipeline(frozen, MESHES).cuts(BACK, FRONT, BATCH).slowest < 1.2
    forward = mm.pipeline(frozen, MESHES, argnums=()).cuts(BACK, FRONT, BATCH)
    assert forward.stages[1].work.backward == forward.stages[1].work.weights == 0
    assert forward.slowest < 1.02


def test_the_table_has_f_b_and_w_apart():
    """The front is frozen: it has no B and no W. The first trained layer needs no gradient of what it reads."""
    cuts = mm.pipeline(frozen, MESHES).cuts(BACK, FRONT, BATCH)
    first, *_, last = (s.work for s in cuts.stages)
    assert first.backward == first.weights == 0
    assert last.backward == pytest.approx(last.forward, rel=0.1)
    assert last.weights == pytest.approx(last.forward, rel=0.1)
    assert str(cuts).splitlines()[0].split()[:5] == ["stage", "forward", "backward", "weights", "share"]


def test_measured_seconds_move_the_cut():
    """The first stage took three times as long as the others: it gets less."""
    even = mm.pipeline(frozen, MESHES, argnums=())
    slow = mm.pipeline(frozen, MESHES, argnums=(), seconds=[3.0, 1.0, 1.0, 1.0])
    before, after = (piped.cuts(BACK, FRONT, BATCH) for piped in (even, slow))
    assert after.stages[0].work.forward < 0.6 * before.stages[0].work.forward
    assert sum(s.time for s in after.stages) == pytest.approx(6.0)
    assert after.slowest < 1.3
    with pytest.raises(mm.UsageError, match="pipeline: 4 stages, but seconds of 2; give one for each"):
        mm.pipeline(frozen, MESHES, seconds=[1.0, 2.0])


def test_a_stage_with_little_work_is_told():
    """Three products, and what follows is small: a fourth stage has nothing to do. Nor has it of six rows of a scan."""

    def three(params, batch):
        x = batch["x"]
        for w in params:
            x = x @ w
        return x[0, 0] + 1.0

    params = [draw(size=(WIDTH, WIDTH)).astype("float32") for _ in range(3)]
    cuts = mm.pipeline(three, MESHES).cuts(params, BATCH)
    assert cuts.remark.startswith("stage 3 of 4 would have 0.0 % of the work: 3 stages are about as good")
    assert cuts.remark == str(cuts).splitlines()[-1] == cuts.short()[-1]
    assert not mm.pipeline(frozen, MESHES).cuts(BACK, FRONT, BATCH).remark

    def six(params, batch):
        return error(jax.lax.scan(lambda x, p: (block(x, p), None), batch["x"], params)[0], batch)

    with pytest.warns(UserWarning, match=r"^stage \d of 4 would have .* give layers that 4 divides"):
        mm.jit(mm.pipeline(six, MESHES)).plan(stack(PARAMS[:6]), BATCH)
