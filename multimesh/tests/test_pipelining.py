"""Functions without marks, cut into stages: as even as can be, few bytes, and the numbers of plain jit."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from models import mlp_block
from multimesh.stages import pipelining
from multimesh.stages.balance import SLACK, WIDE_SLACK, Chain, cut_chain
from multimesh.stages.chains import chain_of, orders, work_of
from multimesh.stages.units import read
from pipelines import submeshes
from unmarked import MODELS, WIDTH, error, normal, regression

import multimesh as mm

TABLE = Path(__file__).with_name("cuts.csv")


def microbatch_of(batch):
    return jax.tree.map(lambda x: x[:2], batch)


def train_step(gradients):
    """A whole step, as a script for one device has it."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-4))

    def step(params, state, batch):
        value, grads = gradients(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer.init, step


def assert_steps_alike(init, step_fn, pipelined, params, batch):
    step_fn, split = jax.jit(step_fn), mm.jit(pipelined)
    one = two = (params, init(params))
    for _ in range(2):
        *one, reference = step_fn(*one, batch)
        *two, value = split(*two, batch)
        np.testing.assert_allclose(value, reference, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), two[0], one[0])
    return split.plan(*two, batch)


def in_microbatches(loss, schedule="1f1b"):
    return mm.microbatch(jax.value_and_grad(loss), size=2, argnum=1, schedule=schedule, reduce="mean")


def assert_trains_alike(loss, pipelined, params, batch, **options):
    init, step = train_step(in_microbatches(loss))
    return assert_steps_alike(init, step, train_step(in_microbatches(pipelined, **options))[1], params, batch)


@pytest.mark.longer
@pytest.mark.telling("towers", "moe")
@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_numbers_of_plain_jit(name):
    model, meshes = MODELS[name], submeshes(4, (1,))
    plan = assert_trains_alike(model.loss, mm.pipeline(model.loss, meshes), model.params(), model.batch())
    assert {k.submesh for k in plan.kernels} == {0, 1, 2, 3}


def most_even(model):
    """The slowest stage of the most even of all cuts into four, relative to the mean: by trying each of them."""
    params, batch = model.params(), microbatch_of(model.batch())
    graph = read(jax.make_jaxpr(model.loss)(params, batch), 4, range(len(jax.tree.leaves(params)))).forward
    best = np.inf
    for order in orders(graph):
        sums = np.cumsum([0, *chain_of(graph, order, work_of(graph, order)).times])
        for first in range(1, len(order) - 2):
            ends = np.arange(first + 1, len(order))
            middle = np.maximum(sums[first], (sums[ends] - sums[first])[:, None])
            last = np.maximum(sums[ends] - sums[ends][:, None], sums[-1] - sums[ends])
            slowest = np.maximum(middle, last)[np.triu_indices(len(ends), 1)].min()
            best = min(best, 4 * slowest / sums[-1])
    return best


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_even_and_send_no_more_than_a_person_would(name):
    """Within a tenth of the most even cut that there is; cuts.csv has all four numbers."""
    model = MODELS[name]
    cuts = mm.pipeline(model.loss, submeshes(4, (1,))).cuts(model.params(), microbatch_of(model.batch()))
    least = most_even(model)
    assert cuts.slowest <= 1.1 * least
    assert model.hand is None or cuts.sent <= model.hand
    by_hand = "-" if model.hand is None else model.hand
    assert f"{name},{cuts.slowest:.3f},{least:.3f},{cuts.sent:.0f},{by_hand}" in TABLE.read_text().splitlines()


@pytest.mark.parametrize(("differentiated", "ends"), [(False, 5), (True, 15)])
def test_independent_towers_run_at_once(differentiated, ends):
    """Submeshes 0 and 1 have one tower, 2 and 3 the other, and 3 the loss: nothing of either tower waits for the other.

    Four microbatches go through two stages in a row, not four, and the small loss: 4 + 1 times, each 1 forward and 2
    backward.
    """
    model = MODELS["towers"]
    cut = mm.pipeline(model.loss, submeshes(4, (1,)))
    step = mm.microbatch(jax.value_and_grad(cut) if differentiated else cut, size=2, argnum=1, reduce="mean")
    timeline = mm.jit(step).plan(model.params(), model.batch()).simulate({"F": 1, "B": 2})
    sent = {(hop.source, hop.target) for hop in timeline.transfers}
    assert sent == {(0, 1), (1, 3), (2, 3), *([(1, 0), (3, 1), (3, 2)] if differentiated else [])}
    first = {span.row: span for span in reversed(timeline.spans) if span.microbatch == 0}
    assert (first[0].start, first[0].end) == (first[2].start, first[2].end) == (0, 1)
    assert timeline.makespan == pytest.approx(ends, rel=0.01)


@pytest.mark.parametrize(("name", "kernels"), [("mamba", "F0 F0 B3 B3 B0"), ("vit", "F0 F0 B3 B3 B2 B0")])
def test_all_stages_share_the_kernels_of_their_layers(name, kernels):
    """An embedding or a loss, which one stage has beside them, is compiled apart. (ViT's loss reads one token.)"""
    model = MODELS[name]
    step = mm.jit(in_microbatches(mm.pipeline(model.loss, submeshes(4, (1,)))))
    compiled = step.lower(model.params(), model.batch()).compile()
    cells = {run.kernel: run.cell for run in compiled.plan.first_runs.values() if run.cell}
    assert len(cells) == 11
    assert [f"{c.phase}{c.stage}" for n, c in cells.items() if compiled.compile_seconds[n]] == kernels.split()


def test_stages_are_whole_where_no_compilation_serves_several(monkeypatch):
    monkeypatch.setattr(pipelining, "shares_executables", lambda devices: False)
    model = MODELS["mamba"]
    plan = mm.jit(in_microbatches(mm.pipeline(model.loss, submeshes(4, (1,))))).plan(model.params(), model.batch())
    assert sum(run.cell is not None for run in plan.first_runs.values()) == 7


@pytest.mark.longer
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_stages_take_turns_on_submeshes(schedule):
    model, meshes = MODELS["mlp"], submeshes(2, (1,))
    route = [meshes[n] for n in mm.schedules.get(schedule).placement(2)]
    piped = mm.pipeline(model.loss, route, interleave=4 // len(route))
    assert_trains_alike(model.loss, piped, model.params(), model.batch(), schedule=schedule)


@pytest.mark.parametrize(
    ("constrain", "axis", "options"),
    [
        (jax.lax.with_sharding_constraint, "data", {}),
        pytest.param(mm.with_sharding_constraint, "rows", {"logical_axes": {"rows": "data"}}, marks=pytest.mark.longer),
    ],
)
def test_constraints_lay_out_values_on_each_submesh(constrain, axis, options):
    def forward(params, x, constrain=constrain):
        for p in params:
            x = constrain(mlp_block(p, x), P(axis))
        return x

    params, x = MODELS["mlp"].params(), MODELS["mlp"].batch()["x"]
    meshes = submeshes(2, (2,))
    y = mm.jit(mm.pipeline(forward, meshes, **options))(params, x)
    assert (y.sharding.spec, y.devices()) == (P("data"), set(meshes[1].devices.flat))
    np.testing.assert_allclose(
        y, jax.jit(lambda *args: forward(*args, lambda x, _: x))(params, x), rtol=1e-4, atol=1e-6
    )


def all_cuts(chain, stages):
    """The slowest stage and the bytes of every cut."""
    number = len(chain.times)
    for inner in itertools.combinations(range(1, number), stages - 1):
        pieces = list(itertools.pairwise((0, *inner, number)))
        yield max(sum(chain.times[a:b]) for a, b in pieces), sum(chain.received(a, b) for a, b in pieces)


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
    return Chain(tuple(map(float, times)), tuple(reads), tuple((i,) for i in range(number)), size)


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(2, 4))
def test_no_cut_is_much_more_even_or_as_even_with_fewer_bytes(chain, stages):
    cut = cut_chain(chain, stages)
    cuts = list(all_cuts(chain, stages))
    least = min(slowest for slowest, _ in cuts)
    even, wide = (min(sent for slowest, sent in cuts if slowest <= (1 + s) * least) for s in (SLACK, WIDE_SLACK))
    assert cut.sent == (wide if 2 * wide <= even else even)
    assert cut.slowest <= (1 + (SLACK if cut.sent == even else WIDE_SLACK)) * least


def test_a_long_chain_is_cut_where_blocks_end():
    """80 blocks of 50 operations: a block hands on one small value, and keeps more alive inside."""
    reads = [((i - 1,) if i % 50 == 0 else (i - 1, i - i % 50)) if i else () for i in range(4000)]
    size = {i: 10.0 if i % 50 == 49 else 100.0 for i in range(4000)}
    chain = Chain((1.0,) * 4000, tuple(reads), tuple((i,) for i in range(4000)), size)
    cut = cut_chain(chain, 8)
    assert all(end % 50 == 0 for end in cut.ends)
    assert (cut.slowest, cut.sent) == (500, 70)


def adapted(adapters, frozen, batch):
    """Frozen layers, the first quarter of which have no adapters."""
    x = batch["x"]
    for i, w in enumerate(frozen):
        x = jnp.sin(x @ w + (x @ adapters[i - 2][0] @ adapters[i - 2][1] if i > 1 else 0.0))
    return error(x, batch["y"])


def adapters_and_weights():
    adapters = [(normal(i, WIDTH, 2), normal(i + 1, 2, WIDTH)) for i in range(6)]
    return adapters, [normal(i + 20, WIDTH, WIDTH) for i in range(8)]


def test_what_stages_hold_is_what_xla_is_given():
    """Frozen weights once; of trained ones the weight, its moments, and the gradient that a step makes."""
    (adapters, frozen), batch = adapters_and_weights(), microbatch_of(regression())
    optimizer = optax.adam(0.1)
    state = jax.tree.leaves(optimizer.init(adapters))[1:]  # without the number of steps

    def step(adapters, frozen, state, batch):
        _, grads = jax.value_and_grad(adapted)(adapters, frozen, batch)
        return grads, jax.tree.map(jnp.sin, (adapters, frozen, state))  # so that XLA drops no argument

    stats = jax.jit(step).lower(adapters, frozen, state, batch).compile().memory_analysis()
    grads = sum(leaf.nbytes for leaf in jax.tree.leaves(adapters))
    cuts = mm.pipeline(adapted, submeshes(4, (1,))).cuts(adapters, frozen, batch)
    assert sum(s.state for s in cuts.stages) == stats.argument_size_in_bytes + grads
    stages = mm.pipeline(adapted, submeshes(4, (1,)), argnums=()).cuts(adapters, frozen, batch).stages
    assert sum(s.state for s in stages) == sum(leaf.nbytes for leaf in jax.tree.leaves((adapters, frozen, batch)))


def test_marks_inside_are_an_error():
    meshes = submeshes(2, (1,))
    marked = mm.pipeline(mm.task(MODELS["mlp"].loss, "mine", mesh=meshes[0]), meshes)
    with pytest.raises(mm.UsageError, match=r"pipeline cuts functions without marks, and this one has a task"):
        mm.jit(marked).plan(MODELS["mlp"].params(), MODELS["mlp"].batch())


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.longer) for n in ("backward scan", "few rows", "u-net"))]
)
def test_a_whole_train_step_is_cut(name):
    """It has gradient, clipping and optimizer; each backward pass runs on the submesh of its stage."""
    model = MODELS[name]
    init, step = train_step(jax.value_and_grad(model.loss))
    plan = assert_steps_alike(init, step, mm.pipeline(step, submeshes(4, (1,))), model.params(), model.batch())
    assert {k.submesh for k in plan.kernels if any(op.backward for op in k.ops)} >= {0, 1, 2}


@pytest.mark.telling("gpt")
@pytest.mark.longer
@pytest.mark.parametrize("name", ["mlp", "gpt", "encoder-decoder", "mamba", "checkpointed"])
def test_a_train_step_with_microbatches_is_cut(name):
    """The step is given whole, and its loop runs by the schedule: 1F1B, as where the loss alone is given."""
    model, meshes = MODELS[name], submeshes(4, (1,))
    init, step_of = train_step(jax.value_and_grad(model.loss))
    _, step = train_step(in_microbatches(model.loss))
    plan = assert_steps_alike(init, step_of, mm.pipeline(step, meshes), model.params(), model.batch())
    _, loss_step = train_step(in_microbatches(mm.pipeline(model.loss, meshes)))
    expected_plan = mm.jit(loss_step).plan(model.params(), init(model.params()), model.batch())
    if name != "checkpointed":  # one checkpoint around all layers is one operation of the backward pass
        cells = [[run.cell for run in p.runs if run.submesh == 1 and run.cell] for p in (plan, expected_plan)]
        assert cells[0] == cells[1]


def test_where_a_train_step_is_cut():
    model, meshes = MODELS["mlp"], submeshes(2, (1,))
    loop = in_microbatches(model.loss)
    params, batch = model.params(), model.batch()
    cuts = mm.pipeline(loop, meshes).cuts(params, batch)
    assert cuts.stages[1].time == pytest.approx(cuts.stages[0].time, rel=0.1)
    assert mm.jit(mm.pipeline(loop, meshes)).plan(params, batch).cuts == (cuts,)


def test_a_loop_that_jax_jit_keeps_is_told():
    model = MODELS["mlp"]
    loop = jax.jit(in_microbatches(model.loss))
    mm.jit(mm.pipeline(loop, submeshes(2, (1,)))).plan(model.params(), model.batch())
    with pytest.raises(mm.UsageError, match="which keeps its trace; drop that"):
        mm.jit(mm.pipeline(loop, submeshes(4, (1,)))).plan(model.params(), model.batch())


@pytest.mark.parametrize(
    ("meshes", "options", "match"),
    [
        ([None], {}, "a mesh must be a jax.sharding.Mesh"),
        (2, {"argnums": "params"}, "argnums must be numbers of arguments"),
        (2, {"interleave": 500}, "operations cannot make 1000 stages"),
    ],
)
def test_what_cannot_be_cut(meshes, options, match):
    mesh_list = submeshes(meshes, (1,)) if isinstance(meshes, int) else meshes
    model = MODELS["backward scan"]
    with pytest.raises(mm.UsageError, match=match):
        mm.pipeline(model.loss, mesh_list, **options).cuts(model.params(), microbatch_of(model.batch()))


def test_argnums_are_those_of_the_function_of_a_loop_inside():
    gradient = jax.value_and_grad(lambda x, k, w: k * jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w)), argnums=2)

    def step(w, x):
        return mm.microbatch(gradient, size=2, argnum=0, reduce="mean")(x, jnp.float32(2), w)

    cuts = mm.pipeline(step, submeshes(2, (1,)), argnums=2).cuts(np.eye(4), np.ones((4, 4)))
    assert len(cuts.stages) == 2


def test_a_function_that_returns_nothing_is_told():
    def forgets(w, x):
        jnp.sum(w * x)

    piped = mm.pipeline(forgets, submeshes(2, (1,)))
    with pytest.raises(mm.UsageError, match="pipeline: forgets returns nothing of its arrays"):
        piped.cuts(np.ones(3), np.ones(3))


def test_a_scan_over_time_that_several_stages_run_is_told():
    """A step that first samples: each stage reads all weights. Layers in a scan, whose rows are weights, are none."""

    def sampled(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None), x, None, length=6)[0].sum()

    def layers(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    w, x = np.ones((8, 4, 4), np.float32), np.ones((4, 4), np.float32)
    piped = mm.pipeline(sampled, submeshes(2, (1,)))
    assert "test_pipelining.py" in piped.cuts(w, x).over_time
    with pytest.warns(UserWarning, match=r"each step of this scan reads the same weights.* give it the loss alone"):
        mm.jit(piped).plan(w, x)
    assert not mm.pipeline(layers, submeshes(2, (1,))).cuts(w, x).over_time


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
    assert re.search(r"1( +\d+){3} +2\d\.\d % .* 128 bytes  \S+unmarked.py:\d+, row 2 of 8", table)
    end = "the slowest stage has 1.00 x the mean; 408 bytes are sent\nstages 0 to 2 are equal, and share their kernels"
    assert table.endswith(end)
    assert max(map(len, table.splitlines())) <= 120


def test_a_plan_tells_where_its_function_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    model, meshes = MODELS["mlp"], submeshes(2, (1,))

    def plan(cut, schedule="gpipe"):
        step = mm.microbatch(jax.checkpoint(jax.value_and_grad(cut)), size=2, argnum=1, schedule=schedule)
        return mm.jit(step).plan(model.params(), model.batch())

    cut = mm.pipeline(model.loss, meshes)
    lines = str(plan(cut)).splitlines()
    at = lines.index(f"mlp is cut into 2 stages; the slowest has {plan(cut).cuts[0].slowest:.2f} x the mean")
    assert re.fullmatch(r" +0  48\.\d %  \S*models.py:\d+: .*p\[.up.\].*", lines[at + 2])
    assert len(str(plan(cut, "1f1b")).splitlines()) == len(lines)  # JAX had kept the trace
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(plan(cut)).splitlines())) <= 60
    other = mm.pipeline(lambda p, b: model.loss(p, b), meshes)
    assert plan(other).cuts[0].stages == plan(cut).cuts[0].stages
    assert plan(other).fingerprint() == plan(cut).fingerprint()
