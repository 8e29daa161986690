"""Layers stacked in one array: each stage has its rows, of weights and moments too, and the caller has one array."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, microbatched, submeshes

import multimesh as mm

LAYERS, WIDTH, STAGES, SIZE = 8, 16, 4, 4
MESHES = submeshes(STAGES)
draw = np.random.default_rng(0).normal
WEIGHTS = {
    "kernel": (draw(size=(LAYERS, WIDTH, WIDTH)) / 4).astype("float32"),
    "bias": np.zeros((LAYERS, WIDTH), "float32"),
}
BATCH = {name: draw(size=(16, WIDTH)).astype("float32") for name in "xy"}
STATE = sum(w.nbytes for w in WEIGHTS.values())


def layer(x, w):
    return x + jnp.tanh(x @ w["kernel"] + w["bias"]), None


def error(x, batch):
    return jnp.mean(jnp.square(x - batch["y"]))


def scanned(params, batch):
    return error(jax.lax.scan(layer, batch["x"], params)[0], batch)


def part(params, start, stop):
    return jax.tree.map(lambda a: a[start:stop], params)


def by_hand(cut):
    """Tasks of two layers, whose rows are taken as ``cut`` says: outside of the task, inside, or one by one."""

    def loss(params, batch):
        x = batch["x"]
        for s, mesh in enumerate(MESHES):
            run = mm.task(lambda p, x: jax.lax.scan(layer, x, p)[0], mesh=mesh)
            one = mm.task(lambda p, x: layer(x, p)[0], mesh=mesh)
            rows = slice(2 * s, 2 * s + 2)
            if cut == "outside":
                x = run(part(params, rows.start, rows.stop), x)
            elif cut == "inside":
                x = mm.task(
                    lambda p, x, m=rows: jax.lax.scan(layer, x, part(p, m.start, m.stop))[0],
                    mesh=mesh,
                )(params, x)
            else:
                for row in (2 * s, 2 * s + 1):
                    x = one(jax.tree.map(lambda a, row=row: a[row], params), x)
        return mm.task(error, mesh=MESHES[-1])(x, batch)

    return loss


def step_of(loss, optimizer=None, loop=mm.microbatch, **options):
    optimizer = optimizer or optax.adam(1e-3)

    def step(params, state, batch):
        value, grads = loop(jax.value_and_grad(loss), size=SIZE, argnum=1, **options)(params, batch)
        value, grads = jax.tree.map(lambda x: x / 4, (value, grads))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def bytes_of(tree, meshes=MESHES):
    """Bytes of arrays on the first device of each submesh."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return [sum(s.data.nbytes for s in shards if s.device == mesh.devices.flat[0]) for mesh in meshes]


def check(loss=None, optimizer=None, params=WEIGHTS, reference=scanned, meshes=MESHES, steps=3, **options):
    """Compare steps with those of plain ``jax.jit``. Return the function and its last parameters and state."""
    optimizer = optimizer or optax.adam(1e-3)
    step = mm.jit(step_of(loss or mm.pipeline(reference, meshes), optimizer, **options), donate_argnums=(0, 1))
    reference_step = jax.jit(step_of(reference, optimizer, microbatched))
    actual, expected = (params, optimizer.init(params)), (params, optimizer.init(params))
    actual = jax.device_get(actual)
    for _ in range(steps):
        *actual, value = step(*actual, BATCH)
        *expected, reference_value = reference_step(*expected, BATCH)
        np.testing.assert_allclose(value, reference_value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-6)
    assert len(step.compiled) == 1  # what it returns is what it takes
    return step, actual


def assert_even(actual, meshes=MESHES, copies=3):
    """Each submesh holds its part of weights and moments, give or take scalars."""
    assert max(bytes_of(actual, meshes)) <= copies * STATE / len(meshes) + 16


@pytest.mark.telling("1f1b", "zb-h1")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_each_stage_holds_its_rows(schedule):
    step, (params, state) = check(schedule=schedule)
    assert_even((params, state))
    for x in (*params.values(), *state[0].mu.values(), *state[0].nu.values()):
        assert x.sharding == NamedSharding(Mesh(np.stack([m.devices for m in MESHES]), ("stage", "data")), P("stage"))
    lowered = step.lower(params, state, BATCH)
    arguments = [memory.arguments for memory in lowered.memory_estimate()]
    assert max(arguments) <= 3 * STATE / STAGES + BATCH["x"].nbytes + 64  # scalars too
    assert lowered.plan.traffic()[1] == 2 * 3 * BATCH["x"].nbytes  # rows only, forward and back
    assert all(slot.shape[:1] != (LAYERS,) for slot in lowered.plan.slots)


@pytest.mark.longer
def test_state_says_so():
    """``cuts`` of the function and the plan's arguments agree."""
    cuts = mm.pipeline(scanned, MESHES).cuts(WEIGHTS, {k: x[:SIZE] for k, x in BATCH.items()})
    _, (params, state) = check()
    estimates = [stage.state for stage in cuts.stages]
    for estimate, real in zip(estimates, bytes_of((params, state)), strict=True):
        assert abs(estimate * 3 / 4 - real) <= 4 * SIZE * WIDTH + 16  # of four states a gradient is no argument


OPTIMIZERS = {
    "clip, decay": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, weight_decay=0.1)),
    "average": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "several steps": optax.MultiSteps(optax.adamw(1e-3), 2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "ratios": optax.lamb(1e-3),
    "muon": optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda w: optax.contrib.MuonDimensionNumbers(1, 2) if w.ndim == 3 else None, params
        ),
    ),
}


@pytest.mark.longer
@pytest.mark.telling("ratios", "clip, decay", "several steps", "muon")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_run_where_rows_are(name):
    """Muon's loop over all layers runs on one stage; what it makes returns to the rows."""
    step, actual = check(optimizer=OPTIMIZERS[name])
    assert max(bytes_of(actual)) - min(bytes_of(actual)) <= 64
    plan = step.compiled[0].plan
    assert name == "muon" or max(plan.slots[s].nbytes for t in plan.transfers for s in t.ins) <= 4 * SIZE * WIDTH


@pytest.mark.longer
def test_factored_moments():
    step, actual = check(optimizer=optax.adafactor(1e-2, min_dim_size_to_factor=4))
    assert max(bytes_of(actual)) < 1.3 * STATE / STAGES
    plan = step.compiled[0].plan
    assert max(plan.slots[s].nbytes for t in plan.transfers for s in t.ins) <= 4 * SIZE * WIDTH


@pytest.mark.longer
@pytest.mark.telling("outside", "rows")
@pytest.mark.parametrize("cut", ["outside", "inside", "rows"])
def test_rows_taken_by_hand(cut):
    _, actual = check(by_hand(cut))
    assert_even(actual)


@pytest.mark.longer
def test_casts_before_the_layers():
    def cast(params, batch):
        return scanned(jax.tree.map(lambda w: w.astype("bfloat16").astype("float32"), params), batch)

    step = mm.jit(step_of(mm.pipeline(cast, MESHES)))
    actual = step(WEIGHTS, optax.adam(1e-3).init(WEIGHTS), BATCH)
    assert_even(actual[:2])


def test_donated_blocks_are_written_in_place():
    step, (params, state) = check()
    before = [shard.data.unsafe_buffer_pointer() for shard in params["kernel"].addressable_shards]
    new, *_ = step(params, state, BATCH)
    assert params["kernel"].is_deleted()
    assert state[0].mu["bias"].is_deleted()
    assert [shard.data.unsafe_buffer_pointer() for shard in new["kernel"].addressable_shards] == before


@pytest.mark.longer
@pytest.mark.telling("own mesh", "one device")
@pytest.mark.parametrize("case", ["own mesh", "first submesh", "one device"])
def test_arrays_that_lie_elsewhere(case):
    grid = Mesh(np.stack([m.devices for m in MESHES]), ("pp", "data"))
    layout = {
        "own mesh": NamedSharding(grid, P("pp")),
        "first submesh": NamedSharding(MESHES[0], P()),
        "one device": jax.devices()[3],
    }[case]
    params = jax.device_put(WEIGHTS, layout)
    step = mm.jit(step_of(mm.pipeline(scanned, MESHES)))
    actual = step(params, optax.adam(1e-3).init(params), BATCH)
    assert_same(actual, jax.jit(step_of(scanned, loop=microbatched))(WEIGHTS, optax.adam(1e-3).init(WEIGHTS), BATCH))
    assert_even(actual[:2])


@pytest.mark.longer
def test_layouts_within_a_stage():
    """Columns over the devices of a stage, as arguments have them, and as ``in_shardings`` say."""
    spec = {"kernel": P(None, None, "data"), "bias": P(None, "data")}
    where = {name: NamedSharding(MESHES[0], s) for name, s in spec.items()}
    step = mm.jit(jax.value_and_grad(mm.pipeline(scanned, MESHES)))
    value, grads = step(jax.device_put(WEIGHTS, where), BATCH)
    assert_same((value, grads), jax.jit(jax.value_and_grad(scanned))(WEIGHTS, BATCH))
    assert grads["kernel"].sharding.spec == P("stage", None, "data")
    shardings = {name: g.sharding for name, g in grads.items()}
    other = mm.jit(jax.value_and_grad(mm.pipeline(scanned, MESHES)), in_shardings=(shardings, None))
    assert other(WEIGHTS, BATCH)[1]["bias"].sharding == shardings["bias"]


def test_compiled_says_where_arguments_and_results_are():
    loss = mm.pipeline(scanned, MESHES)
    compiled = mm.jit(jax.value_and_grad(loss)).lower(WEIGHTS, BATCH).compile()
    (params, _), _ = compiled.input_shardings
    placed = jax.device_put(WEIGHTS, params)
    _, grads = compiled(placed, BATCH)
    assert {name: g.sharding for name, g in grads.items()} == compiled.output_shardings[1] == params
    assert compiled.profile(placed, BATCH, repeats=1).costs


@pytest.mark.longer
def test_derived_layouts():
    def constrained(params, batch):
        def one(x, w):
            kernel = mm.with_sharding_constraint(w["kernel"], P(None, "columns"))
            return x + jnp.tanh(x @ kernel + w["bias"]), None

        return error(jax.lax.scan(one, batch["x"], params)[0], batch)

    loss = mm.pipeline(constrained, MESHES, logical_axes={"columns": "data"})

    def init():
        keys = jax.random.split(jax.random.key(0), LAYERS)
        kernel = jax.vmap(lambda key: jax.random.normal(key, (WIDTH, WIDTH)) / 4)(keys)
        return {"kernel": kernel, "bias": jnp.zeros((LAYERS, WIDTH))}

    step, make = mm.parallelize(jax.value_and_grad(loss), init_params=init, initial_batch=BATCH)
    params = make()
    assert bytes_of(params) == [sum(bytes_of(params)) // STAGES] * STAGES
    assert params["kernel"].sharding.mesh.axis_names == ("stage", "data")
    actual = step(params, BATCH)
    assert_same(actual, jax.jit(jax.value_and_grad(scanned))(jax.device_get(init()), BATCH))


def two_stages_each(schedule):
    """The mesh of each of eight stages."""
    route = mm.schedules.get(schedule).placement(STAGES)
    return [MESHES[route[s % len(route)]] for s in range(2 * STAGES)]


@pytest.mark.longer
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe-v"])
def test_two_stages_on_a_submesh(schedule):
    """An array has one run of rows on a device, so others are sent, and a line says what to do."""
    loss = mm.pipeline(scanned, two_stages_each(schedule))
    with pytest.warns(UserWarning, match=r"params\['kernel'\]: 6 of its 8 rows are sent in each call.* list of arrays"):
        _, actual = check(loss, schedule=schedule)
    assert_even(actual)


def join(of, parts, batch):
    return of(jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts), batch)


@pytest.mark.longer
@pytest.mark.telling("ends1")
@pytest.mark.parametrize("ends", [(0, 3, 6, 8), (0, 2, 4, 5, 8)])
def test_a_list_of_stacks(ends):
    """The remedy: an array for each stage, which the function joins."""
    parts = [part(WEIGHTS, a, b) for a, b in itertools.pairwise(ends)]
    loss = mm.pipeline(scanned, MESHES[:3])
    step, (params, _) = check(functools.partial(join, loss), params=parts, reference=functools.partial(join, scanned))
    if len(ends) == 4:  # as the three stages are cut
        for p, mesh in zip(params, MESHES, strict=False):
            assert p["kernel"].sharding.device_set == set(mesh.devices.flat)
        plan = step.compiled[0].plan
        assert max(plan.slots[s].nbytes for t in plan.transfers for s in t.ins) <= 4 * SIZE * WIDTH


@pytest.mark.longer
def test_a_list_for_two_stages_on_a_submesh():
    parts = [part(WEIGHTS, row, row + 1) for row in range(LAYERS)]
    loss = mm.pipeline(scanned, two_stages_each("dualpipe-v"))
    _, (params, state) = check(
        functools.partial(join, loss),
        params=parts,
        reference=functools.partial(join, scanned),
        schedule="dualpipe-v",
    )
    assert_even((params, state))


@pytest.mark.longer
def test_rows_that_submeshes_do_not_divide():
    with pytest.warns(UserWarning, match=r"its 8 rows are read on 3 submeshes, which do not divide them; give a list"):
        check(meshes=MESHES[:3])


@pytest.mark.longer
def test_uneven_stages():
    """Six rows, two and a half of the head, in blocks of four: two rows of the first stage lie on the second."""

    def headed(params, batch):
        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        for _ in range(2):
            x = x + jnp.tanh(x @ params["head"]) @ params["head"].T
        return error(x, batch)

    params = {"layers": WEIGHTS, "head": (draw(size=(WIDTH, 2 * WIDTH)) / 4).astype("float32")}
    with pytest.warns(UserWarning, match=r"2 of its 8 rows are sent in each call"):
        _, (actual, _) = check(params=params, reference=headed, meshes=MESHES[:3])
    assert bytes_of(actual["layers"], MESHES[:2]) == [STATE // 2, STATE // 2]


def test_rows_that_two_stages_share_make_no_stack():
    """A tied weight, of which the first and the last task read the same row, stays on one submesh."""

    def loss(w, batch):
        first, last = (mm.task(lambda w, x: jnp.tanh(x + w[0]), mesh=mesh) for mesh in MESHES[::3])
        return error(last(w, first(w, batch["x"])), batch)

    w = WEIGHTS["kernel"][0]
    actual = mm.jit(jax.value_and_grad(loss))(w, BATCH)
    assert_same(
        actual, jax.jit(jax.value_and_grad(lambda w, b: error(jnp.tanh(jnp.tanh(b["x"] + w[0]) + w[0]), b)))(w, BATCH)
    )
    assert actual[1].devices() in [set(mesh.devices.flat) for mesh in MESHES]


@pytest.mark.parametrize("width", [32, 33])
def test_tokens_and_labels_of_a_batch_are_no_stack(width):
    """Each of two stages reads all columns but one."""
    first, last = MESHES[:2]

    def loss(w, tokens):
        x = mm.task(lambda w, t: jnp.take(w, t, axis=0), "first", mesh=first)(w, tokens[:, :-1])
        return mm.task(lambda x, labels: jnp.mean((x - labels[..., None]) ** 2), "last", mesh=last)(x, tokens[:, 1:])

    tokens = np.zeros((16, width), "int32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = mm.jit(loss).plan(np.ones((8, 8), "float32"), tokens)
    assert not plan.stacks


@pytest.mark.longer
def test_a_stack_that_a_task_reads_whole_stays_whole():
    step = mm.jit(jax.value_and_grad(lambda p, b: by_hand("outside")(p, b) + jnp.float32(0)))
    reader = mm.jit(
        jax.value_and_grad(
            lambda p, b: by_hand("outside")(p, b) + mm.task(lambda p: jnp.sum(p["kernel"] ** 2), mesh=MESHES[1])(p)
        )
    )
    assert step(WEIGHTS, BATCH)[1]["kernel"].sharding.mesh.axis_names == ("stage", "data")
    actual = reader(WEIGHTS, BATCH)
    assert_same(
        actual, jax.jit(jax.value_and_grad(lambda p, b: scanned(p, b) + jnp.sum(p["kernel"] ** 2)))(WEIGHTS, BATCH)
    )


@pytest.mark.longer
def test_explicit_axes():
    """Layouts in types: of a stack, that of a block."""
    meshes = [Mesh(m.devices, m.axis_names, axis_types=(jax.sharding.AxisType.Explicit,)) for m in MESHES]
    mesh = Mesh(np.stack([m.devices for m in MESHES]), ("pp", "data"))
    params = {name: jax.device_put(w, NamedSharding(mesh, P("pp"))) for name, w in WEIGHTS.items()}
    step = mm.jit(jax.value_and_grad(mm.pipeline(scanned, meshes)))
    expected = jax.jit(jax.value_and_grad(scanned))(WEIGHTS, BATCH)
    assert_same(step(WEIGHTS, BATCH), expected)
    _, grads = step(params, BATCH)
    assert_same(step(grads, BATCH), jax.jit(jax.value_and_grad(scanned))(jax.device_get(grads), BATCH))


@pytest.mark.longer
@pytest.mark.flax
def test_nnx_layers():
    """A stack by ``nnx.vmap``, run by ``nnx.scan``, with a tied embedding."""
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
            self.layers = nnx.vmap(Block)(rngs.fork(split=LAYERS))

        def __call__(self, tokens):
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.embed.attend(run(self.embed(tokens), self.layers))

    layout, params, stats = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9))

    def loss(params, tokens):
        logits = nnx.merge(layout, params, stats, copy=True)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    step = mm.jit(step_of(mm.pipeline(loss, MESHES)))
    state = optax.adam(1e-3).init(params)
    new, moments, value = step(params, state, tokens)
    expected = jax.jit(step_of(loss, loop=microbatched))(params, state, tokens)
    np.testing.assert_allclose(value, expected[2], rtol=1e-5)
    for tree in (new["layers"], moments[0].mu["layers"], moments[0].nu["layers"]):
        assert len(set(bytes_of(tree))) == 1
        assert {x.sharding.mesh.axis_names for x in jax.tree.leaves(tree)} == {("stage", "data")}
