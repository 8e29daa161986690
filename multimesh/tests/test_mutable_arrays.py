"""``jax.new_ref``: within a task as under ``jax.jit``; what several programs would share is refused in a line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import assert_same, submeshes

import multimesh as mm

MESHES = submeshes(2, (1,))
X = np.arange(8, dtype=np.float32)
LINE = r"^\S+test_mutable_arrays.py:\d+: "


def add(ref, x):
    ref[...] += x
    return ref[...]


def count_calls(x):
    return add(jax.new_ref(jnp.zeros_like(x)), x)


first, second = (lambda fn, mesh=mesh: mm.task(fn, mesh=mesh) for mesh in MESHES)


def test_made_and_read_within_a_task_or_outside_of_all():
    def step(x):
        return first(count_calls)(x), second(lambda x: count_calls(2 * x))(x), count_calls(3 * x)

    assert_same(mm.jit(step)(X), jax.jit(step)(X))


def test_made_and_read_within_a_microbatch():
    def body(w, x):
        return second(jnp.sum)(first(lambda w, x: count_calls(w * x))(w, x))

    step = mm.microbatch(body, size=2, argnum=1)
    assert_same(mm.jit(step)(np.float32(2), X), jax.jit(step)(np.float32(2), X))


@pytest.mark.parametrize(
    "fn",
    [
        lambda state, x: first(add)(state["seen"], x),
        lambda state, x: add(state["seen"], first(jnp.sin)(x)),
        lambda state, x: mm.microbatch(lambda x: add(state["seen"], first(jnp.sin)(x)[0]), size=2)(x),
    ],
)
def test_as_an_argument(fn):
    state = {"seen": jax.new_ref(jnp.zeros(8))}
    with pytest.raises(mm.UsageError, match=r"state\[.seen.\] is a mutable array \(jax.new_ref\).*pass its value"):
        mm.jit(fn)(state, X)
    assert_same(state["seen"][...], 0 * X)


def test_captured():
    ref = jax.new_ref(jnp.zeros(8))
    for fn in (
        lambda x: first(lambda x: add(ref, x))(x),
        lambda x: add(ref, first(jnp.sin)(x)),
        lambda x: mm.microbatch(lambda x: add(ref, first(jnp.sin)(x)[0]).sum(), size=2)(x),
    ):
        with pytest.raises(mm.UsageError, match=LINE + r".*mutable array \(jax.new_ref\) that was made elsewhere"):
            mm.jit(fn)(X)
    assert_same(ref[...], 0 * X)


def test_from_one_task_to_another():
    def step(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        first(lambda x: add(ref, x))(x)
        return second(lambda x: add(ref, x))(x)

    with pytest.raises(mm.UsageError, match=LINE + r".*in task .* that was made elsewhere.*give the task its value"):
        mm.jit(step)(X)


def test_updated_by_every_stage_of_a_pipeline():
    def loss(weights, x):
        total = jax.new_ref(jnp.zeros(()))
        for w in weights:
            x = x + jnp.tanh(x @ w)
            add(total, jnp.mean(x**2))
        return jnp.mean(x) + total[...]

    args = [np.eye(8, dtype="f")] * 4, np.ones((8, 8), "f")
    pipelined = mm.pipeline(loss, MESHES)
    for fn in (pipelined, jax.grad(pipelined), mm.microbatch(jax.grad(pipelined), size=2, argnum=1)):
        with pytest.raises(
            mm.UsageError, match=LINE + r"pipeline: stages 0 and 1 both use this mutable array .* return"
        ):
            mm.jit(fn)(*args)


def test_made_within_a_stage_of_a_pipeline():
    def loss(weights, x):
        for w in weights:
            x = x + count_calls(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    args = [np.eye(8, dtype="f")] * 4, np.ones((8, 8), "f")
    step = mm.microbatch(jax.value_and_grad(mm.pipeline(loss, MESHES)), size=4, argnum=1, reduce="mean")
    assert_same(mm.jit(step)(*args), jax.jit(jax.value_and_grad(loss))(*args))
