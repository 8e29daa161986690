"""Functions without marks, cut into stages: as even as can be, few bytes, and the numbers of plain jit."""

import itertools
import re

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from models import mlp_block
from multimesh.schedules import LayerCosts
from multimesh.schedules.cuts import SLACK, Chain, cut_chain
from pipelines import submeshes
from unmarked import MODELS

import multimesh as mm

UNEVEN = {"mamba": 1.18, "vit": 1.12}  # eight rows and a head; a convolution before eight blocks


def microbatch_of(batch):
    return jax.tree.map(lambda x: x[:2], batch)


def training(loss, schedule="1f1b"):
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-4))
    grads_of = mm.microbatch(jax.value_and_grad(loss), size=2, argnum=1, schedule=schedule, reduce="mean")

    def step(params, state, batch):
        value, grads = grads_of(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer.init, step


def assert_trains_alike(loss, piped, params, batch, steps=2, **options):
    init, step = training(loss)
    _, piped_step = training(piped, **options)
    plain, split = jax.jit(step), mm.jit(piped_step)
    one = two = (params, init(params))
    for _ in range(steps):
        *one, wanted = plain(*one, batch)
        *two, value = split(*two, batch)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), two[0], one[0])
    return split.plan(*two, batch)


def test_gradients_have_the_numbers_of_plain_jit():
    model, meshes = MODELS["backward scan"], submeshes(2, (1,))
    params, batch = model.params(), model.batch()
    piped = mm.microbatch(jax.value_and_grad(mm.pipeline(model.loss, meshes)), size=4, argnum=1, reduce="mean")
    wanted = jax.jit(jax.value_and_grad(model.loss))(params, batch)
    got = mm.jit(piped)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted)


@pytest.mark.telling("scan", "u-net", "towers", "moe")
@pytest.mark.longer
@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_numbers_of_plain_jit(name):
    model, meshes = MODELS[name], submeshes(4, (1,))
    plan = assert_trains_alike(model.loss, mm.pipeline(model.loss, meshes), model.params(), model.batch())
    assert {k.submesh for k in plan.kernels} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.hand is not None])
def test_stages_are_even_and_send_no_more_than_a_person_would(name):
    model = MODELS[name]
    cuts = mm.pipeline(model.loss, submeshes(4, (1,))).cuts(model.params(), microbatch_of(model.batch()))
    assert cuts.slowest < UNEVEN.get(name, 1.1)
    assert cuts.sent <= model.hand


@pytest.mark.longer
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_stages_take_turns_on_submeshes(schedule):
    model, meshes = MODELS["mlp"], submeshes(2, (1,))
    placement = mm.schedules.get(schedule).placement(2)
    piped = mm.pipeline(model.loss, meshes, interleave=2, placement=placement)
    assert_trains_alike(model.loss, piped, model.params(), model.batch(), schedule=schedule)


@pytest.mark.parametrize(
    ("constrain", "axis", "options"),
    [
        (jax.lax.with_sharding_constraint, "data", {}),
        pytest.param(mm.with_sharding_constraint, "rows", {"logical_axes": {"rows": "data"}}, marks=pytest.mark.longer),
    ],
)
def test_constraints_lay_out_values_on_each_submesh(constrain, axis, options):
    def forward(params, x):
        for p in params:
            x = constrain(mlp_block(p, x), P(axis))
        return x

    params, x = MODELS["mlp"].params(), MODELS["mlp"].batch()["x"]
    meshes = submeshes(2, (2,))
    piped = mm.jit(mm.pipeline(forward, meshes, **options))
    y = piped(params, x)
    assert (y.sharding.spec, y.devices()) == (P("data"), set(meshes[1].devices.flat))
    np.testing.assert_allclose(y, jax.jit(plain_forward)(params, x), rtol=1e-4, atol=1e-6)


def plain_forward(params, x):
    for p in params:
        x = mlp_block(p, x)
    return x


def all_cuts(chain, stages):
    """The slowest stage and the bytes of every cut."""
    number = len(chain.costs)
    for inner in itertools.combinations(range(1, number), stages - 1):
        pieces = list(itertools.pairwise((0, *inner, number)))
        times = [chain.costs_of(a, b).time for a, b in pieces]
        yield max(times), sum(chain.received(a, b) for a, b in pieces)


@st.composite
def graphs(draw):
    """Operations that read any earlier results, and arguments that several may read."""
    number = draw(st.integers(4, 9))
    times = draw(st.lists(st.integers(1, 20), min_size=number, max_size=number))
    reads = [
        tuple({("arg", draw(st.integers(0, 3))), *draw(st.sets(st.integers(0, i - 1), max_size=2))}) if i else ()
        for i in range(number)
    ]
    size = {v: draw(st.integers(1, 50)) for v in (*range(number), *(("arg", k) for k in range(4)))}
    return Chain(tuple(LayerCosts(float(t)) for t in times), tuple(reads), tuple((i,) for i in range(number)), size)


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(2, 4))
def test_no_cut_is_much_more_even_or_as_even_with_fewer_bytes(chain, stages):
    found = cut_chain(chain, stages)
    every = list(all_cuts(chain, stages))
    least = min(slowest for slowest, _ in every)
    assert found.slowest <= (1 + SLACK) * least
    assert found.sent == min(sent for slowest, sent in every if slowest <= (1 + SLACK) * least)


def test_a_long_chain_is_cut_where_blocks_end():
    """80 blocks of 50 operations: a block hands on one small value, and keeps more alive inside."""
    reads = [((i - 1,) if i % 50 == 0 else (i - 1, i - i % 50)) if i else () for i in range(4000)]
    size = {i: 10.0 if i % 50 == 49 else 100.0 for i in range(4000)}
    chain = Chain((LayerCosts(1.0),) * 4000, tuple(reads), tuple((i,) for i in range(4000)), size)
    found = cut_chain(chain, 8)
    assert all(end % 50 == 0 for end in found.ends)
    assert (found.slowest, found.sent) == (500, 70)


def test_a_stage_fits_into_memory():
    """The first stage keeps two microbatches, the last one."""
    costs = tuple(LayerCosts(1.0, held=0.0, activation=10.0) for _ in range(6))
    chain = Chain(costs, ((),) * 6, ((),) * 6, {})
    fits = lambda stage, cost: (2 - stage) * cost.activation <= 40  # noqa: E731
    assert cut_chain(chain, 2, fits).ends == (0, 2, 6)
    assert cut_chain(chain, 2, lambda stage, cost: cost.activation <= 20) is None


def test_marks_inside_are_an_error():
    meshes = submeshes(2, (1,))
    marked = mm.pipeline(mm.task(MODELS["mlp"].loss, "mine", mesh=meshes[0]), meshes)
    with pytest.raises(mm.UsageError, match=r"pipeline cuts functions without marks, and this one has a task"):
        mm.jit(marked).plan(MODELS["mlp"].params(), MODELS["mlp"].batch())


def test_a_gradient_inside_is_told():
    model = MODELS["mlp"]
    with pytest.warns(UserWarning, match=r"unmarked.py:\d+: the function of pipeline takes a gradient itself"):
        mm.pipeline(jax.grad(model.loss), submeshes(2, (1,))).cuts(model.params(), model.batch())


@pytest.mark.parametrize(
    ("meshes", "options", "match"),
    [
        ([None], {}, "a mesh must be a jax.sharding.Mesh"),
        (2, {"interleave": 0}, "interleave must be at least 1"),
        (2, {"placement": (0, 2)}, "must name submeshes 0 to 1"),
        (2, {"memory": 10.0}, "no cut into 2 stages fits into 10 bytes on each submesh"),
        (2, {"interleave": 500}, "operations cannot make 1000 stages"),
    ],
)
def test_what_cannot_be_cut(meshes, options, match):
    given = submeshes(meshes, (1,)) if isinstance(meshes, int) else meshes
    model = MODELS["backward scan"]
    with pytest.raises(mm.UsageError, match=match):
        mm.pipeline(model.loss, given, **options).cuts(model.params(), microbatch_of(model.batch()))


def test_without_meshes_it_is_one_program():
    model = MODELS["mlp"]
    params, batch = model.params(), model.batch()
    one = mm.jit(jax.value_and_grad(mm.pipeline(model.loss, None)))
    jax.tree.map(
        np.testing.assert_array_equal, one(params, batch), jax.jit(jax.value_and_grad(model.loss))(params, batch)
    )


def test_the_table_names_lines_and_shares():
    model = MODELS["backward scan"]
    table = str(mm.pipeline(model.loss, submeshes(4, (1,))).cuts(model.params(), microbatch_of(model.batch())))
    assert re.search(r"1 +\d+ +2\d\.\d % .* 128 bytes  \S+unmarked.py:\d+, row 2 of 8", table)
    assert table.endswith("the slowest stage has 1.01 x the mean; 408 bytes are sent")
