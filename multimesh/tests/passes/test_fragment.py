"""Fragments: operations of one submesh, phase and level; and what they recompute."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from multimesh.passes.cutting.fragment import fragment
from multimesh.passes.cutting.keep_less import keep_less
from multimesh.passes.cutting.parts import Pipeline, with_interfaces
from programs import loops, names, on, ones, placed

import multimesh as mm
from multimesh import ir


def straight(fn, *args):
    program = placed(fn, *args)
    return fragment(program.items, program.outputs, phased=False)


def loop_fragments(fn, *args):
    """Fragments of the loop of a program, and what is read outside of them."""
    (loop,) = loops(placed(fn, *args))
    results = set(ir.values([*(s.leaf for s in loop.sums), *loop.stacks.values()]))
    return loop, fragment(loop.ops, results, phased=True), results


def shape(fragments):
    return [(f.phase, f.level, f.task) for f in fragments]


def test_the_level_counts_changes_of_submesh():
    """a b a is three programs, though only two submeshes."""
    fragments = straight(lambda x: on(0, jnp.tan)(on(1, jnp.cos)(on(0, jnp.sin)(x))), ones(2))
    assert shape(fragments) == [(None, 0, "a"), (None, 1, "b"), (None, 2, "a")]
    first, second, third = fragments
    assert first.outs == second.ins
    assert second.outs == third.ins


def test_neighbours_on_a_submesh_are_one_fragment():
    def f(x):
        return jnp.exp(on(0, jnp.tan, "t")(on(0, jnp.sin, "s")(x)))

    (only,) = straight(f, ones(2))
    assert (only.task, names(only.ops)) == ("s+t", ["sin", "tan", "exp"])
    assert (len(only.ins), len(only.outs)) == (1, 1)


def test_forward_and_backward_of_a_loop_are_phases():
    def f(w, x):
        return on(1, lambda w, h: jnp.sum(jnp.sin(h * w)))(w, on(0, lambda w, x: jnp.sin(x * w))(w, x))

    _, fragments, _ = loop_fragments(mm.microbatch(jax.grad(f), argnum=1, size=2), ones(), ones(6))
    assert [(f.phase, f.task) for f in fragments if f.phase == "B"] == [("B", "b"), ("B", "a")]
    assert [f.level for f in fragments] == sorted(f.level for f in fragments)
    assert not any(op.backward for f in fragments if f.phase == "F" for op in f.ops)


def test_edges_lead_upwards():
    """From each fragment to higher levels only, so that none waits in a circle."""

    def f(x):
        y = on(0, jnp.sin)(x)
        z = on(1, jnp.cos)(y)
        return on(0, lambda y, z: y * z)(y, z), on(2, jnp.tan)(z), on(1, jnp.exp)(z)

    fragments = straight(f, ones(2))
    maker = {o: f for f in fragments for o in f.outs}
    edges = [(maker[v].level, f.level) for f in fragments for v in f.ins if v in maker]
    assert len(edges) >= 3
    assert all(a < b for a, b in edges)


def test_a_fragment_that_only_a_later_one_of_its_submesh_reads_is_joined_to_it():
    """The sine could run at level 1; it waits for the rest of its submesh, and saves a program."""

    def f(x):
        y = on(1, jnp.cos)(x)
        late = on(1, jnp.exp)(on(2, jnp.tan)(y))
        return on(0, lambda y, z: y * z)(on(0, jnp.sin)(y), late)

    assert shape(straight(f, ones(2))) == [(None, 0, "b"), (None, 1, "c"), (None, 2, "b"), (None, 3, "a")]


def test_what_depends_on_inputs_only_joins_its_first_reader():
    def f(w, x):
        half = on(1, lambda w: w.astype(jnp.bfloat16))(w)
        return on(1, lambda w, h: h * w)(half, on(0, jnp.sin)(x))

    fragments = straight(f, ones(2), ones(2))
    assert shape(fragments) == [(None, 0, "a"), (None, 1, "b")]


def test_dead_operations_leave():
    def f(x):
        y = on(0, lambda x: (jnp.sin(x), jnp.cos(x)))(x)
        return y[0]

    (only,) = straight(f, ones(2))
    assert names(only.ops) == ["sin"]


def test_joined_fragments_keep_what_others_read():
    def f(x):
        return on(2, jnp.exp)(on(1, jnp.tan)(on(0, jnp.sin)(x))), on(0, jnp.sin)(x)

    fragments = straight(f, ones(2))
    first, second, third = fragments
    joined = replace(second, ops=first.ops + second.ops)
    both, third = with_interfaces([joined, third], {first.outs[-1], *third.outs})
    assert both.ins == first.ins
    assert set(both.outs) == {*second.outs, first.outs[-1]}
    assert both.ops == first.ops + second.ops
    assert set(third.ins) <= set(both.outs)


def residuals(fn):
    """What the backward of a stage on ``a`` reads from its forward, before and after, and the fragment itself."""

    def loss(w, x):
        return on(1, lambda h: jnp.sum(h * h))(on(0, fn)(w, x))

    f = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2)
    loop, fragments, results = loop_fragments(f, ones(3, 3), ones(6, 3))
    found = []
    for parts in (fragments, keep_less(Pipeline(loop, fragments, frozenset(results))).fragments):
        maker = {o: op.prim.name for f in parts if f.phase == "F" for op in f.ops for o in op.outs}
        last = parts[-1]
        assert (last.phase, last.task) == ("B", "a")
        found.append([maker[v] for v in last.ins if v in maker])
    return *found, last


def test_elementwise_results_are_computed_again_from_what_is_kept():
    """One array instead of several goes from forward to backward."""
    before, after, last = residuals(lambda w, x: jnp.sin(x @ w) ** 3 * jnp.cos(x @ w))
    assert len(before) > len(after)
    assert set(after) == {"dot_general"}
    assert {"sin", "cos"} <= set(names(last.ops))


def test_a_product_of_matrices_is_kept():
    _, after, last = residuals(lambda w, x: jnp.sin(x @ w))
    assert after == ["dot_general"]
    assert [op.backward for op in last.ops if op.prim.name == "dot_general"] == [True]
