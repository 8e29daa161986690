"""Layouts in types under all that surrounds a step: state, checkpoints, forecasts, profiles, lists of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from models import plain
from pipelines import Split, assert_same
from typed_models import SIZE, WIDTH, arguments, batch, block, check, init, looped, loss_of, typed_meshes

import multimesh as mm

MESHES = typed_meshes()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def step_of(loss, loop=mm.microbatch):
    def step(params, state, tokens):
        value, grads = loop(jax.value_and_grad(loss), size=SIZE, argnum=1, reduce="mean")(params, tokens)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def specs_of(tree):
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def run(step, state, tokens, steps):
    losses = []
    for _ in range(steps):
        *state, value = step(*state, tokens)
        losses.append(float(value))
    return state, losses


@pytest.mark.longer
@pytest.mark.telling("pipeline")
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_a_checkpoint_is_restored_on_another_grid(form, tmp_path):
    """Two stages of 2 x 2 devices go on as two of 1 x 4, with the types of their own."""
    losses = {}

    def training(meshes):
        return mm.jit(step_of(loss_of(form, meshes)), donate_argnums=(0, 1))

    (params, tokens), _ = arguments(MESHES)
    step = training(MESHES)
    state, losses["first"] = run(step, [params, OPTIMIZER.init(params)], tokens, 2)
    mm.distributed.save(tmp_path / "state", state)
    _, losses["one go"] = run(step, state, tokens, 2)
    other = typed_meshes(((1, 4), (1, 4)))
    (params, tokens), _ = arguments(other)
    like = [params, OPTIMIZER.init(params)]
    restored = mm.distributed.restore(tmp_path / "state", like)
    assert specs_of(restored[0]) == specs_of(params)
    _, losses["restored"] = run(training(other), restored, tokens, 2)
    np.testing.assert_allclose(losses["restored"], losses["one go"], rtol=1e-5)
    assert losses["one go"][-1] < losses["first"][0]


@pytest.mark.longer
@pytest.mark.telling("task")
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_forecasts_and_profiles(form):
    (params, tokens), _ = arguments(MESHES)
    step = mm.jit(step_of(loss_of(form, MESHES)))
    args = params, OPTIMIZER.init(params), tokens
    lowered = step.lower(*args)
    for mesh, estimate in zip(MESHES, lowered.memory_estimate(), strict=True):
        first = mesh.devices.flat[0]
        shards = [s for x in jax.tree.leaves(args) for s in x.addressable_shards]
        nbytes = sum(s.data.nbytes for s in shards if s.device == first)
        assert nbytes <= estimate.arguments <= nbytes + 1024  # the tied embedding is sent, scalars are copied
    profile = step.profile(*args)
    assert len(profile.measured.spans) == sum(i.kind == "RUN" for i in lowered.plan.instructions)


@pytest.mark.telling("task")
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_a_state_is_handed_on_from_microbatch_to_microbatch(form):
    """A running mean with a layout in its type, in the first stage."""

    def loss(params, tokens, mean, stage=plain):
        def first(embed, tokens, mean):
            x = embed.at[tokens].get(out_sharding=P("data", None))
            mean = 0.9 * mean + 0.1 * reshard(x.mean(0), P("model"))
            return x + reshard(mean, P(None)), mean

        x, mean = stage(0, first)(params["embed"], tokens, mean)
        for s, w in enumerate(params["layers"]):
            x = stage(s // 2, block)(w, x)
        return stage(1, lambda x: jnp.square(x).mean())(x), mean

    def step(loss, loop):
        def one(params, tokens, mean):
            (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens, mean)
            return mean, (value, grads)

        return loop(one, size=SIZE, argnum=1, carry=2, reduce="mean")

    (params, tokens), (reference, _) = arguments(MESHES)
    split = mm.pipeline(loss, MESHES) if form == "pipeline" else lambda *a: loss(*a, Split(MESHES))
    mean = jax.device_put(np.zeros(WIDTH, "float32"), NamedSharding(MESHES[0], P("model")))
    check(step(split, mm.microbatch), step(loss, looped), (params, tokens, mean), (reference, tokens, mean), MESHES[0])


def test_without_a_mesh_in_arguments_a_call_keeps_one_program():
    """Arguments of the host name no mesh: the tasks that the trace meets do."""
    loss = loss_of("task", MESHES)
    traces = []

    def count_call(params, tokens):
        traces.append(1)
        return jax.value_and_grad(loss)(params, tokens)

    params, _ = init()
    step = mm.jit(count_call)
    first = step(params, batch())
    count = len(traces)
    second = step(params, batch())
    assert_same(first, jax.device_get(second))
    assert len(traces) == count
    assert len(step.compiled) == 1


def test_a_plan_names_reshards_between_submeshes():
    """It does so where they differ in shape; it is silent on two of one shape."""
    for shapes, expected in ((((2, 2), (2, 2)), []), (((2, 2), (4, 1)), ["0 to 1", "1 to 0"])):
        meshes = typed_meshes(shapes)
        text = str(mm.jit(jax.value_and_grad(loss_of("task", meshes))).plan(*arguments(meshes)[0]))
        lines = [line for line in text.splitlines() if "becomes" in line]
        assert [line[:6] for line in lines] == sorted(line[:6] for line in lines)
        assert sorted({line[:6] for line in lines}) == expected
        assert ("reshards between submeshes:" in text) == bool(expected)
    assert "0 to 1: float32[8, 8] P('data',) becomes P('data',)" in text
