"""The plan: what runs where and when, as data."""

import collections
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from models import MLP, SKIP, TRANSFORMER
from pipelines import SCHEDULES, Split, gradient, submeshes

import multimesh as mm

KINDS = {"RUN", "SEND", "RECV", "FREE"}
SIZE = 2


def plan_of(schedule, stages, count, where="inside", model=MLP):
    split = Split(submeshes(stages, (1,)))
    f = mm.jit(gradient(model, split, size=SIZE, rows=SIZE * count, where=where, schedule=schedule))
    return f.plan(model.init(stages), model.batch(SIZE * count, 0))


def runs(plan):
    return [i for i in plan.instructions if i.kind == "RUN" and i.microbatch is not None]


def by_submesh(instructions):
    grouped = collections.defaultdict(list)
    for i in instructions:
        grouped[i.submesh].append(i)
    return [grouped[k] for k in sorted(grouped)]


def test_instructions_are_frozen_data():
    plan = plan_of("1f1b", 2, 4)
    assert isinstance(plan.instructions, tuple)
    assert {i.kind for i in plan.instructions} <= KINDS
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.instructions[0].kind = "RUN"


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "count"), [(2, 3), (4, 8)])
def test_every_stage_microbatch_and_phase_exactly_once(stages, count, schedule, where):
    done = collections.Counter(
        (i.submesh, i.task, i.microbatch, i.phase) for i in runs(plan_of(schedule, stages, count, where))
    )
    assert set(done.values()) == {1}
    submeshes_seen = sorted({submesh for submesh, *_ in done})
    assert len(submeshes_seen) == stages
    for submesh in submeshes_seen:
        cells = {(mb, phase) for s, _, mb, phase in done if s == submesh}
        phases = {phase for _, phase in cells}
        assert phases == {"F", "B"} or (submesh == submeshes_seen[-1] and phases)
        assert cells == set(itertools.product(range(count), phases))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_global_order_keeps_the_dependencies(schedule):
    """Forward through the stages, then backward through them, for every microbatch."""
    stages, count = 4, 6
    position = {
        (i.submesh, i.microbatch, i.phase): n
        for n, i in enumerate(plan_of(schedule, stages, count).instructions)
        if i.kind == "RUN"
    }
    for mb in range(count):
        forward = [position[s, mb, "F"] for s in range(stages) if (s, mb, "F") in position]
        backward = [position[s, mb, "B"] for s in reversed(range(stages)) if (s, mb, "B") in position]
        assert forward + backward == sorted(forward + backward)
        assert len(forward) >= stages - 1


@pytest.mark.parametrize("model", [MLP, SKIP, TRANSFORMER], ids=lambda m: m.name)
def test_every_transfer_is_received_once(model):
    """A RECV for every SEND, after it."""
    plan = plan_of("1f1b", 2, 4, model=model)
    sent = collections.Counter()
    for i in plan.instructions:
        if i.kind == "SEND":
            sent[i.microbatch, i.phase] += 1
        elif i.kind == "RECV":
            sent[i.microbatch, i.phase] -= 1
            assert sent[i.microbatch, i.phase] >= 0
    assert sent
    assert set(sent.values()) == {0}


def live_microbatches(plan):
    """The most microbatches between their forward and their backward, a submesh."""
    peaks = []
    for instructions in by_submesh(runs(plan)):
        live, peak = set(), 0
        for i in instructions:
            live = live | {i.microbatch} if i.phase == "F" else live - {i.microbatch}
            peak = max(peak, len(live))
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("count", [2, 8, 16])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_live_microbatches(count, where):
    stages = 4
    peaks = live_microbatches(plan_of("1f1b", stages, count, where))
    assert peaks[0] == min(stages, count)
    assert all(peak <= stages - s for s, peak in enumerate(peaks))
    assert live_microbatches(plan_of("gpipe", stages, count, where))[0] == count


def test_one_forward_one_backward():
    """After the warm-up every stage alternates."""
    stages, count = 4, 8
    for s, instructions in enumerate(by_submesh(runs(plan_of("1f1b", stages, count)))[:-1]):
        phases = "".join(i.phase for i in instructions)
        warm = stages - s
        assert phases == "F" * warm + "BF" * (count - warm) + "B" * warm


def test_gpipe_is_also_called_fill_drain():
    orders = [[(i.submesh, i.microbatch, i.phase) for i in runs(plan_of(s, 2, 4))] for s in ("gpipe", "fill-drain")]
    assert orders[0] == orders[1]


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


def test_text_and_json():
    plan = plan_of("1f1b", 2, 4)
    assert str(plan)
    data = plan.to_json()
    data = json.loads(data) if isinstance(data, str) else json.loads(json.dumps(data))
    assert len(data["instructions"]) == len(plan.instructions)


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
    assert [p.name for p in done][:7] == ["inline", "fuse", "separate", "slices", "accumulate", "stacks", "place"]
    assert done[-1].made.instructions == lowered.plan.instructions
    assert done[-1].made.over == lowered.plan.over != {}  # what delayed reductions leave: it was no other program
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
