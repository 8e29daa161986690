"""What a microbatch loop means: which rows, what is summed, what is stacked, and several loops in one function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MLP, mlp_block, plain, squared_error
from pipelines import SCHEDULES, Split, assert_same, microbatched, submeshes

import multimesh as mm

ROWS, SIZE = 8, 2
COUNT = ROWS // SIZE


@pytest.fixture
def split():
    return Split(submeshes(2, (2,)))


def forward(stage, params, x):
    for s, p in enumerate(params["stages"]):
        x = stage(s, mlp_block)(p, x)
    return x


@pytest.mark.promise("Microbatch i has rows i, i+m, i+2m, ...")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_are_strided(split, schedule):
    rows = np.arange(ROWS, dtype=np.int32)
    f = mm.jit(mm.microbatch(split(0, lambda r: r + 0), size=SIZE, stack=True, schedule=schedule))
    np.testing.assert_array_equal(f(rows), rows.reshape(SIZE, COUNT).T)


def test_results_are_summed(split):
    x = MLP.batch(ROWS, 0)["x"]
    f = mm.jit(mm.microbatch(split(1, lambda x: (x.sum(), x * 2)), size=SIZE))
    assert_same(f(x), (x.sum(), 2 * x.reshape(SIZE, COUNT, -1).sum(1)))


def test_another_dimension_and_another_argument(split):
    """``dim`` is the rows' axis in every leaf of argument ``argnum``."""
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    columns = {"x": x.T, "weight": np.arange(ROWS, dtype=np.float32)[None]}

    def one(scale, batch, params):
        return scale * (forward(split, params, batch["x"].T) * batch["weight"].T).sum(0)

    def whole(scale, batch, params):
        return scale * (forward(plain, params, batch["x"].T) * batch["weight"].T).sum(0)

    f = mm.jit(mm.microbatch(one, dim=1, size=SIZE, argnum=1))
    assert_same(f(2.0, columns, params), jax.jit(whole)(2.0, columns, params))


@pytest.mark.promise("Stacked outputs may stand beside summed ones, and outputs need not be floats")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stacked_beside_summed(split, schedule):
    """The stack prefix marks a subtree: losses and predictions a microbatch, gradients summed."""
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage):
        def one(params, batch):
            def loss(p):
                x = forward(stage, p, batch["x"])
                return squared_error(x, batch["y"]), x

            (value, x), grads = jax.value_and_grad(loss, has_aux=True)(params)
            seen = {"loss": value, "x": x, "best": jnp.argmax(x, -1), "positive": x[:, 0] > 0}
            return {"seen": seen, "count": jnp.int32(x.shape[0]), "grads": grads}

        return one

    prefix = {"seen": True, "count": False, "grads": False}
    got = mm.jit(mm.microbatch(make(split), size=SIZE, argnum=1, schedule=schedule, stack=prefix))(params, batch)
    parts = [jax.jit(make(plain))(params, jax.tree.map(lambda x: x[i::COUNT], batch)) for i in range(COUNT)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    assert_same(got["seen"], want["seen"])
    assert_same([got["grads"], got["count"]], jax.tree.map(lambda x: x.sum(0), [want["grads"], want["count"]]))


def test_typed_keys_can_be_stacked(split):
    keys = jax.random.split(jax.random.key(1), ROWS)
    f = mm.jit(
        mm.microbatch(split(0, lambda k: jax.vmap(lambda k: jax.random.fold_in(k, 7))(k)), size=SIZE, stack=True)
    )
    want = jax.vmap(lambda k: jax.random.fold_in(k, 7))(keys)
    assert_same(f(keys), jnp.stack([want[i::COUNT] for i in range(COUNT)]))


@pytest.mark.promise("Several microbatch loops in one function work")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_loops(split, schedule):
    """The second loop uses what the first one summed, and another number of microbatches."""
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage, loop):
        def f(params, batch):
            grads = loop(jax.grad(lambda p, b: MLP.loss(p, b, stage)), size=2, argnum=1)(params, batch)
            moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return loop(jax.value_and_grad(lambda p, b: MLP.loss(p, b, stage)), size=4, argnum=1)(moved, batch)

        return f

    def mm_loop(fn, **kw):
        return mm.microbatch(fn, schedule=schedule, **kw)

    assert_same(mm.jit(make(split, mm_loop))(params, batch), jax.jit(make(plain, microbatched))(params, batch))


def test_two_independent_loops(split):
    params, batch, other = MLP.init(2), MLP.batch(ROWS, 0), MLP.batch(4, 1)

    def make(stage, loop):
        def f(params, batch, other):
            step = loop(jax.value_and_grad(lambda p, b: MLP.loss(p, b, stage)), size=2, argnum=1)
            return step(params, batch), step(params, other)

        return f

    args = (params, batch, other)
    assert_same(mm.jit(make(split, mm.microbatch))(*args), jax.jit(make(plain, microbatched))(*args))


@pytest.mark.promise("A loop whose backward reads the forward's sum works")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_reads_the_forward_sum(split, schedule):
    """The gradient of a log of a sum needs the whole sum before the first backward."""
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage, loop):
        def total(p, b):
            return loop(lambda p, b: MLP.loss(p, b, stage), size=SIZE, argnum=1)(p, b)

        return jax.value_and_grad(lambda p, b: jnp.log(total(p, b)))

    def mm_loop(fn, **kw):
        return mm.microbatch(fn, schedule=schedule, **kw)

    assert_same(mm.jit(make(split, mm_loop))(params, batch), jax.jit(make(plain, microbatched))(params, batch))


def test_two_sums_one_divided_by_the_other(split):
    """Token-weighted loss: sum of losses over sum of weights, differentiated outside the loop."""
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)
    batch["weight"] = np.linspace(0.0, 1.0, ROWS, dtype=np.float32)

    def make(stage, loop):
        def one(p, b):
            x = forward(stage, p, b["x"])
            errors = jnp.square(x.mean(-1) - b["y"][:, 0])
            return (errors * b["weight"]).sum(), b["weight"].sum()

        def loss(p, b):
            errors, weights = loop(one, size=SIZE, argnum=1)(p, b)
            return errors / weights

        return jax.value_and_grad(loss)

    assert_same(mm.jit(make(split, mm.microbatch))(params, batch), jax.jit(make(plain, microbatched))(params, batch))


@pytest.mark.promise("Forward-only functions work")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_only(split, schedule):
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)
    f = mm.microbatch(lambda p, b: MLP.loss(p, b, split), size=SIZE, argnum=1, schedule=schedule)
    want = microbatched(lambda p, b: MLP.loss(p, b, plain), size=SIZE, argnum=1)
    assert_same(mm.jit(f)(params, batch), jax.jit(want)(params, batch))


def test_gradient_of_the_batch(split):
    """The gradient of the argument that is cut into microbatches has all its rows, in order."""
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage, loop):
        def loss(x, y):
            return loop(lambda b: squared_error(forward(stage, params, b[0]), b[1]), size=SIZE, argnum=0)((x, y))

        return jax.value_and_grad(loss)

    got = mm.jit(make(split, mm.microbatch))(batch["x"], batch["y"])
    assert_same(got, jax.jit(make(plain, microbatched))(batch["x"], batch["y"]))


def test_work_before_between_and_after_the_tasks(split):
    """Unmarked arithmetic, slicing, concatenation and reductions follow their operands."""
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage, loop):
        def one(p, b):
            x = jnp.concatenate([b["x"][:, 8:], b["x"][:, :8] * 3], 1)
            y = stage(0, mlp_block)(p["stages"][0], x)
            y = jnp.where(y > 0, y, 0.1 * y).reshape(-1, 4, 4).transpose(0, 2, 1).reshape(y.shape)
            z = stage(1, mlp_block)(p["stages"][1], y - y.mean(0))
            return (z[:, ::2] * x[:, 1::2]).sum() + jnp.linalg.norm(y)

        def f(p, b):
            scaled = jax.tree.map(lambda w: w / (1 + jnp.abs(w).max()), p)
            value, grads = loop(jax.value_and_grad(one), size=SIZE, argnum=1)(scaled, b)
            largest = jnp.stack([jnp.abs(g).max() for g in jax.tree.leaves(grads)])
            return value, grads, largest, jnp.sort(largest)[::-1]

        return f

    assert_same(mm.jit(make(split, mm.microbatch))(params, batch), jax.jit(make(plain, microbatched))(params, batch))


@pytest.mark.promise("A microbatch loop is traced once")
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
