"""Every schedule runs in the order of its table, within its bound of live activations, and computes the same."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from measure import peak_bytes
from models import DROPOUT, MLP, MODELS, MOE, SKIP, TRANSFORMER, plain, squared_error
from multimesh.commands import forecast
from multimesh.schedules import Cell
from pipelines import Split, assert_same, check_gradient, gradient, scopes, submeshes

import multimesh as mm
from multimesh import schedules

ROWS, SIZE = 16, 4
NAMES = tuple(name for name in schedules.names() if name != "fill-drain")
CUSTOM = [  # two stages, four microbatches: the first stage runs two ahead
    ["F0", "F0", "F0", "B0", "W0", "F0", "B0", "B0", "W0", "W0", "B0", "W0"],
    ["F1", "B1", "F1", "B1", "W1", "W1", "F1", "B1", "W1", "F1", "B1", "W1"],
]


def split_for(schedule, stages):
    """As many stages on each submesh as the schedule is meant for, and where it says."""
    kind = schedules.get(schedule)
    count = stages // kind.usual
    return Split(submeshes(count, (2,)), placement=kind.placement(count))


@pytest.mark.parametrize(
    ("model", "schedule", "where"),
    [
        (MLP, "interleaved", "outside"),
        (MLP, "eager-1f1b", "inside"),
        (MLP, "kimi-k2", "outside"),
        (MLP, "zb-h2", "outside"),
        (MLP, "interleaved-zb", "inside"),
        (SKIP, "zb-v", "inside"),
        (MLP, "dualpipe-v", "outside"),
        (MLP, "looped-bfs", "inside"),
        (MLP, "zb-h1", "inside"),
        (SKIP, "zb-h1", "outside"),
        (SKIP, "wavefront", "inside"),
        pytest.param(DROPOUT, "wavefront", "outside", marks=pytest.mark.longer),
        (MLP, "prefetch-wavefront", "inside"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_gradients(model, schedule, where):
    check_gradient(model, split_for(schedule, 4), 4, where=where, schedule=schedule)


@pytest.mark.full
@pytest.mark.parametrize("rows", [ROWS, 6 * SIZE], ids=["m=4", "m=6"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_gradients_of_every_model(model, schedule, where, rows):
    check_gradient(model, split_for(schedule, 4), 4, where=where, schedule=schedule, rows=rows)


@pytest.mark.telling("zb-v-2-4")
@pytest.mark.parametrize(("p", "m"), [(p, turns * p) for p in (2, 4, 8) for turns in (1, 2, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_numerics_and_live_bytes(name, p, m):
    """Devices hold the batch, in microbatches, and what simulated peaks come to: inputs of stages, results of layers.

    Bytes are measured from the live arrays beyond the arguments of a step.
    """
    schedule, width, rows = schedules.get(name), 16, 256
    layers, stages = 2 // schedule.usual, p * schedule.usual
    split, draw = Split(submeshes(p, (1,)), placement=schedule.placement(p)), np.random.default_rng(0).normal

    def loss(stage, weights, x):
        for s in range(stages):
            rows_of = weights[s * layers : (s + 1) * layers]
            x = stage(s, lambda rows_of, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), rows_of, x))(rows_of, x)
        return stage(stages - 1, lambda x: jnp.mean(x**2))(x)

    weights = [(draw(size=(width, width)) / width**0.5).astype(np.float32) for _ in range(2 * p)]
    x = draw(size=(m * rows, width)).astype(np.float32)
    pipelined, reference = (jax.value_and_grad(functools.partial(loss, stage)) for stage in (split, plain))
    step = mm.jit(mm.microbatch(pipelined, size=rows, argnum=1, schedule=schedule, reduce="mean"))
    args = split.place((weights, x), ([(n // layers,) for n in range(2 * p)], (0,)))
    assert_same(step(*args), jax.jit(reference)(weights, x))
    live = peak_bytes(lambda: jax.block_until_ready(step(*args)), every=max(10, p * m // 8))
    peaks = forecast.simulate_schedule(name, forecast.Shape(p, schedule.usual, m)).peaks
    for mesh, peak in zip(split.meshes, peaks, strict=True):
        assert live[mesh.devices.flat[0]] <= 4 * rows * width * (m + 1.25 * peak * (1 + layers) * schedule.usual) + 1e5


@pytest.mark.longer
def test_the_order_does_not_change_a_bit():
    """Each sums over microbatches in the same order. (1F1B and zb-h1 join or split programs, which may round.)"""
    split = Split(submeshes(2, (1,)))
    args = MLP.init(4), MLP.batch(ROWS, 0)

    def run(schedule):
        return jax.device_get(mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS, schedule=schedule))(*args))

    first = run("gpipe")
    for schedule in ("wavefront", "prefetch-wavefront"):
        jax.tree.map(np.testing.assert_array_equal, run(schedule), first)


@pytest.mark.longer
def test_scanned_layers_may_be_constrained_and_drop_out():
    """zb-h1 splits the scan on a submesh of 2 x 2 devices; layouts and random bits stay those of each layer."""
    split = Split(submeshes(2, (2, 2)))
    axes = {"rows": "data", "hidden": "model"}
    params = [jax.tree.map(lambda *w: np.stack(w), *MLP.init(3)["stages"]) for _ in range(2)]
    batch = DROPOUT.batch(8, 0)

    def layer(carry, w):
        x, keys = carry
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.75, x.shape[1:]))(keys)
        hidden = mm.with_sharding_constraint(jnp.tanh(x @ w["up"] + w["bias"]), P("rows", "hidden"))
        x = mm.with_sharding_constraint(x + jnp.where(keep, hidden @ w["down"], 0), P("rows"))
        return (x, jax.vmap(jax.random.fold_in, (0, None))(keys, 1)), None

    def make(place):
        def loss(params, batch):
            x = batch["x"]
            for s, w in enumerate(params):
                x = place(s, lambda w, x, keys: jax.lax.scan(layer, (x, keys), w)[0][0])(w, x, batch["key"])
            return squared_error(x, batch["y"])

        return mm.microbatch(jax.value_and_grad(loss), size=4, argnum=1, schedule="zb-h1")

    f = mm.jit(make(lambda s, fn: mm.task(fn, f"stage{s}", mesh=split.mesh(s), logical_axes=axes)))
    assert_same(f(params, batch), jax.jit(make(lambda _, fn: fn))(params, batch))
    (later,) = {k for k in f.plan(params, batch).kernels if k.name.startswith("W1")}
    # The sums over rows come once, after the loop: the scan stacks their terms behind its layers.
    assert sorted(op.prim.name for op in later.ops) == ["scan", *["transpose"] * 3]


def plan_of(schedule, stages, count, chunks=1, model=MLP, placement=(), gradient=jax.value_and_grad):
    count_of = stages // chunks
    on = placement or schedules.get(schedule).placement(count_of)
    split = Split(submeshes(count_of, (1,)), placement=on)
    f = mm.microbatch(gradient(lambda p, b: model.loss(p, b, split)), size=2, argnum=1, schedule=schedule)
    return mm.jit(f).plan(model.init(stages), model.batch(2 * count, 0))


def cells(plan):
    """Cells of each submesh in the order of the plan's instructions."""
    rows = collections.defaultdict(list)
    for step in plan.instructions:
        if step.kind == "RUN" and step.phase is not None:
            rows[step.submesh].append(Cell(step.phase, step.stage, step.microbatch))
    return [rows[rank] for rank in sorted(rows)]


def as_dispatched(row):
    """A row with phases that always follow each other as one, called B; B and W only where nobody waits for B."""
    row = list(row)
    for first, second, dropped in ("FBF", "BWW"):
        for stage in {c.stage for c in row if c.phase == first}:
            following = dict(itertools.pairwise(row))
            cells = [c for c in row if (c.phase, c.stage) == (first, stage)]
            if (second == "B" or not stage) and all(
                following.get(c) == Cell(second, stage, c.microbatch) for c in cells
            ):
                row = [c for c in row if (c.phase, c.stage) != (dropped, stage)]
    return row


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks"),
    [
        ("zb-h1", 4, 1),
        ("interleaved", 4, 2),
        ("interleaved", 6, 3),
        ("kimi-k2", 4, 2),
        ("zb-h2", 3, 1),
        ("interleaved-zb", 6, 3),
        ("zb-v", 6, 2),
        ("dualpipe-v", 6, 2),
        ("1f1b", 4, 1),
        ("1f1b", 4, 2),
        ("wavefront", 4, 1),
        ("wavefront", 6, 3),
        ("gpipe", 4, 2),
    ],
)
@pytest.mark.parametrize("count", [4, 5, 8])
def test_the_order_of_the_plan_is_the_tables(schedule, stages, chunks, count):
    plan = plan_of(schedule, stages, count, chunks)
    table = schedules.get(schedule).table(stages // chunks, chunks, count, True)
    assert cells(plan) == [as_dispatched(row) for row in table]


@pytest.mark.parametrize("model", [SKIP, TRANSFORMER, MOE], ids=lambda m: m.name)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_skips_tied_weights_and_auxiliary_losses_keep_the_table(schedule, model):
    plan = plan_of(schedule, 3, 5, model=model)
    assert cells(plan) == [as_dispatched(row) for row in schedules.get(schedule).table(3, 1, 5, True)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "wavefront"])
def test_a_submesh_that_comes_again_has_a_second_stage(schedule):
    """Stages 0 to 2 on submeshes 0, 1 and 0 have the table of two stages a submesh, without the cells of stage 3."""
    plan = plan_of(schedule, 3, 8, model=SKIP, placement=(0, 1, 0))
    table = schedules.get(schedule).table(2, 2, 8, True)
    assert cells(plan) == [as_dispatched(c for c in row if c.stage < 3) for row in table]


LINEAR = {2: lambda p, x, y: jnp.sum(x @ p["up"]) + 0 * y.sum()}


def test_a_last_stage_without_a_forward_keeps_the_table():
    """The step asks only for the gradient of a sum of products."""
    linear = dataclasses.replace(MLP, loss=lambda p, b, stage: MLP.loss(p, b, lambda s, f: stage(s, LINEAR.get(s, f))))
    plan = plan_of("1f1b", 3, 4, model=linear, gradient=jax.grad)
    assert cells(plan) == [as_dispatched(row) for row in schedules.get("1f1b").table(3, 1, 4, True)]


def test_a_custom_table_is_the_order_of_the_plan():
    """Nothing waits for the backward of stage 0, so all of it is W."""
    first, second = schedules.custom(CUSTOM).rows
    order = cells(plan_of(schedules.custom(CUSTOM), 2, 4))
    assert order == [[c for c in first if c.phase != "B"], as_dispatched(second)]


V = (
    [f"{c}{s}" for c, s in zip("FFFFBBBB", (0, 0, 5, 5, 5, 5, 0, 0), strict=True)],
    [f"{c}{s}" for c, s in zip("FFFFBBBB", (1, 1, 4, 4, 4, 4, 1, 1), strict=True)],
    [f"{c}{s}" for c, s in zip("FFFFBBBB", (2, 2, 3, 3, 3, 3, 2, 2), strict=True)],
)


@pytest.mark.parametrize("form", [pytest.param("scope", marks=pytest.mark.full), "wrapper"])
@pytest.mark.parametrize("where", ["outside", pytest.param("inside", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=() if m is SKIP else pytest.mark.full) for m in MODELS],
    ids=lambda m: m.name,
)
def test_a_table_says_where_each_stage_lives(model, where, form):
    """Stage s and 5 - s on one submesh: the two at the turn, one after another, stay apart."""
    schedule = schedules.custom(V)
    split = Split(submeshes(3, (2,)), form, schedule.placement(3))
    step, args = check_gradient(model, split, 6, where=where, schedule=schedule, rows=8)
    with scopes(split, 6):
        assert cells(step.plan(*args)) == [as_dispatched(row) for row in schedule.rows]


@pytest.mark.parametrize(
    ("placement", "missing"), [((0, 1, 2), 3), ((0, 1, 2, 0, 1, 2), 3), ((0, 1, 2, 1, 0), 3)], ids=str
)
def test_a_loop_that_lacks_a_stage_of_a_table_is_told_where_each_lives(placement, missing):
    split = Split(submeshes(3, (1,)), placement=placement)
    loss = jax.value_and_grad(lambda p, b: MLP.loss(p, b, split))
    f = mm.microbatch(loss, size=2, argnum=1, schedule=schedules.custom(V))
    with pytest.raises(mm.UsageError, match=f"on submeshes 0 1 2 2 1 0, .* nothing to run as stage {missing}; give"):
        mm.jit(f).plan(MLP.init(len(placement)), MLP.batch(4, 0))


def test_a_wrong_table_is_refused_before_anything_is_compiled():
    swapped = [CUSTOM[0], ["B1", "F1", *CUSTOM[1][2:]]]
    with pytest.raises(
        mm.UsageError, match=r"test_schedules\.py:\d+: .*submesh 1, position 0: B1 of microbatch 0 waits"
    ):
        plan_of(schedules.custom(swapped), 2, 4)


def fronts_of_transfers(schedule, model=MLP):
    """Return the fronts of each transfer: of the value's task, of the issue (that of the next task), of its reader."""
    plan = plan_of(schedule, 3, 4, model=model)
    front = schedules.get(schedule).front
    front_of, fronts = {}, []
    steps = plan.instructions
    at = [front(Cell(s.phase, s.stage, s.microbatch), 3, 1) if s.kind == "RUN" and s.phase else None for s in steps]
    for n, step in enumerate(steps):
        if at[n] is not None:
            front_of |= dict.fromkeys(step.outs, at[n])
        if step.kind == "SEND":
            arrays = plan.transfers[step.transfer].outs
            readers = [a for a, s in zip(at, steps, strict=True) if a is not None and set(s.ins) & set(arrays)]
            if readers and step.microbatch is not None:
                following = next(a for a in at[n:] if a is not None)
                before = next(a for a in reversed(at[:n]) if a is not None)
                fronts.append((front_of[step.ins[0]], before, following, min(readers)))
    return fronts


@pytest.mark.parametrize("model", [MLP, SKIP], ids=lambda m: m.name)
def test_wavefront_transfers_what_a_front_reads_when_it_starts_and_its_other_form_one_front_ahead(model):
    fronts = fronts_of_transfers("wavefront", model)
    assert fronts
    assert all(before < reader == following for _, before, following, reader in fronts)
    fronts = fronts_of_transfers("prefetch-wavefront", model)
    assert fronts
    for source, before, following, reader in fronts:
        if source == reader - 1:  # at once
            assert before == source
        else:  # at the start of the front before
            assert before < reader - 1 == following
