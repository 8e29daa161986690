"""Edges of loops, and corners where a value, a buffer or a rule could be lost: each once went wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, submeshes

import multimesh as mm

MESHES = submeshes(3, (1,))
ROWS, COUNT = 8, 2
X = np.arange(16, dtype=np.float32).reshape(ROWS, 2)
C = np.array([3.0, 4.0, 5.0, 6.0], np.float32)


def on(mesh, fn):
    return mm.task(fn, name="abc"[mesh], mesh=MESHES[mesh])


def sums(x):
    return on(1, lambda y: y.sum())(on(0, lambda x: 2 * x)(x))


def same_as_plain(body, *args, **options):
    """Results of the loop under `multimesh.jit`, which are those of plain jit: values, dtypes and weak types."""
    loop = mm.microbatch(body, size=ROWS // COUNT, **options)
    actual, expected = mm.jit(loop)(*args), jax.jit(loop)(*args)
    assert_same(actual, expected)
    assert [x.weak_type for x in jax.tree.leaves(actual)] == [x.weak_type for x in jax.tree.leaves(expected)]
    return actual


def places(tree):
    return [MESHES.index(next(m for m in MESHES if x.devices() == set(m.devices.flat))) for x in jax.tree.leaves(tree)]


def test_a_slice_of_a_constant_is_the_next_state():
    same_as_plain(lambda x, c, s: (c[:1], (sums(x), 2 * s)), X, C, jnp.ones(1), carry=2)


def test_a_state_passes_through_tasks():
    def body(x, c, s):
        y, s = on(0, lambda x, s: (2 * x, s))(x, s)
        return s, on(1, lambda y: y.sum())(y)

    same_as_plain(body, X, C, C, carry=2)


@pytest.mark.parametrize("how", [{}, {"reduce": "mean"}, {"reduce": "stack"}], ids=str)
def test_what_a_task_makes_of_nothing_lies_on_its_submesh(how):
    """A literal, an argument of the task, and what adds zero to one."""

    def body(x, c):
        y = on(0, lambda x: 2 * x)(x)
        return on(2, lambda y, c: (3.0, jnp.zeros_like(y) + 1, c, c + 0, y, y.sum()))(y, c)

    actual = same_as_plain(body, X, C, **how)
    assert places(actual) == [2] * 6


def test_what_a_task_passes_through_is_read_where_it_was_made():
    """It goes to its reader at once, not by way of each task in between."""

    def through(x):
        y, residual = on(0, lambda x: (2 * x, jnp.sin(x)))(x)
        y, residual = on(1, lambda y, residual: (jnp.cos(y), residual))(y, residual)
        return on(2, lambda y, residual: (y * residual).sum())(y, residual)

    loop = mm.microbatch(through, size=4)
    transfers = {(t.source, t.target) for t in mm.jit(loop).plan(X).transfers}
    assert transfers == {(0, 1), (0, 2), (1, 2)}
    assert_same(mm.jit(loop)(X), jax.jit(loop)(X))


def test_a_gradient_that_a_task_passes_through_lies_on_its_submesh():
    def loss(biases, x):
        for k, b in enumerate(biases):
            x = on(k, lambda x, b: x + b)(x, b)
        return on(2, lambda x: (x**2).sum())(x)

    biases = [np.full((4, 2), k, np.float32) for k in range(3)]
    loop = functools.partial(mm.microbatch(jax.grad(loss), size=4, argnum=1))
    actual = mm.jit(loop)(biases, X)
    assert_same(actual, jax.jit(loop)(biases, X))
    assert places(actual) == [0, 1, 2]


def v_shaped(layer):
    """Four stages down and up two submeshes, and the gradient of a loss at their end."""
    weights = [np.random.default_rng(k).normal(size=(2, 2)).astype(np.float32) for k in range(4)]

    def loss(weights, x):
        for k, w in enumerate(weights):
            x = mm.task(layer, f"stage{k}", mesh=MESHES[min(k, 3 - k)])(w, x)
        return mm.task(lambda x: (x**2).sum(), "loss", mesh=MESHES[0])(x)

    return weights, loss


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_gradient_inside_a_task_is_part_of_its_forward(schedule):
    weights, loss = v_shaped(lambda w, x: jnp.tanh(x @ w) + jax.grad(lambda y: (jnp.sin(y) @ w).sum())(x))
    loop = mm.microbatch(jax.value_and_grad(loss), size=2, argnum=1, schedule=schedule)
    assert_same(mm.jit(loop)(weights, X), jax.jit(loop)(weights, X))


@pytest.mark.longer
@pytest.mark.telling("1f1b-outside", "zb-v-inside", "dualpipe-v-around the loop")
@pytest.mark.parametrize("where", ["inside", "outside", "around the loop"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v"])
def test_a_checkpoint_around_all_stages_is_cut_at_the_borders_between_submeshes(schedule, where):
    """The backward pass of a stage repeats that stage from what it was sent: there are no more stages than tasks."""
    weights, loss = v_shaped(lambda w, x: jnp.tanh(x @ w))

    def step(weights, x):
        fn = loss if where == "around the loop" else jax.checkpoint(loss)
        if where == "inside":
            return mm.microbatch(jax.value_and_grad(fn), size=2, argnum=1, schedule=schedule)(weights, x)
        loop = mm.microbatch(fn, size=2, argnum=1, schedule=schedule)
        return jax.value_and_grad(jax.checkpoint(loop) if where == "around the loop" else loop)(weights, x)

    f = mm.jit(step)
    assert_same(f(weights, X), jax.jit(step)(weights, X))
    if where != "around the loop":
        assert {s.stage for s in f.plan(weights, X).instructions if s.kind == "RUN"} <= {None, 0, 1, 2, 3}


def test_what_a_task_takes_of_its_weight_is_not_the_first_thing_of_a_microbatch():
    """Found by seed 1039: the last stage cuts its weight, which needs no microbatch, and came before the second one."""
    weights = [np.full((2, 2), 0.1 * (k + 1), np.float32) for k in range(3)]

    def loss(weights, x):
        x = on(0, lambda w, x: jnp.tanh(x + w[0]))(weights[0], x)
        x = on(1, lambda w, x: jnp.tanh(x @ w))(weights[1], x)
        return on(2, lambda w, x: jnp.tanh(x + w[0]).sum())(weights[2], x)

    loop = mm.microbatch(jax.grad(loss), size=2, argnum=1, schedule="zb-h2")
    assert_same(mm.jit(loop)(weights, X), jax.jit(loop)(weights, X))


BESIDE = {  # what the task of the last stage makes of something else than the rows that it is sent, and returns
    "a literal": lambda w, x, h: 3.0,
    "a weight": lambda w, x, h: jnp.cos(w[2]),
    "labels": lambda w, x, h: (x > 1).sum(0),
    "a skip": lambda w, x, h: h[0].sum(0),
}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("case", BESIDE)
def test_what_the_last_stage_returns_beside_the_microbatch_does_not_make_it_an_earlier_one(case, gradient):
    """Found by seeds 229, 1176 and 1182: the last stage came before the second, and zb-h1 refused the loop."""
    weights = [np.full((2, 2), 0.1 * (k + 1), np.float32) for k in range(3)]

    def loss(weights, x):
        h = [on(0, lambda w, x: jnp.tanh(x @ w))(weights[0], x)]
        extra = on(2, lambda w, x, h: BESIDE[case](w, x, h))(weights, x, h)
        h.append(on(1, lambda w, x: jnp.tanh(x @ w))(weights[1], h[0]))
        return on(2, lambda w, x: jnp.tanh(x @ w).sum())(weights[2], h[1]), extra

    body = jax.grad(loss, has_aux=True) if gradient else loss
    loop = mm.microbatch(body, size=2, argnum=1, schedule="zb-h1")
    assert_same(mm.jit(loop)(weights, X), jax.jit(loop)(weights, X))


A, B, _ = MESHES
W = (0.3 * np.eye(4, dtype=np.float32), np.full((4, 4), 0.1, np.float32))
Y = np.arange(32, dtype=np.float32).reshape(8, 4) / 40


def layer(w, x):
    return jnp.tanh(x @ w)


front, back = mm.task(layer, "front", mesh=A), mm.task(layer, "back", mesh=B)


def test_a_donated_argument_on_overlapping_submeshes_is_read_by_both():
    wide, flat = (Mesh(np.array(jax.devices()[:4]).reshape(shape), (*"ab",)[: len(shape)]) for shape in ((2, 2), (4,)))

    def f(w, x):
        new = mm.task(lambda w, x: w + x.sum(), mesh=wide)(w, x)
        return new, mm.task(jnp.sum, mesh=flat)(w)

    assert_same(mm.jit(f, donate_argnums=0)(jnp.array(W[0]), Y), f(W[0], Y))


def test_a_new_registration_places_anew():
    def f(x):
        with jax.named_scope("block"):
            return jnp.sin(x)

    step = mm.jit(f)
    for mesh in (A, B):
        with mm.register_task("block", mesh=mesh):
            assert step(Y).devices() == set(mesh.devices.flat)


def test_equal_static_values_of_different_types_are_different():
    f = mm.jit(lambda x, n: jnp.asarray(n) + 0 * front(W[0], x).sum().astype(int), static_argnums=1)
    assert (f(Y, 2).dtype, f(Y, 2.0).dtype) == (jnp.int32, jnp.float32)


def test_rows_that_depend_on_the_batch_only_reach_a_later_loop():
    def f(w, batch):
        def loss(w):
            def one(b):
                return jnp.sum(back(w[1], front(w[0], b[0])) * jnp.sin(b[1])[:, None])

            return jnp.log(mm.microbatch(one, size=2)(batch) + 5)

        return jax.value_and_grad(loss)(w)

    batch = (Y, np.linspace(0.1, 1, 8, dtype=np.float32))
    assert_same(mm.jit(f)(W, batch), jax.jit(f)(W, batch))


def test_one_result_of_an_unmarked_operation_read_elsewhere():
    def f(w, x):
        values, indices = lax.top_k(x, 4)
        return front(w[0], x), back(w[1], values), indices

    assert_same(mm.jit(f)(W, Y), jax.jit(f)(W, Y))


def test_an_unmarked_effect_happens_once():
    calls = []

    def f(w, x):
        value = io_callback(lambda v: calls.append(1) or v, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])
        return front(w[0], x) + value, back(w[1], x) + value

    jax.block_until_ready(mm.jit(f)(W, Y))
    assert calls == [1]


def test_a_scan_of_the_user_that_grad_hoists_is_no_microbatch_loop():
    def f(w, x):
        def one(w, x):
            total = lax.scan(lambda c, row: (c + jnp.sin(row), None), jnp.zeros(4), w[0])[0]
            return jnp.sum(back(w[1], front(w[0], x)) * total)

        return jax.value_and_grad(lambda w: mm.microbatch(lambda x: one(w, x), size=2)(x))(w)

    assert_same(mm.jit(f)(W, Y), jax.jit(f)(W, Y))


def test_a_constraint_inside_a_scan_of_a_task_holds():
    (pair,) = submeshes(1)

    def body(x, _):
        return mm.with_sharding_constraint(jnp.sin(x), P("batch")), None

    scanned = mm.task(lambda x: lax.scan(body, x, None, length=2)[0], mesh=pair, logical_axes={"batch": "data"})
    assert mm.jit(scanned)(Y).sharding.spec == P("data")


def test_flags_of_a_microbatched_function_stay_python_values():
    f = mm.microbatch(lambda x, flip: jnp.sum(-front(W[0], x) if flip else front(W[0], x)), size=2)
    assert_same(mm.jit(f, static_argnums=1)(Y, True), -mm.jit(f, static_argnums=1)(Y, False))


def test_a_layout_that_names_no_axis_of_any_submesh_is_refused():
    with pytest.raises(mm.UsageError, match=r"axis 'typo'.*axes are \['data'\]"):
        mm.jit(lambda x: front(W[0], x), out_shardings=P("typo"))(Y)
