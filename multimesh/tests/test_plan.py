"""The plan: what runs where and when, as data."""

import collections

import jax
import jax.numpy as jnp
from models import MLP
from pipelines import Split, gradient, submeshes

import multimesh as mm

SIZE = 2


def plan_of(schedule, stages, count, where="inside", model=MLP):
    split = Split(submeshes(stages, (1,)))
    f = mm.jit(gradient(model, split, size=SIZE, rows=SIZE * count, where=where, schedule=schedule))
    return f.plan(model.init(stages), model.batch(SIZE * count, 0))


def test_residuals_are_not_sent():
    """Only an activation goes forward and its cotangent back, whatever a stage keeps for its backward."""
    stages, count = 4, 3
    sends = collections.Counter(
        (i.microbatch, i.phase)
        for i in plan_of("1f1b", stages, count).instructions
        if i.kind == "SEND" and i.microbatch is not None
    )
    for mb in range(count):
        assert sum(n for (m, _), n in sends.items() if m == mb) <= 2 * (stages - 1) + 2  # and the rows of x and y


def test_a_plan_needs_shapes_only():
    split = Split(submeshes(2, (1,)))
    args = MLP.init(2), MLP.batch(8, 0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    f = mm.jit(gradient(MLP, split, size=2, rows=8))
    assert f.plan(*shapes).instructions == f.plan(*args).instructions


def test_the_passes_of_a_lowered_function_end_in_its_plan():
    split = Split(submeshes(2, (2,)))
    lowered = mm.jit(gradient(MLP, split, size=2, rows=8)).lower(MLP.init(2), split.lay_out(MLP.batch(8, 0)))
    done = lowered.passes()
    assert done[-1].result.instructions == lowered.plan.instructions
    assert done[-1].result.over == lowered.plan.over != {}  # what delayed reductions leave: it was no other program
    assert all(str(p) for p in done)


def test_a_forward_pass_starts_a_kernel_for_each_microbatch_and_stage():
    """No zeros and no copies. Kernels beside the loop cut the batch, and stack the results of microbatches."""
    meshes, rows, size = submeshes(4), 16, 2

    def forward(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    cut = mm.pipeline(forward, meshes)
    call = mm.jit(mm.microbatch(cut, size=size, argnum=1, reduce="rows", schedule="wavefront"))
    plan = call.plan([jnp.ones((8, 8))] * 8, jnp.ones((rows, 8)))
    stages = [run.cell.stage for run in plan.runs if run.cell]
    assert [stages.count(stage) for stage in range(4)] == [rows // size] * 4
    assert len(plan.runs) - len(stages) <= 3
    assert all(kernel.make != "zeros" for kernel in plan.kernels)
    assert len(plan.transfers) == 3 * rows // size
