"""What a step holds: live microbatches, live bytes, nothing left behind."""

import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import device_bytes, peak_bytes
from models import MLP, TRANSFORMER
from pipelines import Split, assert_at_home, gradient, submeshes

import multimesh as mm

STAGES = 4


def case(schedule, count, size=2, model=MLP):
    rows = count * size
    split = Split(submeshes(STAGES, (1,)))
    params = model.init(STAGES)
    placed = split.place(params, model.owners(params))
    f = mm.jit(gradient(model, split, size=size, rows=rows, schedule=schedule))
    return f, placed, jax.device_put(model.batch(rows, 0))


@pytest.mark.longer
def test_live_bytes():
    """Rows are many against the width, so that activations and not gradients fill the memory."""
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        f, params, batch = case(schedule, 16, size=64, model=TRANSFORMER)
        jax.block_until_ready(f(params, batch))
        peak = peak_bytes(lambda f=f, params=params, batch=batch: jax.block_until_ready(f(params, batch)))
        peaks[schedule] = [peak[d] for d in jax.devices()[:STAGES]]
    assert peaks["1f1b"][0] <= 0.45 * peaks["gpipe"][0], peaks
    assert max(peaks["1f1b"]) <= 0.45 * max(peaks["gpipe"]), peaks


def live_arrays():
    gc.collect()
    return len([x for x in jax.live_arrays() if not x.is_deleted()])


@pytest.mark.longer
def test_nothing_leaks_over_200_steps():
    split = Split(submeshes(2, (1,)))
    params = MLP.init(2)
    grads_of = gradient(MLP, split, size=2, rows=4)
    step = mm.jit(lambda p, b: jax.tree.map(lambda p, g: p - 0.01 * g, p, grads_of(p, b)[1]), donate_argnums=(0,))
    state, batch = split.place(params, MLP.owners(params)), jax.device_put(MLP.batch(4, 0))
    for _ in range(2):
        state = step(state, batch)
    arrays, sizes = live_arrays(), device_bytes()
    for _ in range(200):
        state = step(state, batch)
    assert live_arrays() == arrays
    assert device_bytes() == sizes
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.longer
def test_a_step_leaves_only_its_results():
    f, params, batch = case("1f1b", 4)
    f(params, batch)  # compiling makes constants that stay
    before = live_arrays()
    result = f(params, batch)
    assert live_arrays() - before == len(jax.tree.leaves(result))


def test_during_a_step_every_array_lies_on_one_stage():
    """No array of the step spans two submeshes, and no stage ever holds another stage's parameters or gradients."""
    from measure import at_every_call

    f, params, batch = case("1f1b", 4)
    split = Split(submeshes(STAGES, (1,)))
    jax.block_until_ready(f(params, batch))
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    homes = [split.devices(s) for s in range(STAGES)]
    widths = {p["up"].shape for p in params["stages"]}
    spread, peaks = [], dict.fromkeys(range(STAGES), 0)

    def hook(k):
        if k % 5:
            return
        for x in jax.live_arrays():
            if id(x) in before or x.is_deleted():
                continue
            where = [s for s, home in enumerate(homes) if set(x.devices()) <= home]
            if not where:
                spread.append((x.shape, x.devices()))
            elif x.shape in widths:
                peaks[where[0]] = max(peaks[where[0]], 1)

    _, grads = at_every_call(lambda: jax.block_until_ready(f(params, batch)), hook)
    assert not spread
    assert set(peaks.values()) == {1}  # every stage did hold an array shaped like its own weights: its gradient
    assert_at_home(split, grads, MLP.owners(params))


WIDTH, ROWS = 64, 256


@pytest.fixture(scope="module")
def lowered():
    """A training step of two stages, each on (data 2, model 2): rows sharded over data, matrices over model."""
    stages = submeshes(2, (2, 2))

    def layer(number, weights, y):
        y = jax.lax.with_sharding_constraint(y, NamedSharding(stages[number].abstract_mesh, P("data")))
        return jnp.tanh(y @ weights["up"]) @ weights["down"]

    def loss(model, y):
        for number in range(2):
            y = mm.task(lambda w, y, n=number: layer(n, w, y), f"layer{number}", mesh=stages[number])(model[number], y)
        return jnp.sum(y**2)

    def step(state, batch):
        grads = mm.microbatch(lambda rows: jax.grad(loss)(state["model"], rows), size=ROWS // 4)(batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["optimizer"], grads)
        return {"model": jax.tree.map(lambda w, m: w - 0.1 * m, state["model"], moments), "optimizer": moments}

    def matrix(number, shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(stages[number], spec))

    model = [
        {"up": matrix(n, (WIDTH, 4 * WIDTH), P(None, "model")), "down": matrix(n, (4 * WIDTH, WIDTH), P("model"))}
        for n in range(2)
    ]
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(stages[0], P("data")))
    return mm.jit(step, donate_argnums=0).lower({"model": model, "optimizer": model}, batch)


def test_a_forecast_of_arguments_and_sums_is_exact(lowered):
    gradients = 2 * 4 * WIDTH * WIDTH * 4 // 2  # two float32 matrices, each over two devices of the model axis
    batch = ROWS * WIDTH * 4 // 2
    for estimate, rows in zip(lowered.memory_estimate(), (batch, 0), strict=True):
        assert estimate.sums == gradients
        assert estimate.arguments == pytest.approx(2 * gradients + rows, abs=64)  # microbatch numbers
        assert estimate.values > 0
        assert estimate.total == estimate.arguments + estimate.sums + estimate.values + estimate.workspace


def test_the_forecast_workspace_is_that_of_xla(lowered):
    compiled = lowered.compile()
    for need, stats in zip(lowered.memory_estimate(), compiled.memory_analysis(), strict=True):
        measured = stats["scratch"] / 4
        assert 0.5 * measured <= need.workspace <= 2 * measured


def product_step(meshes, spec, layout):
    """Gradients of two stages whose weights are large against their rows; ``layout`` is that of the rows."""

    def layer(mesh, w, y):
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, layout))
        return jnp.tanh(y @ w["up"]) @ w["down"]

    def loss(weights, y):
        for mesh, w in zip(meshes, weights, strict=True):
            y = mm.task(lambda w, y, mesh=mesh: layer(mesh, w, y), "layer", mesh=mesh)(w, y)
        return jnp.sum(y**2)

    def matrix(mesh, shape, axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, axes))

    weights = [
        {"up": matrix(m, (64, 512), P(None, *spec)), "down": matrix(m, (512, 64), P(*spec, None))} for m in meshes
    ]
    rows = matrix(meshes[0], (4 * 8, 16, 64), P())
    return mm.jit(mm.microbatch(jax.grad(loss), size=8, argnum=1)).lower(weights, rows)


MATRICES = 2 * 4 * 64 * 512  # bytes


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_sums_that_no_device_shares_are_not_in_the_workspace_again(platform):
    """One device reduces nothing: a gradient is computed into its sum, or (CPUs) stands beside it, one a time."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 1]), ("data",)) for i in (0, 1)]
    (_, need) = product_step(meshes, (None,), P()).memory_estimate(platform)
    assert need.sums == MATRICES
    activations = 4 * 8 * 16 * (512 + 64) * 4  # bytes: a few arrays of each width
    extra = MATRICES // 2 if platform == "cpu" else 0
    assert need.workspace <= extra + activations


def products(x, up):
    h = x @ up
    return h, jnp.tanh(h), jnp.cos(h), jnp.sin(h)


@pytest.mark.parametrize(
    ("platform", "part"),
    [
        ("cpu", lambda x, up, down: (jnp.tanh(x @ up) @ down,)),
        ("gpu", lambda x, up, down: (jnp.tanh(x @ up) @ down,)),
        ("gpu", lambda x, up, down: products(x, up)),
    ],
    ids=["cpu", "gpu", "element-wise results"],
)
def test_what_a_shard_map_makes_on_each_device_is_in_the_workspace(platform, part):
    """As MaxText's experts, whose tokens are larger there than anywhere else; XLA inlines it on GPUs.

    So it is with element-wise results, as the backward pass needs of those experts: they are no arrays.
    """
    rows, wide = 512, 4096
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    shapes = (rows, 64), (64, wide), (wide, 64)

    def layer(x, up, down):
        results = jax.eval_shape(part, x, up, down)
        parts = jax.shard_map(
            part, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=jax.tree.map(lambda _: P("data"), results)
        )(x, up, down)
        return parts[0] if len(parts) == 1 else math.prod(parts) @ down

    lowered = mm.jit(mm.task(layer, "layer", mesh=mesh)).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    ((need,), array) = lowered.memory_estimate(platform), rows // 2 * wide * 4
    assert array <= need.workspace <= 2 * array + rows * 64 * 4


@pytest.mark.parametrize("width", [256, pytest.param(4096, marks=pytest.mark.compile_gpu)])
def test_gradients_that_devices_sum_are_all_in_the_workspace_at_once(width: int):
    """GPUs send all together. XLA joins small ones in a buffer, and copies them out of it."""
    compiled = width > 256
    devices = mm.topology("h100", gpus=2) if compiled else jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("data",))

    def reduce(parts, ok):
        sums = [part.sum(0) for part in parts]
        return [jnp.where(ok, x, 0.0) for x in sums], sum(jnp.sum(x * x) for x in sums)

    part = jax.ShapeDtypeStruct((2, width, width), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    lowered = mm.jit(mm.task(reduce, "reduce", mesh=mesh)).lower([part] * 8, jax.ShapeDtypeStruct((), bool))
    (need,) = lowered.memory_estimate("gpu")
    assert need.workspace == pytest.approx(8 * width * width * 4, rel=0.01)
    if compiled:
        (memory,) = lowered.compile().memory_analysis()
        assert memory["scratch"] == pytest.approx(need.workspace, rel=0.01)


ON_GPUS = pytest.mark.compile_gpu


@pytest.mark.parametrize(
    ("platform", "layers", "width", "rows"),
    [
        ("cpu", 8, 512, 8192),
        pytest.param("gpu", 16, 512, 8192, marks=ON_GPUS),
        pytest.param("gpu", 8, 2048, 16384, marks=ON_GPUS),
    ],
)
def test_the_gathers_of_many_layers_begin_as_xla_begins_them(platform: str, layers: int, width: int, rows: int):
    """For CPUs all at once. For GPUs it joins them up to 30 MiB, and converts weights before: 285 MB, 604 at once.

    Where a gather takes longer than the products, XLA gathers further ahead: 403 MB for 226 with half the rows.
    """
    devices = mm.topology("h100", gpus=4) if platform == "gpu" else jax.devices()[:4]
    mesh, dtype = Mesh(np.array(devices), ("fsdp",)), "bfloat16" if platform == "gpu" else "float32"

    def forward(weights, x):
        for up, down in weights:
            x = x + jax.nn.silu(x @ up.astype(dtype)) @ down.astype(dtype)
        return x

    shapes = ((width, 4 * width), P("fsdp")), ((4 * width, width), P(None, "fsdp"))
    layer = [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
    x = jax.ShapeDtypeStruct((rows, width), dtype, sharding=NamedSharding(mesh, P("fsdp")))
    lowered = mm.jit(mm.task(forward, "layers", mesh=mesh)).lower([layer] * layers, x)
    (forecast,), (compiled,) = lowered.memory_estimate(platform), lowered.compile().device_memory()
    assert forecast.workspace == pytest.approx(compiled.workspace, rel=0.2 if platform == "cpu" else 0.15)


def test_a_reduction_of_what_only_the_last_product_reads_has_its_place():
    def layer(x, w):
        y = jnp.tanh(x @ w)
        return y @ (w * y.sum())

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    (need,) = mm.jit(mm.task(layer, "layer", mesh=mesh)).lower(matrix, matrix).memory_estimate("gpu")
    assert 256 * 256 * 4 <= need.workspace <= 4 * 256 * 256 * 4


def test_a_platform_that_is_none_is_refused():
    meshes = [Mesh(np.array(jax.devices()[i : i + 1]), ("data",)) for i in (0, 1)]
    with pytest.raises(mm.UsageError, match='platform must be "cpu" or "gpu", got \'h100\''):
        product_step(meshes, (None,), P()).memory_estimate("h100")


def test_gathered_rows_are_in_the_workspace():
    """With sequence parallelism each product gathers its rows: a full copy, beside the part that a device has."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 4]), ("model",)) for i in (0, 4)]
    lowered = product_step(meshes, ("model",), P(None, "model"))
    gathered = 8 * 16 * 64 * 4
    need, measured = lowered.memory_estimate()[1], lowered.compile().memory_analysis()[1]["scratch"] / 4
    assert need.workspace >= gathered
    assert 0.5 * measured <= need.workspace <= 2 * measured


@pytest.mark.telling("P()", "P('model', None)")
@pytest.mark.parametrize("spec", [P(None, "model"), P("model", None), P()], ids=str)
def test_a_constraint_to_the_layout_of_an_argument_copies_nothing(spec):
    """MaxText constrains its parameters before it accumulates gradients; a copy of them all would stay for the loop."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 2]), ("model",)) for i in (0, 2)]
    layouts = [NamedSharding(mesh, spec) for mesh in meshes]

    def loss(weights, x):
        for mesh, w in zip(meshes, weights, strict=True):
            x = mm.task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=mesh)(w, x)
        return jnp.sum(x**2)

    def step(weights, x, layouts):
        weights = [jax.lax.with_sharding_constraint(w, layout) for w, layout in zip(weights, layouts, strict=True)]
        gradients = mm.microbatch(jax.grad(loss), size=1, argnum=1)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    draw = np.random.default_rng(0)
    weights = [draw.normal(size=(16, 16)).astype(np.float32) / 4 for _ in meshes]
    placed = [jax.device_put(w, layout) for w, layout in zip(weights, layouts, strict=True)]
    x = draw.normal(size=(4, 16)).astype(np.float32)
    other = [NamedSharding(mesh, P("model", None)) for mesh in meshes]
    reference = [w - 0.1 * g for w, g in zip(weights, jax.jit(jax.grad(loss))(weights, x), strict=True)]
    for targets in (layouts, other):
        f = mm.jit(lambda weights, x, targets=targets: step(weights, x, targets), donate_argnums=0)
        copies = f.lower(placed, x).memory_estimate()[1].values
        assert (copies >= weights[1].nbytes / 2) == (targets != layouts)
        for actual, expected in zip(f(jax.tree.map(jnp.copy, placed), x), reference, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
