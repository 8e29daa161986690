"""Loss and every gradient equal plain jit on one device: models x schedules x where the gradient is taken."""

import jax
import numpy as np
import pytest
from models import DROPOUT, MLP, MODELS, MOE, SKIP, TRANSFORMER
from pipelines import FORMS, SCHEDULES, Split, assert_same, check_gradient, gradient, reference_gradient, submeshes

import multimesh as mm

ROWS, SIZE = 16, 4


@pytest.mark.longer
@pytest.mark.telling("mlp-inside-1f1b", "skip-outside-gpipe", "dropout-outside-gpipe", "moe-inside-1f1b")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_two_stages(model, where, schedule):
    check_gradient(model, Split(submeshes(2, (2, 2))), 2, where=where, schedule=schedule)


@pytest.mark.telling("skip-gpipe")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", [TRANSFORMER, SKIP], ids=lambda m: m.name)
def test_four_stages(model, schedule):
    check_gradient(model, Split(submeshes(4, (2,))), 4, schedule=schedule)


@pytest.mark.telling("outside-context", "inside-scope")
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_task_can_be_a_context_or_a_registered_scope(form, where):
    check_gradient(SKIP, Split(submeshes(2, (2, 2)), form), 2, where=where)


@pytest.mark.parametrize(
    "model", [MLP, *(pytest.param(m, marks=pytest.mark.full) for m in (MOE, TRANSFORMER))], ids=lambda m: m.name
)
def test_more_stages_than_submeshes(model):
    """Stage s and stage s + 2 share a submesh: the activations come back to it."""
    check_gradient(model, Split(submeshes(2, (2,))), 4, schedule="gpipe")


@pytest.mark.telling("m=3-gpipe", "m=8-1f1b", "m=1-gpipe")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("rows", "size", "stages"),
    [(4, 4, 2), (6, 2, 2), (8, 1, 2), (2, 2, 8), (6, 2, 8)],
    ids=["m=1", "m=3", "m=8", "m=1 on 8", "m=3 on 8"],
)
def test_any_number_of_microbatches(rows, size, stages, schedule):
    """One, one that the stages do not divide, fewer than stages, and one row each."""
    check_gradient(MLP, Split(submeshes(stages, (1,))), stages, schedule=schedule, rows=rows, size=size)


def test_one_stage_on_all_devices():
    check_gradient(MLP, Split(submeshes(1, (4, 2))), 1)


@pytest.mark.longer
def test_no_microbatches():
    """A pipeline without a loop: plain value_and_grad over the tasks."""
    split = Split(submeshes(2, (2, 2)))
    params, batch = TRANSFORMER.init(2), TRANSFORMER.batch(8, 0)
    expected = jax.jit(jax.value_and_grad(lambda p, b: TRANSFORMER.loss(p, b, lambda s, f: f)))(params, batch)
    actual = mm.jit(jax.value_and_grad(lambda p, b: TRANSFORMER.loss(p, b, split)))(params, batch)
    assert_same(actual, expected)


@pytest.mark.telling("1f1b")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_repeats_to_the_last_bit(schedule):
    """The order of every sum is fixed by the plan, not by which program finishes first."""
    split = Split(submeshes(2, (2,)))
    step = mm.jit(gradient(MOE, split, size=SIZE, rows=ROWS, schedule=schedule))
    args = MOE.init(2), MOE.batch(ROWS, 0)
    first, *others = [jax.device_get(step(*args)) for _ in range(4)]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


def test_one_function_is_its_own_reference():
    """Outside mm.jit, tasks and microbatch mean the same and leave the placement to jax.jit."""
    split = Split(submeshes(2, (2,)))
    f = gradient(DROPOUT, split, size=SIZE, rows=ROWS)
    params, batch = DROPOUT.init(2), DROPOUT.batch(ROWS, 0)
    expected = reference_gradient(DROPOUT, 2, ROWS, SIZE)
    assert_same(jax.jit(f)(params, batch), expected)


@pytest.mark.full
def test_eager_calls_mean_the_same():
    f = gradient(MLP, Split(submeshes(2, (2,))), size=SIZE, rows=ROWS)
    assert_same(f(MLP.init(2), MLP.batch(ROWS, 0)), reference_gradient(MLP, 2, ROWS, SIZE))
