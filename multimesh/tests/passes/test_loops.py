"""Microbatch loops: scans to sums, two loops to one, and one leaf to each sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multimesh.core import _compat
from multimesh.marking import marks
from programs import inlined, loops, on, ones, separated

import multimesh as mm
from multimesh import schedules

HALVES = {"argnum": 1, "size": 2}


def two_stages(w, x):
    return on(1, jnp.sum)(on(0, lambda w, x: jnp.sin(x * w))(w, x))


def marked_scan(body, init, rows):
    """A scan under the mark of a microbatch loop, as only a broken caller could write it."""
    marked = jax.jit(_compat.set_name(lambda c, x: body(c, x), marks.BODY))
    scan = lambda x: jax.lax.scan(marked, init, x)[0]  # noqa: E731 - the mark is its name
    scan.__name__ = scan.__qualname__ = marks.loop_name(marks.LoopMark(rows, schedules.get("1f1b")))
    return jax.jit(scan)


@pytest.mark.parametrize(
    "body",
    [lambda c, x: (c * x, None), lambda c, x: (c + c + x, None), lambda c, x: (c + jnp.sin(c), None)],
    ids=["product", "doubled", "reads itself"],
)
def test_a_carry_that_is_no_sum(body):
    with pytest.raises(mm.MultiMeshError, match="not a plain sum over microbatches"):
        inlined(marked_scan(body, jnp.float32(0), 6), ones(6))


def test_forward_and_backward_become_one_loop():
    """Before: grad outside of microbatch leaves a loop that stacks and a loop that reads the stacks."""

    def f(w, x):
        return jax.grad(lambda w: mm.microbatch(two_stages, **HALVES)(w, x))(w)

    traced = inlined(f, ones(), ones(6))
    assert [(len(loop.stacks) > 0, loop.backward) for loop in loops(traced)] == [(True, False), (False, True)]
    (loop,) = loops(separated(f, ones(), ones(6)))
    assert (len(loop.sums), len(loop.stacks), len(loop.linked)) == (1, 0, 0)
    assert [op.backward for op in loop.ops] == sorted(op.backward for op in loop.ops)
    assert {op.backward for op in loop.ops} == {False, True}


def test_a_backward_that_needs_the_whole_forward_sum_is_a_second_loop():
    """It reads the rows that the first one made, iteration by iteration, and no stack."""

    def f(w, x):
        return jax.grad(lambda w: mm.microbatch(two_stages, **HALVES)(w, x) ** 2)(w)

    first, second = loops(separated(f, ones(), ones(6)))
    assert not first.stacks
    outputs = {o for op in first.ops for o in op.outs}
    assert second.linked
    assert set(second.linked.values()) <= outputs
    assert first.sums[0].out not in set(second.consts.values())  # through the operations between the loops
    assert all(s.leaf in {o for op in second.ops for o in op.outs} for s in second.sums)


@pytest.mark.parametrize("times", [1, 2])
def test_a_sum_of_cotangents_that_is_two_results(times):
    """Nothing is taken apart that another result sums too, or that is carried to the next microbatch."""

    def f(w, x, state):
        grad = jax.grad(lambda w: on(0, lambda w, x: jnp.sum(jnp.sin(w * x) * w))(w, x))(w)
        return grad, (state, *[grad] * times)

    w, x = np.float32(0.5), np.arange(6, dtype=np.float32)
    last, actual = mm.jit(mm.microbatch(f, **HALVES, carry=2))(w, x, np.float32(0))
    slopes = [jax.grad(lambda w, x=x: jnp.sum(jnp.sin(w * x) * w))(w) for x in (x[0::3], x[1::3], x[2::3])]
    np.testing.assert_allclose([last, *actual], [slopes[-1], sum(slopes[:-1]), *[sum(slopes)] * times], rtol=1e-6)


def test_an_initial_value_is_added_after_the_loop():
    program = separated(marked_scan(lambda c, x: (c + 2 * x, None), jnp.float32(5), 6), ones(6))
    (loop,) = loops(program)
    assert [s.init for s in loop.sums] == [None]
    last = program.items[-1]
    assert last.prim.name == "add"
    assert loop.sums[0].out in last.ins
    assert program.outputs == last.outs
