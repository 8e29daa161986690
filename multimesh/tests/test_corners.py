"""Corners where a value, a buffer or a rule could be lost: each once went wrong in a review."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from pipelines import assert_same

import multimesh as mm

DEVICES = np.array(jax.devices())
A, B = Mesh(DEVICES[:1], ("d",)), Mesh(DEVICES[1:2], ("d",))
W = (0.3 * np.eye(4, dtype=np.float32), np.full((4, 4), 0.1, np.float32))
X = np.arange(32, dtype=np.float32).reshape(8, 4) / 40


def layer(w, x):
    return jnp.tanh(x @ w)


front, back = mm.task(layer, "front", mesh=A), mm.task(layer, "back", mesh=B)


def test_a_donated_argument_on_overlapping_submeshes_is_read_by_both():
    wide, flat = Mesh(DEVICES[:4].reshape(2, 2), ("a", "b")), Mesh(DEVICES[:4], ("c",))

    def f(w, x):
        new = mm.task(lambda w, x: w + x.sum(), mesh=wide)(w, x)
        return new, mm.task(jnp.sum, mesh=flat)(w)

    assert_same(mm.jit(f, donate_argnums=0)(jnp.array(W[0]), X), f(W[0], X))


def test_a_new_registration_places_anew():
    def f(x):
        with jax.named_scope("block"):
            return jnp.sin(x)

    step = mm.jit(f)
    for mesh in (A, B):
        with mm.register_task("block", mesh=mesh):
            assert step(X).devices() == set(mesh.devices.flat)


def test_equal_static_values_of_different_types_are_different():
    f = mm.jit(lambda x, n: jnp.asarray(n) + 0 * front(W[0], x).sum().astype(int), static_argnums=1)
    assert (f(X, 2).dtype, f(X, 2.0).dtype) == (jnp.int32, jnp.float32)


def test_rows_that_depend_on_the_batch_only_reach_a_later_loop():
    def f(w, batch):
        def loss(w):
            def one(b):
                return jnp.sum(back(w[1], front(w[0], b[0])) * jnp.sin(b[1])[:, None])

            return jnp.log(mm.microbatch(one, size=2)(batch) + 5)

        return jax.value_and_grad(loss)(w)

    batch = (X, np.linspace(0.1, 1, 8, dtype=np.float32))
    assert_same(mm.jit(f)(W, batch), jax.jit(f)(W, batch))


def test_one_result_of_an_unmarked_operation_read_elsewhere():
    def f(w, x):
        values, indices = lax.top_k(x, 4)
        return front(w[0], x), back(w[1], values), indices

    assert_same(mm.jit(f)(W, X), jax.jit(f)(W, X))


def test_an_unmarked_effect_happens_once():
    calls = []

    def f(w, x):
        seen = io_callback(lambda v: calls.append(1) or v, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])
        return front(w[0], x) + seen, back(w[1], x) + seen

    jax.block_until_ready(mm.jit(f)(W, X))
    assert calls == [1]


def test_a_scan_of_the_user_that_grad_hoists_is_no_microbatch_loop():
    def f(w, x):
        def one(w, x):
            total = lax.scan(lambda c, row: (c + jnp.sin(row), None), jnp.zeros(4), w[0])[0]
            return jnp.sum(back(w[1], front(w[0], x)) * total)

        return jax.value_and_grad(lambda w: mm.microbatch(lambda x: one(w, x), size=2)(x))(w)

    assert_same(mm.jit(f)(W, X), jax.jit(f)(W, X))


def test_a_constraint_inside_a_scan_of_a_task_holds():
    pair = Mesh(DEVICES[:2], ("d",))

    def body(x, _):
        return mm.with_sharding_constraint(jnp.sin(x), P("batch")), None

    scanned = mm.task(lambda x: lax.scan(body, x, None, length=2)[0], mesh=pair, logical_axes={"batch": "d"})
    assert mm.jit(scanned)(X).sharding.spec == P("d")


def test_flags_of_a_microbatched_function_stay_python_values():
    f = mm.microbatch(lambda x, flip: jnp.sum(-front(W[0], x) if flip else front(W[0], x)), size=2)
    assert_same(mm.jit(f, static_argnums=1)(X, True), -mm.jit(f, static_argnums=1)(X, False))


def test_a_layout_that_names_no_axis_of_any_submesh_is_refused():
    with pytest.raises(mm.UsageError, match=r"axis 'typo'.*axes are \['d'\]"):
        mm.jit(lambda x: front(W[0], x), out_shardings=P("typo"))(X)
