"""Fragments cut into one program per task."""

import jax
import jax.numpy as jnp
from multimesh.passes.cutting.fragment import fragment
from multimesh.passes.cutting.parts import Pipeline
from multimesh.passes.cutting.unfuse import pieces
from programs import names, on, ones, pipelined, placed

import multimesh as mm


def only_fragment(fn, *args):
    program = placed(fn, *args)
    (only,) = fragment(program.items, program.outputs, phased=False)
    return only


def cut_in(fn, *args):
    return [(piece.task, names(piece.ops)) for piece in pieces(only_fragment(fn, *args))]


def test_one_piece_a_task_in_order_of_dataflow():
    part = only_fragment(lambda x: on(0, jnp.tan, "t")(on(0, jnp.sin, "s")(x)), ones(2))
    first, second = pieces(part)
    assert [first.task, second.task] == ["s", "t"]
    assert (first.ins, second.outs) == (part.ins, part.outs)
    assert first.outs == second.ins


def test_a_task_called_again_after_another_is_a_piece_again():
    s, t = on(0, jnp.sin, "s"), on(0, jnp.tan, "t")
    assert cut_in(lambda x: s(t(s(s(x)))), ones(2)) == [("s", ["sin", "sin"]), ("t", ["tan"]), ("s", ["sin"])]


def test_unmarked_operations_go_with_what_they_read_or_else_with_their_first_reader():
    def f(x, y):
        h = jnp.exp(on(0, jnp.sin, "s")(x))
        return on(0, lambda a, b: a * b, "t")(h, jnp.cos(y))

    assert cut_in(f, ones(2), ones(2)) == [("s", ["sin", "exp"]), ("t", ["cos", "mul"])]


def test_unmarked_code_stays_whole():
    assert len(pieces(only_fragment(lambda x: jnp.exp(jnp.exp(on(0, jnp.sin, "s")(x))), ones(2)))) == 1


def test_what_a_turn_joined_comes_apart():
    """1f1b joins forward and backward of the last stage; cut, each task is there once a phase and microbatch."""

    def loss(w, x):
        h = on(0, lambda w, x: x @ w, "a1")(w, x)
        return on(1, jnp.sum, "c")(on(1, jnp.sin, "b")(h))

    program = placed(mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2), ones(3, 3), ones(6, 3))

    def order(**options):
        return next(p for p in pipelined(program, **options).parts if isinstance(p, Pipeline))

    joined, single = order(), order(enable_task_fusion=False)
    assert [(s.phase, s.task) for s in joined.fragments] == [("F", "a1"), ("B", "b+c"), ("B", "a1")]
    assert [(s.phase, s.task) for s in single.fragments] == [
        *(("F", "a1"), ("F", "b"), ("F", "c")),
        *(("B", "c"), ("B", "b"), ("B", "a1")),
    ]
    assert len(single.cells) == 6 * 3
    assert len(set(single.cells)) == len(single.cells)
    part_of = {stage: i for stage in single.fragments for i, other in enumerate(single.fragments) if other is stage}
    maker = {o: i for stage, i in part_of.items() for o in stage.outs}
    seen = set()
    for index, microbatch in single.cells:
        needed = {(maker[v], microbatch) for v in single.fragments[index].ins if v in maker}
        assert needed <= seen
        seen.add((index, microbatch))
