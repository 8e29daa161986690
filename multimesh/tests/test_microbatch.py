"""What a microbatch loop means: which rows, what is summed, what is stacked, and several loops in one function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, WIDTH, mlp_block, plain, squared_error
from pipelines import SCHEDULES, Split, assert_same, both, microbatched, submeshes

import multimesh as mm

ROWS, SIZE = 8, 2
COUNT = ROWS // SIZE


def forward(stage, params, x):
    for s, p in enumerate(params["stages"]):
        x = stage(s, mlp_block)(p, x)
    return x


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_are_strided(split, schedule):
    rows = np.arange(ROWS, dtype=np.int32)
    f = mm.jit(mm.microbatch(split(0, lambda r: r + 0), size=SIZE, reduce="stack", schedule=schedule))
    np.testing.assert_array_equal(f(rows), rows.reshape(SIZE, COUNT).T)


@pytest.mark.parametrize("run", [mm.jit, lambda f: f])
def test_a_batch_without_rows_is_refused(split, run):
    f = run(mm.microbatch(split(0, lambda r: r.sum()), size=SIZE, reduce="mean"))
    with pytest.raises(mm.UsageError, match="argument 0 has 0 rows along dim=0"):
        f(np.zeros((0, 3), np.float32))


@pytest.mark.parametrize(("dim", "kind"), [(0, AxisType.Auto), (1, AxisType.Explicit), (-1, AxisType.Auto)])
def test_rows_of_results_go_back_to_their_places(dim, kind):
    """Predictions have the rows of the batch in its order, and its layout, on the last submesh."""
    front, back = (Mesh(m.devices, m.axis_names, axis_types=(kind,)) for m in submeshes(2, (2,)))
    params, x = MLP.init(2)["stages"], MLP.batch(ROWS, 0)["x"]

    def one(block, p, x):
        return jnp.moveaxis(block(p, jnp.moveaxis(x, dim, 0)), 0, dim)

    def forward(x):
        x = mm.task(functools.partial(one, mlp_block), mesh=front)(params[0], x)
        return mm.task(functools.partial(one, mlp_block), mesh=back)(params[1], x), x.shape[dim]

    predict = mm.microbatch(forward, dim=dim, size=SIZE, reduce=("rows", "sum"), schedule="wavefront")
    layout = P("data") if dim == 0 else P(None, "data")
    array = np.moveaxis(x, 0, dim)
    y, rows = mm.jit(predict)(jax.device_put(array, NamedSharding(front, layout)))
    with mm.context(ignore_transforms=True):
        expected, _ = jax.jit(predict)(array)
    assert_same(y, expected)
    assert (y.sharding.spec, y.devices(), rows) == (layout, set(back.devices.flat), ROWS)


def test_another_dimension_and_another_argument(split):
    """``dim`` is the rows' axis in every leaf of argument ``argnum``."""
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    columns = {"x": x.T, "weight": np.arange(ROWS, dtype=np.float32)[None]}

    def one(scale, batch, params):
        return scale * (forward(split, params, batch["x"].T) * batch["weight"].T).sum(0)

    def reference(scale, batch, params):
        return scale * (forward(plain, params, batch["x"].T) * batch["weight"].T).sum(0)

    f = mm.jit(mm.microbatch(one, dim=1, size=SIZE, argnum=1))
    assert_same(f(2.0, columns, params), jax.jit(reference)(2.0, columns, params))


def test_typed_keys_can_be_stacked(split):
    keys = jax.random.split(jax.random.key(1), ROWS)
    f = mm.jit(
        mm.microbatch(split(0, lambda k: jax.vmap(lambda k: jax.random.fold_in(k, 7))(k)), size=SIZE, reduce="stack")
    )
    expected = jax.vmap(lambda k: jax.random.fold_in(k, 7))(keys)
    assert_same(f(keys), jnp.stack([expected[i::COUNT] for i in range(COUNT)]))


@pytest.mark.longer
@pytest.mark.telling("1f1b")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_loops(split, schedule):
    """The second loop uses what the first one summed, and another number of microbatches."""

    def make(stage, loop):
        def f(params, batch):
            grads = loop(jax.grad(lambda p, b: MLP.loss(p, b, stage)), size=2, argnum=1)(params, batch)
            updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return loop(jax.value_and_grad(lambda p, b: MLP.loss(p, b, stage)), size=4, argnum=1)(updated, batch)

        return f

    both(make, MLP.init(2), MLP.batch(ROWS, 0), split=split, schedule=schedule)


@pytest.mark.telling("1f1b")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_reads_the_forward_sum(split, schedule):
    """The gradient of a log of a sum needs the whole sum before the first backward."""

    def make(stage, loop):
        def total(p, b):
            return loop(lambda p, b: MLP.loss(p, b, stage), size=SIZE, argnum=1)(p, b)

        return jax.value_and_grad(lambda p, b: jnp.log(total(p, b)))

    both(make, MLP.init(2), MLP.batch(ROWS, 0), split=split, schedule=schedule)


def test_gradient_of_the_batch(split):
    """The gradient of the argument that is cut into microbatches has all its rows, in order."""
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage, loop):
        def loss(x, y):
            return loop(lambda b: squared_error(forward(stage, params, b[0]), b[1]), size=SIZE, argnum=0)((x, y))

        return jax.value_and_grad(loss)

    both(make, batch["x"], batch["y"], split=split)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_loop_is_traced_once(split, where):
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)
    calls = []

    def loss(p, b):
        calls.append(b["x"].shape)
        return MLP.loss(p, b, split)

    if where == "inside":
        f = mm.jit(mm.microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1))
    else:
        f = mm.jit(jax.value_and_grad(lambda p, b: mm.microbatch(loss, size=SIZE, argnum=1)(p, b)))
    f(params, batch)
    f(params, batch)
    assert [shape[0] for shape in calls] == [SIZE]


ORDERS = ["gpipe", "1f1b", "interleaved", "zb-h1"]


def statistics(stage, params, x, state):
    """Batch norm in each stage: what goes in is normalised by the running mean of all rows so far."""
    new = []
    for s, (p, mean) in enumerate(zip(params["stages"], state["mean"], strict=True)):

        def block(p, x, mean):
            mean = 0.9 * mean + 0.1 * x.mean(0)
            return mlp_block(p, x - mean), jax.lax.stop_gradient(mean)

        x, mean = stage(s, block)(p, x, mean)
        new.append(mean)
    return x, {"mean": new, "count": state["count"] + 1}


def with_statistics(stage):
    def f(params, batch, state):
        def loss(p):
            x, new = statistics(stage, p, batch["x"], state)
            return squared_error(x, batch["y"]) / (1.0 + state["count"]), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return new, (value, grads, value)

    return f


@pytest.mark.telling("1f1b")
@pytest.mark.parametrize("schedule", ORDERS)
def test_a_state_from_microbatch_to_microbatch(schedule):
    stages = 4 if schedule == "interleaved" else 2
    split = Split(submeshes(2, (2,)))
    params, batch = MLP.init(stages), MLP.batch(8, 0)
    state = {"mean": [np.full(WIDTH, 0.1 * s, np.float32) for s in range(stages)], "count": np.float32(0)}

    options = {"size": 2, "argnum": 1, "carry": 2, "reduce": ("mean", "mean", "stack")}
    by_loop = microbatched(with_statistics(plain), **options)
    expected = jax.jit(by_loop)(params, batch, state)
    actual = mm.jit(mm.microbatch(with_statistics(split), schedule=schedule, **options))(params, batch, state)
    assert_same(actual, expected)
    assert_same(jax.jit(mm.microbatch(with_statistics(plain), **options))(params, batch, state), expected)
    assert_same(mm.microbatch(with_statistics(split), **options)(params, batch, state), expected)
    for s, mean in enumerate(actual[0]["mean"]):
        assert mean.devices() == split.devices(s)
    step = mm.jit(mm.microbatch(with_statistics(split), schedule=schedule, **options), donate_argnums=2)
    assert_same(step(params, batch, step(params, batch, state)[0]), jax.jit(by_loop)(params, batch, expected[0]))


@pytest.mark.telling("1f1b")
@pytest.mark.parametrize("schedule", ORDERS)
def test_mean_index_and_rows_that_are_cut(schedule):
    """A dropout key of each microbatch, and a batch with a leading dimension of microbatches."""
    stages = 4 if schedule == "interleaved" else 2
    split = Split(submeshes(2, (2,)))
    params, batch = MLP.init(stages), MLP.batch(8, 0)

    def make(stage):
        def f(params, batch, *, key, number):
            def loss(p):
                x = batch["x"] * jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, batch["x"].shape)
                for s, q in enumerate(p["stages"]):
                    x = stage(s, mlp_block)(q, x)
                return squared_error(x, batch["y"]) * (1 + number)

            return *jax.value_and_grad(loss)(params), number

        return f

    cut = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
    key = jax.random.key(3)
    options = {"argnum": 1, "index": "number", "reduce": ("sum", "mean", "stack")}

    def first(params, batch, **kwargs):
        return make(plain)(params, jax.tree.map(lambda x: x[0], batch), **kwargs)

    expected = jax.jit(microbatched(first, size=1, **options))(params, cut, key=key)
    f = mm.microbatch(make(split), size=None, schedule=schedule, **options)
    actual = mm.jit(f)(params, cut, key=key)
    assert_same(actual, expected)
    assert actual[2].dtype == jnp.int32
    assert_same(f(params, cut, key=key), expected)


def test_gradient_around_a_loop_with_a_state(split):
    def make(stage, stop):
        def f(params, x, mean):
            mean = 0.9 * mean + 0.1 * stage(0, mlp_block)(params["stages"][0], x).mean(0)
            mean = jax.lax.stop_gradient(mean) if stop else mean
            return mean, jnp.square(stage(1, mlp_block)(params["stages"][1], stage(0, jnp.subtract)(x, mean))).sum()

        loop = mm.microbatch(f, size=SIZE, argnum=1, carry=2)
        return jax.value_and_grad(lambda p, x, mean: loop(p, x, mean)[::-1], has_aux=True)

    args = MLP.init(2), MLP.batch(ROWS, 0)["x"], np.zeros(WIDTH, np.float32)
    assert_same(mm.jit(make(split, True))(*args), jax.jit(make(plain, True))(*args))
    with pytest.raises(mm.MultiMeshError, match=r"test_microbatch.py:\d+: the gradient goes through the state"):
        mm.jit(make(split, False))(*args)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_schedule_that_can_not_carry_is_refused(split, stage):
    """A state that a later stage updates is not there when the first reads it; and an order of one's own."""

    def f(params, x, state):
        h = split(0, lambda p, x, s: mlp_block(p, x) + s)(params["stages"][0], x, state)
        y = split(1, mlp_block)(params["stages"][1], h)
        return state + (h, y)[stage].mean(), y.sum()

    args = MLP.init(2), MLP.batch(8, 0)["x"], np.float32(0)
    table = [[(1, "F0"), (0, "F0")], [(1, "F1"), (0, "F1")]]
    options = {"size": 4, "argnum": 1, "carry": 2} | ({} if stage else {"schedule": mm.schedules.custom(table)})
    with pytest.raises(mm.UsageError, match=r"test_microbatch.py:\d+: .* before .* has updated it"):
        mm.jit(mm.microbatch(f, **options))(*args)


ROWS_OF_TWO = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("options", "fn", "batch", "words"),
    [
        ({"reduce": "median"}, jnp.sum, ROWS_OF_TWO, 'takes "sum", "mean", "stack", "rows", "max"'),
        ({"reduce": "rows"}, jnp.sum, ROWS_OF_TWO, r"results with size= rows in dimension 0, not of shape \(\)"),
        ({"reduce": "mean"}, lambda x: x.sum().astype(int), ROWS_OF_TWO, "can't be averaged"),
        ({"reduce": ("mean", "sum")}, jnp.sum, ROWS_OF_TWO, "reduce= must be a pytree prefix"),
        ({"carry": 0}, lambda x: x, ROWS_OF_TWO, "can't be cut"),
        ({"index": "k"}, lambda x: x, ROWS_OF_TWO, "takes no keyword argument"),
        ({"carry": 1}, lambda x: x, ROWS_OF_TWO, "carry=1, but the call has 1"),
        ({"size": 3}, jnp.sum, ROWS_OF_TWO, "4 rows do not divide into microbatches of 3"),
        ({"dim": 2}, jnp.sum, ROWS_OF_TWO, "no rows along dim=2"),
        ({"argnum": 1}, jnp.sum, ROWS_OF_TWO, "argnum=1, but the call has 1"),
        ({}, lambda xs: xs[0].sum(), (ROWS_OF_TWO, ROWS_OF_TWO[:2]), "differ in rows"),
        ({}, lambda xs: xs[0].sum(), (ROWS_OF_TWO, np.float32(1)), r"of shape \(\) has no rows"),
        ({}, lambda xs: 0.0, {}, "has no arrays to cut"),
    ],
)
def test_loops_that_do_not_fit(options, fn, batch, words):
    for run in (mm.jit, lambda f: f):
        with pytest.raises(mm.UsageError, match=words):
            run(mm.microbatch(fn, **({"size": 2} | options)))(batch)


def test_an_eager_loop_compiles_once(split, compilations):
    args = MLP.init(2), MLP.batch(ROWS, 0)

    def f(p, b):
        return squared_error(forward(split, p, b["x"]), b["y"])

    expected = mm.microbatch(f, size=SIZE, argnum=1)(*args)
    before = len(compilations)
    assert_same(mm.microbatch(f, size=SIZE, argnum=1)(*args), expected)
    assert len(compilations) == before
    assert float(mm.microbatch(f, size=SIZE, argnum=1, reduce="mean")(*args)) != float(expected)
