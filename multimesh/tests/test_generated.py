"""Programs from seeds against plain jit: pipelines over microbatches, also with typed layouts, and straight graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import generated
import graphs
import jax
import jax.numpy as jnp
import pytest
import surrounded
import typed_programs
from pipelines import assert_same, microbatched

import multimesh as mm

SEEDS, ALL = 100, 2000


def check_seeds(first: int, count: int, draw: Callable[[int], Any], check: Callable[[Any], None]) -> None:
    """Check what some seeds draw; a failure tells the seed, and what it drew."""
    for seed in range(first, first + count):
        program = draw(seed)
        try:
            check(program)
        except Exception as error:
            error.add_note(f"seed {seed}: {program}")
            raise
    jax.clear_caches()


KINDS = {
    "pipelines": (generated.program, generated.check),
    "surrounded": (surrounded.surrounded, surrounded.check),
    "typed": (typed_programs.typed_program, typed_programs.check_typed),
}
TOGETHER = {"pipelines": 25, "surrounded": 25, "typed": 10}  # a typed one takes 2 s


def parts(start: int, stop: int) -> list[Any]:
    """The first seed of each case, and its kind."""
    return [pytest.param(n, kind, id=f"{n}-{kind}") for kind in KINDS for n in range(start, stop, TOGETHER[kind])]


@pytest.mark.longer
@pytest.mark.telling("0-pipelines", "0-surrounded", "0-typed")
@pytest.mark.parametrize(("first", "kind"), parts(0, SEEDS))
def test_programs(first, kind):
    check_seeds(first, TOGETHER[kind], *KINDS[kind])


@pytest.mark.full
@pytest.mark.parametrize(("first", "kind"), parts(SEEDS, ALL))
def test_many_programs(first, kind):
    check_seeds(first, TOGETHER[kind], *KINDS[kind])


def test_the_seeds_draw_every_surrounding():
    programs = [surrounded.surrounded(seed) for seed in range(SEEDS)]
    assert {d.transform for d in programs} == set(surrounded.AROUND)
    assert {d.ambient for d in programs} == set(surrounded.AMBIENT)
    assert {d.ambient for d in programs if d.transform in ("vmap", "grad")} == set(surrounded.AMBIENT)
    assert any(d.form == "block" and d.program.inner and d.program.gradient != "none" for d in programs)


def test_the_seeds_draw_everything():
    """Every schedule, dtype, gradient, layer and result is among the default ones."""
    programs = [generated.program(seed) for seed in range(SEEDS)]
    assert {p.schedule for p in programs} == {*mm.schedules.names(), "auto"}
    assert {p.dtype for p in programs} == {*generated.SMOOTH, *generated.EXACT}
    assert {p.gradient for p in programs} == set(generated.GRADIENTS)
    assert {kind for p in programs for kind in p.layers} == set(generated.LAYERS)
    assert {r.kind for p in programs for r in p.results} == set(generated.RESULTS)
    assert {p.checkpoint for p in programs} == {"none", "stage", "model"}
    assert any(p.carry is not None and not p.reads_state for p in programs)
    assert {p.start for p in programs if p.carry is not None} == set(generated.STARTS)
    assert {p.extra_task for p in programs if p.schedule == "auto"} == {"none", "first", "last"}
    assert any(p.key is not None for p in programs)
    assert any(p.clip for p in programs)
    assert {p.gradient for p in programs if p.order is not None} == set(generated.GRADIENTS)


def test_the_seeds_draw_every_typed_program():
    programs = [typed_programs.typed_program(seed) for seed in range(SEEDS)]
    assert {p.schedule for p in programs} == set(typed_programs.SCHEDULES)
    assert {p.gradient for p in programs} == set(typed_programs.GRADIENTS)
    assert {name for p in programs for name in p.bodies} == set(typed_programs.BODIES)
    assert {(p.form, p.reduced) for p in programs} == {(f, r) for f in ("task", "pipeline") for r in (False, True)}
    assert {p.shapes[0] == p.shapes[1] for p in programs} == {False, True}
    assert {p.ambient for p in programs} == {None, 0, 1}


def check_forward(graph: graphs.Graph) -> None:
    args = graphs.inputs()
    assert_same(mm.jit(lambda *a: graph.run(a, True))(*args), jax.jit(lambda *a: graph.run(a, False))(*args))


def check_gradient(graph: graphs.Graph) -> None:
    def loss(tasks: bool) -> Any:
        return jax.value_and_grad(lambda *a: sum(jnp.square(y).mean() for y in graph.run(a, tasks)), argnums=(0, 1, 2))

    args = graphs.inputs()
    assert_same(mm.jit(loss(True))(*args), jax.jit(loss(False))(*args))


def check_loop(graph: graphs.Graph) -> None:
    """The first input is the batch, the others are parameters: their gradients, summed over four microbatches.

    Each graph has a schedule; only zb-h1 may refuse, a graph that comes to a submesh twice.
    """
    names = mm.schedules.names()
    schedule = names[sum(node.left + node.right for node in graph.nodes) % len(names)]
    x, *params = graphs.inputs()
    params = [p[:2] for p in params]

    def make(tasks: bool, loop: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return sum(jnp.square(y).mean() for y in graph.run([x, *params], tasks))

        return loop(jax.value_and_grad(loss), size=2, argnum=1)

    step = mm.jit(make(True, functools.partial(mm.microbatch, schedule=schedule)))
    try:
        step.plan(params, x)
    except mm.UsageError as error:
        if schedule == "zb-h1" and "one stage a submesh" in str(error):
            return
        raise
    assert_same(step(params, x), jax.jit(make(False, microbatched))(params, x))


CHECKS = {"forward": check_forward, "gradient": check_gradient, "loop": check_loop}


@pytest.mark.longer
@pytest.mark.parametrize("check", CHECKS)
def test_graphs(check):
    check_seeds(0, 6, graphs.graph, CHECKS[check])


@pytest.mark.longer
def test_what_only_inputs_make_is_made_forward_where_both_directions_read_it():
    """Found at random: the backward reads it at an earlier level than the forward, which then waited for a backward."""
    graph = graphs.Graph(
        starts=((0, 1), (0, 2)),
        nodes=tuple(
            graphs.Node("matmul" if (a, b) == (2, 4) else "add", a, b, submesh)
            for a, b, submesh in (
                *((0, 0, None), (0, 0, 1), (2, 2, None), (2, 2, None)),
                *((2, 4, None), (4, 1, None), (2, 0, 0)),
            )
        ),
        outputs=(7, 9),
    )
    check_loop(graph)


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_many_graphs(check):
    check_seeds(6, 150, graphs.graph, CHECKS[check])
