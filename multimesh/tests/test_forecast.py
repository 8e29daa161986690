"""Forecasts of plans: their tables simulated with their own programs, on an accelerator too; and measured runs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MLP
from multimesh.commands import forecast
from multimesh.commands.forecast import Shape
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import device
from multimesh_planner.hardware.software import software
from pipelines import Split, gradient, submeshes

import multimesh as mm
from multimesh import schedules

SIZE = 2


def plan_of(schedule, stages, count, where="inside", meshes=None):
    meshes = meshes or stages
    split = Split(submeshes(meshes, (1,)), placement=schedules.get(schedule).placement(meshes))
    f = mm.jit(gradient(MLP, split, size=SIZE, rows=SIZE * count, where=where, schedule=schedule))
    return f.plan(MLP.init(stages), MLP.batch(SIZE * count, 0))


@pytest.mark.parametrize(
    ("schedule", "where"),
    [("gpipe", "outside"), *((name, "inside") for name in schedules.names() if name != "fill-drain")],
)
def test_a_plan_is_idle_for_as_long_as_its_table(schedule, where):
    """This holds where phases of a stage are one program too: the last forward and backward, or the first B and W."""
    costs, chunks = {"F": 1.0, "B": 1.5, "W": 0.5}, schedules.get(schedule).usual
    line = plan_of(schedule, 4 * chunks, 8, where, meshes=4).simulate(costs)
    stage_costs = {phase: chunks * cost for phase, cost in costs.items()}  # of all stages of a submesh
    table = forecast.simulate_schedule(schedule, Shape(4, chunks, 8), stage_costs).timeline
    assert line.makespan == pytest.approx(table.makespan)
    assert line.idle == pytest.approx(table.idle)
    stages_text = " of 2 stages" if chunks > 1 else ""
    assert line.title == f"{schedule}: 4 submeshes{stages_text}, 8 microbatches"


def test_the_last_stage_of_1f1b_is_one_program_of_both_phases():
    line = plan_of("1f1b", 2, 4).simulate({"F": 1, "B": 2})
    assert {s.phases for s in line.row(0) if s.phases} == {"F", "B"}
    assert {(s.phases, s.duration) for s in line.row(1) if s.phases} == {("FB", 3)}


def test_costs_by_stage_task_and_phase():
    """The most telling key counts."""
    plan = plan_of("gpipe", 2, 3)
    given_costs = {"F": 1, "B": 2, (1, "F"): 3, ("stage1", "B"): 5, (0, "B"): 7}
    times = {(s.row, s.phases): s.duration for s in plan.simulate(given_costs).spans if s.phases}
    assert times == {(0, "F"): 1, (0, "B"): 7, (1, "F"): 3, (1, "B"): 5}
    task_costs = {"F": 1, "B": 2, "stage0": 4, (0, "B"): 5}
    times = {(s.row, s.phases): s.duration for s in plan.simulate(task_costs).spans if s.phases}
    assert times == {(0, "F"): 4, (0, "B"): 5, (1, "F"): 1, (1, "B"): 2}


def test_programs_outside_of_the_loop_are_free_unless_named():
    plan = plan_of("gpipe", 2, 3)
    assert {s.duration for s in plan.simulate().spans if not s.phases} == {0}
    timeline = plan.simulate({"F": 1, "B": 1, "zeros": 2})
    assert {s.duration for s in timeline.spans if s.name == "zeros"} == {2}


def test_transfers_take_their_time():
    plan = plan_of("gpipe", 2, 3)
    free, slow = plan.simulate(), plan.simulate({"F": 1, "B": 2, "transfer": 0.5})
    assert slow.makespan == free.makespan + 2 * 0.5
    count, size = plan.traffic()
    assert sum(t.nbytes for t in slow.transfers) == size
    for t in slow.transfers:
        assert t.end - t.start == 0.5
        assert t.producer is None or slow.spans[t.producer].end <= t.start
        assert all(slow.spans[reader].start >= t.end for reader in t.consumers)
    assert count


@pytest.mark.parametrize(
    ("costs", "name"),
    [
        ({"F": 1}, "none for B of stage 1"),
        ({"F": 1, "B": 1, "X": 1}, "'X' is no phase, task or stage of this plan; it has"),
        ({"F": 1, "B": 1, (7, "F"): 1}, "(7, 'F') is no phase"),
        ({"F": 1, "B": -2}, "that of 'B' must be a finite number"),
        ({"F": 1, "B": 1, "transfer": float("nan")}, "that of 'transfer'"),
    ],
)
def test_bad_costs(costs, name):
    with pytest.raises(mm.UsageError) as error:
        plan_of("gpipe", 2, 2).simulate(costs)
    assert name in str(error.value)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_peaks_are_those_of_the_plan_when_nothing_takes_longer_than_expected(schedule):
    plan = plan_of(schedule, 4, 8)
    assert plan.simulate().peaks == plan.peak_bytes()


def test_a_plan_without_a_loop():
    first, second = submeshes(2, (1,))

    def fn(x):
        return mm.task(lambda x: x * 2, "double", mesh=second)(mm.task(lambda x: x + 1, "add", mesh=first)(x))

    line = mm.jit(fn).plan(np.ones(3, np.float32)).simulate({"add": 1, "double": 2, "transfer": 4})
    assert line.title == "plan: 2 submeshes"
    assert [(s.name, s.start, s.end) for s in line.spans] == [("add", 0, 1), ("double", 5, 7)]
    assert line.peaks == (12, 24)


@pytest.fixture(scope="module")
def step():
    """A step of SGD that donates its parameters, compiled, and its arguments."""
    split = Split(submeshes(2, (2,)))
    grad = gradient(MLP, split, size=SIZE, rows=SIZE * 4)

    def step(params, batch):
        loss, grads = grad(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    host = MLP.init(2)
    args = split.place(host, MLP.owners(host)), MLP.batch(SIZE * 4, 0)
    return mm.jit(step, donate_argnums=0).lower(*args).compile(), args


def test_a_profile_measures_every_program_one_after_another(step):
    compiled, args = step
    profile = compiled.profile(*args, repeats=2)
    plan = compiled.plan
    assert len(profile.measured.spans) == sum(i.kind == "RUN" for i in plan.instructions)
    assert len(profile.measured.transfers) == sum(i.kind == "SEND" for i in plan.instructions)
    items = sorted([*profile.measured.spans, *profile.measured.transfers], key=lambda item: item.start)
    assert all(a.end <= b.start for a, b in itertools.pairwise(items))
    assert all(item.end > item.start for item in items)
    assert len(profile.costs.programs) == len(plan.kernels)
    assert all(seconds > 0 for seconds in profile.costs.programs)
    assert profile.call > 0
    assert "one kernel at a time" in profile.measured.note
    simulated = plan.simulate(profile.costs)
    assert (simulated.makespan, simulated.idle) == (profile.simulated.makespan, profile.simulated.idle)


def test_a_profile_leaves_the_arguments_to_the_caller(step):
    compiled, args = step
    compiled.profile(*args, repeats=1)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))
    copies = jax.tree.map(lambda x: x + 0, args)
    compiled(*copies)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copies[0]))  # an ordinary call takes them


def test_measured_against_forecast_in_one_table(step):
    compiled, args = step
    lines = str(compiled.profile(*args, repeats=1)).splitlines()
    assert [line.split()[0] for line in (*lines[4:6], *lines[7:9])] == ["0", "1", "measured", "simulated"]
    assert "do not overlap" in lines[10]  # CPU devices, two on each submesh
    assert max(map(len, lines[:10])) <= 80


def test_costs_of_another_plan(step):
    compiled, args = step
    message = "costs: measured on a plan of 9 kernels, but this one has 10; profile it"
    with pytest.raises(mm.UsageError, match=message):
        plan_of("gpipe", 2, 2).simulate(compiled.profile(*args, repeats=1).costs)


def test_a_profile_needs_a_run(step):
    compiled, args = step
    with pytest.raises(mm.UsageError, match="repeats must be at least 1, got 0"):
        compiled.profile(*args, repeats=0)
    with pytest.raises(mm.UsageError, match="compiled for arguments"):
        compiled.profile(*args, *args)


def test_static_arguments_are_no_part_of_a_compiled_call():
    mesh, _ = submeshes(2, (1,))
    fn = mm.jit(lambda n, x: mm.task(lambda x: x * n, "times", mesh=mesh)(x), static_argnums=0)
    assert [s.name for s in fn.profile(3, np.ones(4, np.float32), repeats=1).measured.spans] == ["times"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "wavefront"])
def test_estimated_costs_are_those_that_auto_chooses_by(schedule):
    """A head that does three times as much as a layer: a plan and the table that auto simulates wait as long."""
    meshes, width, count = submeshes(3, (1,)), 64, 6

    def loss(weights, x):
        for mesh, w in zip(meshes, weights, strict=True):
            x = mm.task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=mesh)(w, x)
        return mm.task(lambda x: (x**2).mean(), "loss", mesh=meshes[-1])(x)

    weights = [np.eye(width, w, dtype=np.float32) for w in (width, width, 3 * width)]
    x = np.ones((8 * count, width), np.float32)

    def plan(schedule):
        return mm.jit(mm.microbatch(jax.grad(loss), size=8, argnum=1, schedule=schedule)).plan(weights, x)

    line = plan(schedule)
    line = line.simulate(line.estimate())
    (choice,) = plan(schedules.Auto(memory=1e9)).choices
    candidate = next(c for c in choice.candidates if c.name == schedule)
    assert line.bubble == pytest.approx(candidate.bubble, abs=0.01)
    assert line.bubble > plan(schedule).simulate().bubble + 0.05


H100 = device("h100")
ROWS, WIDTH = 4096, 8192


def products(dtype="bfloat16", size=1):
    """Two stages of a product each, forward only."""
    first, second = submeshes(2, (size,))

    def step(w, v, x):
        hidden = mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=first)(w, x)
        return mm.task(lambda v, h: h @ v, "second", mesh=second)(v, hidden)

    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    return mm.jit(step).lower(weights, weights, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)).plan


def test_a_product_takes_what_the_device_takes():
    product = kernels.matmul(H100, ROWS, WIDTH, WIDTH)
    writing = kernels.move(H100, 2 * 2 * ROWS * WIDTH)  # tanh reads the product, and its result is written once
    timeline = products().simulate("h100")
    start = software("nvidia").kernel
    assert timeline.unit == "s"
    assert timeline.busy == pytest.approx((product + start + writing, product + start), rel=0.02)


def test_a_transfer_takes_what_the_link_takes():
    (hop,) = products().simulate("h100").transfers
    assert hop.end - hop.start == pytest.approx(kernels.send(H100, 2 * ROWS * WIDTH, far=False))


def test_more_devices_share_the_work():
    one, four = (sum(products(size=size).simulate("h100").busy) for size in (1, 4))
    start = 2 * software("nvidia").kernel
    assert four - start == pytest.approx((one - start) / 4)


def test_float32_takes_longer_than_bfloat16():
    assert sum(products("float32").simulate("h100").busy) > 1.8 * sum(products().simulate("h100").busy)


def test_loops_and_inner_functions_count():
    def looped(w, x):
        return jax.lax.scan(lambda h, _: (jax.checkpoint(lambda h: jnp.tanh(h @ w))(h), None), x, None, length=5)[0]

    (mesh,) = submeshes(1, (1,))
    shapes = jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16"), jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    plan = mm.jit(lambda *args: mm.task(looped, "looped", mesh=mesh)(*args)).lower(*shapes).plan
    assert plan.simulate("h100").makespan > 5 * kernels.matmul(H100, ROWS, WIDTH, WIDTH)


def test_an_unknown_device_is_named():
    with pytest.raises(mm.UsageError, match="there is no 'h1'; known are"):
        products().simulate("h1")
