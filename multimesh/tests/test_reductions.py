"""Reductions of results of microbatches that a user can choose, one by one: against plain jit, under every schedule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MLP, mlp_block, plain
from multimesh.marking import result_reductions
from pipelines import Split, assert_same, submeshes, two_blocks

import multimesh as mm

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
SPLIT = Split(submeshes(2), "wrapper")
PARAMS = MLP.init(2)


def statistics(stage, params, x):
    """Results of both stages: a row, a scalar, whole numbers, a truth."""
    h = stage(0, mlp_block)(params["stages"][0], x)
    first = stage(0, lambda h: (jnp.abs(h).max(0), (h > 0).sum(), (h > 2).any()))(h)
    y = stage(1, mlp_block)(params["stages"][1], h)
    return first, stage(1, lambda y: (y.mean(), y[0]))(y)


SPLIT_STATISTICS = functools.partial(statistics, SPLIT)


def plain_statistics(k):
    return statistics(plain, PARAMS, X[k::4])


BY_NAME = {
    "max": lambda rows: np.stack(rows).max(0),
    "min": lambda rows: np.stack(rows).min(0),
    "last": lambda rows: rows[-1],
    "sum": lambda rows: np.stack(rows).sum(0),
    "mean": lambda rows: np.stack(rows).mean(0),
}


@pytest.mark.telling("last-zb-h1", "max-jit of jax")
@pytest.mark.parametrize("how", ["1f1b", "gpipe", "zb-h1", "jit of jax", "eager", "without jit"])
@pytest.mark.parametrize("name", ["max", "min", "last"])
def test_one_name_for_all(name, how):
    schedule = how if how in mm.schedules.names() else "1f1b"
    loop = mm.microbatch(SPLIT_STATISTICS, size=2, argnum=1, reduce=name, schedule=schedule)
    run = {"jit of jax": jax.jit, "eager": lambda f: f, "without jit": lambda f: f}.get(how, mm.jit)(loop)
    with jax.disable_jit(how == "without jit"):
        actual = run(PARAMS, X)
    rows = [plain_statistics(k) for k in range(4)]
    assert_same(actual, jax.tree.map(lambda *r: BY_NAME[name](r), *rows))
    if how == schedule:
        assert [x.devices() == SPLIT.devices(0) for x in jax.tree.leaves(actual)] == [True] * 3 + [False] * 2


def test_a_name_for_each():
    reduce = ("max", ("mean", "last"))
    actual = mm.jit(mm.microbatch(SPLIT_STATISTICS, size=2, argnum=1, reduce=reduce))(PARAMS, X)
    firsts, seconds = zip(*map(plain_statistics, range(4)), strict=True)
    largest = jax.tree.map(lambda *r: BY_NAME["max"](r), *firsts)
    mean, last = zip(*seconds, strict=True)
    assert_same(actual, (largest, (np.stack(mean).mean(0), last[-1])))


def masked(stage, params, x, mask):
    """The sum of losses of rows that count, and their number."""
    y = two_blocks(stage)(params, x)
    return stage(1, lambda y, mask: ((jnp.square(y).mean(1) * mask).sum(), mask.sum()))(y, mask)


def reference(params, mask):
    total, count = masked(plain, params, X, mask)
    return total / count


@pytest.mark.telling("inside-some", "outside-empty microbatches")
@pytest.mark.parametrize(
    "mask", [[1, 0, 1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 1, 0, 0, 0]], ids=["some", "empty microbatches"]
)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_masked_loss_is_the_ratio_of_sums(where, mask):
    mask = np.array(mask, np.int32)

    def inside(params, batch):
        (total, count), grads = jax.value_and_grad(lambda p: masked(SPLIT, p, *batch), has_aux=True)(params)
        return (total, grads), count

    def outside(params, batch):
        return masked(SPLIT, params, *batch)

    if where == "inside":
        step = mm.jit(mm.microbatch(inside, size=2, argnum=1, reduce=mm.Ratio()))
    else:
        step = mm.jit(jax.value_and_grad(mm.microbatch(outside, size=2, argnum=1, reduce=mm.Ratio())))
    assert_same(step(PARAMS, (X, mask)), jax.jit(jax.value_and_grad(reference))(PARAMS, mask))


@pytest.mark.parametrize("result", [lambda x: x.sum(), lambda x: (x.sum(),) * 3, lambda x: (x.sum(), x[0])])
def test_a_ratio_is_of_a_pair_with_a_scalar(result):
    with pytest.raises(mm.UsageError, match=r"takes \(numerators, a scalar\), not results of shapes"):
        mm.jit(mm.microbatch(result, size=2, reduce=mm.Ratio()))(X)


@dataclasses.dataclass(frozen=True)
class Moments:
    """The mean and the variance of a result over microbatches (Welford)."""

    def init(self, like):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return jnp.int32(0), zeros, zeros

    def update(self, state, result):
        count, mean, squares = state
        delta = result - mean
        mean = mean + delta / (count + 1)
        return count + 1, mean, squares + delta * (result - mean)

    def finalize(self, state, count):
        return {"mean": state[1], "variance": state[2] / count}


def test_a_reduction_of_the_user():
    def rows(params, x):
        return two_blocks(SPLIT)(params, x)[0], x.sum()

    actual = mm.jit(mm.microbatch(rows, size=2, argnum=1, reduce=(Moments(), "sum")))(PARAMS, X)
    samples = np.stack([rows_of[0] for rows_of in (plain_statistics(k)[1][1:] for k in range(4))])
    assert_same(actual, ({"mean": samples.mean(0), "variance": samples.var(0)}, X.sum()))
    assert actual[0]["mean"].devices() == SPLIT.devices(1)


def test_gradients_of_what_is_no_sum():
    """An auxiliary result has none; through the reduction itself they would go against the loop."""

    def loss(stage, params, x):
        y = two_blocks(stage)(params, x)
        return jnp.square(y).sum(), jnp.abs(y).max()

    loop = mm.microbatch(functools.partial(loss, SPLIT), size=2, argnum=1, reduce=("sum", "max"))
    actual = mm.jit(jax.value_and_grad(loop, has_aux=True))(PARAMS, X)
    assert_same(actual, jax.jit(jax.value_and_grad(functools.partial(loss, plain), has_aux=True))(PARAMS, X))
    with pytest.raises(mm.MultiMeshError, match=r"test_reductions.py:\d+: the gradient goes through .* reduction"):
        mm.jit(jax.grad(lambda p, x: loop(p, x)[1]))(PARAMS, X)


class Grows:
    def init(self, like):
        return jnp.zeros(())

    def update(self, state, result):
        return jnp.stack([state, result])

    def finalize(self, state, count):
        return state


def test_a_reduction_keeps_the_type_of_its_state():
    with pytest.raises(mm.UsageError, match=r"update of the reduction .*Grows.* keep its state, but state goes in as"):
        mm.microbatch(lambda x: x.sum(), size=2, reduce=Grows())(X)
    with pytest.raises(mm.UsageError, match="not <class"):
        mm.microbatch(lambda x: x.sum(), size=2, reduce=Grows)(X)


def test_a_new_reduction_by_name_is_one_entry(monkeypatch):
    product = result_reductions.Fold(jnp.multiply, lambda dtype: 1)
    monkeypatch.setitem(result_reductions.NAMED, "product", product)
    x = jnp.arange(1.0, 9.0)
    actual = mm.jit(mm.microbatch(lambda x: x.prod(), size=2, reduce="product"))(x)
    assert actual == x.prod()
    with pytest.raises(mm.UsageError, match='"last", "product" and objects'):
        mm.microbatch(lambda x: x.prod(), size=2, reduce="products")(x)


@pytest.mark.telling("jit-sum", "jit-reduce3", "disable_jit-mean")
@pytest.mark.parametrize("reduce", ["sum", "mean", "last", mm.Ratio()])
@pytest.mark.parametrize(
    "run", [mm.jit, lambda f: f, lambda f: jax.disable_jit()(f)], ids=["jit", "eager", "disable_jit"]
)
def test_gradients_of_integers_pass_through(run, reduce):
    first, second = submeshes(2, (1,))

    def loss(params, x):
        h = mm.task(lambda w, n, x: x @ w + n, "first", mesh=first)(params["w"], params["n"], x)
        return mm.task(lambda v, h: jnp.sum(h @ v), "second", mesh=second)(params["v"], h)

    params = {"w": np.eye(4, dtype="f"), "n": np.int32([1, 2, 3, 4]), "v": np.ones((4, 2), "f")}
    gradient = jax.grad(loss, allow_int=True)

    def step(params, x):
        return (gradient(params, x), 2.0) if isinstance(reduce, mm.Ratio) else gradient(params, x)

    actual = run(mm.microbatch(step, size=2, argnum=1, reduce=reduce))(params, np.ones((4, 4), "f"))
    assert (actual["n"].dtype, actual["n"].shape) == (jax.dtypes.float0, (4,))
    times = {"sum": 2, mm.Ratio(): 0.5}.get(reduce, 1)
    np.testing.assert_allclose(actual["v"], np.full((4, 2), times) * [[4], [6], [8], [10]])


@pytest.mark.telling("sum")
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "last"])
def test_weak_types_stay(reduce):
    """As in the function itself, so that a step does not change the type of a parameter."""
    mesh, _ = submeshes(2, (1,))

    def loss(params, x):
        return mm.task(lambda p, x: jnp.mean((x * p) ** 2), "loss", mesh=mesh)(params, x), 2.0

    step = mm.microbatch(jax.value_and_grad(loss, has_aux=True), size=2, argnum=1, reduce=reduce)
    (value, two), slope = mm.jit(step)(0.5, np.ones((4, 4), "f"))
    assert (value.weak_type, two.weak_type, slope.weak_type) == (False, True, True)
    assert (two, slope) == ((4, 2) if reduce == "sum" else (2, 1))
    types = mm.jit(step).eval_shape(0.5, np.ones((4, 4), "f"))
    assert [x.weak_type for x in jax.tree.leaves(types)] == [False, True, True]
