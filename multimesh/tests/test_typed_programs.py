"""Typed programs from seeds (`typed_programs`) against plain jit."""

import pytest
from test_generated import each
from typed_programs import BODIES, GRADIENTS, SCHEDULES, check_typed, typed_program

FEW, SEEDS, ALL, TOGETHER = 1, 100, 2000, 20


@pytest.mark.longer
def test_few():
    each(0, FEW, typed_program, check_typed)


@pytest.mark.longer
@pytest.mark.telling("0")
@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_some(first):
    each(first, TOGETHER, typed_program, check_typed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(SEEDS, ALL, TOGETHER))
def test_many(first):
    each(first, TOGETHER, typed_program, check_typed)


def test_the_seeds_draw_everything():
    drawn = [typed_program(seed) for seed in range(SEEDS)]
    assert {p.schedule for p in drawn} == set(SCHEDULES)
    assert {p.gradient for p in drawn} == set(GRADIENTS)
    assert {name for p in drawn for name in p.bodies} == set(BODIES)
    assert {(p.form, p.reduced) for p in drawn} == {(f, r) for f in ("task", "pipeline") for r in (False, True)}
    assert {p.shapes[0] == p.shapes[1] for p in drawn} == {False, True}
    assert {p.ambient for p in drawn} == {None, 0, 1}
