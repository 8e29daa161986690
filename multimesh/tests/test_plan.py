"""The plan: what runs where and when, as data, and as text that fits a terminal."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from models import MLP
from pipelines import Split, gradient, submeshes
from test_forecast import plan_of

import multimesh as mm


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
    records = lowered.passes()
    assert records[-1].result.instructions == lowered.plan.instructions
    assert records[-1].result.over == lowered.plan.over != {}  # what delayed reductions leave: it was no other program
    assert all(str(p) for p in records)


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


@pytest.mark.parametrize("columns", [40, 80, 132])
@pytest.mark.parametrize(("schedule", "stages", "count"), [("1f1b", 4, 8), ("1f1b", 4, 64), ("interleaved", 8, 16)])
def test_no_line_is_wider_than_the_terminal(schedule, stages, count, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(plan_of(schedule, stages, count, meshes=4))
    assert max(map(len, text.splitlines())) <= columns
    assert [line[0] for line in text.splitlines()[-4:]] == list("0123")


def test_of_a_long_line_both_ends_are_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    row = str(plan_of("gpipe", 2, 32)).splitlines()[-1]
    assert row == "1 | unmarked zeros F0 F1 ... 60 more ... B30 B31 unmarked"


def test_of_many_submeshes_the_first_and_last_are_shown():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    one = mm.jit(lambda x: mm.task(lambda x: x + 1, "add", mesh=mesh)(x)).plan(np.ones(3, np.float32))
    many = dataclasses.replace(
        one,
        submeshes=one.submeshes * 100,
        instructions=tuple(dataclasses.replace(i, submesh=s) for s in range(100) for i in one.instructions),
    )
    lines = str(many).splitlines()
    assert len(lines) < 60
    assert sum("76 more submeshes" in line for line in lines) == 2
    assert lines[-1].startswith("99 | add")
