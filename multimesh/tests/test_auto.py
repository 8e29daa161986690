"""``schedule="auto"`` and ``partition``: the shortest table and the best cut, for given costs and memory."""

import contextlib
import dataclasses
import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multimesh.schedules import Auto, StageCosts
from multimesh.schedules.simulate import simulate
from pipelines import assert_same, submeshes

import multimesh as mm
from multimesh import schedules


def case(seed):
    """Stages, microbatches and random costs: unequal stages, slow links, the heavy head of a vocabulary, or all."""
    rng, kind = random.Random(seed), ("unequal", "slow", "head", "all")[seed % 4]
    p = rng.choice((2, 4, 8))
    m = p * rng.choice((1, 2, 4))
    spread = 0.5 if kind in ("unequal", "all") else 0.05
    times = [tuple(rng.uniform(1 - spread, 1 + spread) for _ in "FBW") for _ in range(p)]
    if kind in ("head", "all"):
        times[-1] = tuple(t * rng.uniform(1.2, 2.5) for t in times[-1])
    hop = rng.uniform(0.2, 1.5) if kind in ("slow", "all") else 0.0
    return p, m, StageCosts(tuple(times), tuple(hop * rng.uniform(0.8, 1.2) for _ in range(p - 1)))


def published(stages, microbatches, costs):
    """Simulations of all published tables of one stage a submesh."""
    lines = {}
    for name in schedules.names():
        if schedules.get(name).placement(stages) == tuple(range(stages)):
            with contextlib.suppress(mm.UsageError):
                lines[name] = simulate(schedules.get(name).table(stages, 1, microbatches, True), costs)
    return lines


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 50))])
def test_no_published_table_that_fits_is_shorter(seed):
    """The numbers of the table that is taken are those of the simulator."""
    stages, microbatches, costs = case(seed)
    choice = Auto(costs, memory=min(stages, microbatches)).choose(stages, 1, microbatches)
    best, lines = choice.taken, published(stages, microbatches, costs)
    line = simulate(best.table, costs)
    schedules.validate(best.table, stages, 1, microbatches)
    assert line.makespan == pytest.approx(best.makespan)
    assert line.bubble == pytest.approx(best.bubble)
    assert line.peaks == pytest.approx(best.peaks)
    assert max(line.peaks) <= choice.limit
    limit = max(lines["1f1b"].peaks)
    assert choice.limit == limit
    fits = {name: line.makespan for name, line in lines.items() if max(line.peaks) <= limit}
    assert best.makespan <= min(fits.values()) * (1 + 1e-9)
    assert {c.name for c in choice.candidates} <= lines.keys()


def test_unequal_memory_of_activations_counts():
    """A stage that keeps ten times as much rules out the tables with three microbatches on it."""
    costs = StageCosts(((1, 1, 1),) * 3, (), (1, 10, 1))
    choice = Auto(costs, memory=20.0).choose(3, 1, 6)
    assert choice.taken.peaks[1] == 20
    assert any(c.makespan < choice.taken.makespan and c.peaks[1] > 20 for c in choice.candidates)
    assert simulate(choice.taken.table, costs).peaks == choice.taken.peaks


@pytest.mark.parametrize("residuals", [0.25, 1.0, 1.5])
def test_what_w_keeps_counts(residuals):
    """From the end of B a microbatch takes what W reads: less than before where F keeps much, or more."""
    costs = StageCosts(((1, 1, 1),) * 4, kept=(residuals,) * 4)
    rows = schedules.get("zb-h1").table(4, 1, 8, True)
    peaks = []
    for row in rows:
        alive, most, before = 0.0, 0.0, None
        for cell, following in itertools.pairwise((*row, None)):
            at_once = following is not None and (following.phase, following.microbatch) == ("W", cell.microbatch)
            alive += {"F": 1.0, "B": 0.0 if at_once else residuals - 1.0, "W": -residuals}[cell.phase]
            alive += residuals - 1.0 if cell.phase == "W" and before == ("B", cell.microbatch) else 0.0
            before = (cell.phase, cell.microbatch)
            most = max(most, alive)
        peaks.append(most)
    assert simulate(rows, costs).peaks == pytest.approx(peaks)
    assert max(peaks) == {0.25: 4.0, 1.0: 4.0, 1.5: 6.0}[residuals]
    choice = Auto(costs, memory=5.0).choose(4, 1, 8)
    assert max(simulate(choice.taken.table, costs).peaks) <= 5


@pytest.mark.parametrize(("chunks", "route"), [(2, ()), (2, (0, 1, 2, 2, 1, 0))])
def test_several_stages_on_a_submesh(chunks, route):
    costs = StageCosts(tuple((1 + 0.1 * s, 1, 0.5) for s in range(6)), (0.2,) * 5)
    auto = Auto(costs, memory=8.0, route=route)
    table = auto.table(3, chunks, 6, True)
    schedules.validate(table, 3, chunks, 6, True, auto.placement(3))
    assert max(simulate(table, costs).peaks) <= 8


def test_the_table_of_candidates_says_why():
    choice = Auto(StageCosts(((1, 1, 1),) * 4, (0.5,) * 3)).choose(4, 1, 8)
    text = str(choice)
    assert "zb-h1" in text
    assert "needs too much memory" in text
    assert choice.reason in text
    assert [c.makespan for c in choice.candidates] == sorted(c.makespan for c in choice.candidates)
    data = json.loads(json.dumps(choice.to_json()))
    assert data["taken"] == choice.taken.name
    assert schedules.custom(data["table"]).rows == choice.taken.table


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Auto(StageCosts(((1, 1, 1),) * 3)).choose(2, 1, 4), "costs are those of 3 stages, but the loop has 2"),
        (
            lambda: Auto(memory=0.5).choose(2, 1, 4),
            r"no table keeps activations within 0.5 .memory=, of each submesh.; the one ",
        ),
        (lambda: Auto(memory=-1.0), "memory of a submesh must be a finite number of at least 0"),
        (lambda: Auto(costs={"F": 1}), r"schedules.Auto: costs must be a StageCosts, such as profile.schedule.costs"),
        (
            lambda: Auto(route=(0, 1, 1, 0)).choose(2, 4, 4),
            r"no published schedule has 4 stages on each submesh by the route 0 1 1 0; write the table: schedule=",
        ),
        (lambda: Auto().choose(0, 1, 4), "0 submeshes, 1 stages on each"),
        (lambda: StageCosts(((1, 1),)), "stage 0 needs a time for each of F, B and W"),
        (lambda: StageCosts(((1, 1, 1),) * 2, (1, 1)), "costs of 2 stages: transfers must be 1, got 2"),
        (lambda: StageCosts(((1, -1, 1),)), "that of B of stage 0 must be a finite number"),
    ],
)
def test_errors(make, match):
    with pytest.raises(mm.UsageError, match=match):
        make()


def value_of(times, sizes, microbatches, chunks=1):
    """The objective of `partition`, written down again."""
    ends = list(itertools.accumulate(sizes))
    return max(
        sum(times[: end - size]) + microbatches * chunks * sum(times[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    )


def cuts_of(count, stages):
    """The sizes of every cut."""
    middles = itertools.combinations(range(1, count), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *middle, count))) for middle in middles]


def pieces_of(layers, sizes):
    return [layers[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_of_layers_has_a_lower_bound(seed):
    """The reference is brute force over all cuts; no table without W ends before the bound."""
    rng = random.Random(seed)
    count, stages, m = rng.randint(4, 9), rng.randint(2, 4), rng.randint(1, 9)
    layers = [rng.choice((1.0, 1.0, 1.0, rng.uniform(0, 4))) for _ in range(count)]
    sizes = schedules.partition(layers, stages, microbatches=m)
    cuts, bound = cuts_of(count, stages), value_of(layers, sizes, m)
    assert bound == pytest.approx(min(value_of(layers, cut, m) for cut in cuts))
    equal = [cut for cut in cuts if value_of(layers, cut, m) <= bound + 1e-9]
    times = [sum(piece) for piece in pieces_of(layers, sizes)]
    assert max(times) == pytest.approx(min(max(map(sum, pieces_of(layers, cut))) for cut in equal))
    costs = StageCosts(tuple((t / 3, t / 3, t / 3) for t in times))
    line = simulate(schedules.get("1f1b").table(stages, 1, m, True), costs)
    assert line.makespan >= max(bound, sum(layers)) * (1 - 1e-9)


def test_a_partition_keeps_to_memory_and_several_stages_share_a_submesh():
    """It is as good as brute force over all cuts that fit: the first stages keep more microbatches."""
    costs = [schedules.LayerCosts(0.0, 60, 0), *[schedules.LayerCosts(1.0, 10, 2)] * 8, schedules.LayerCosts(3, 60, 1)]
    times = [c.time for c in costs]
    for memory, m in ((90.0, 8), (75.0, 8), (200.0, 2)):
        fits = []
        for cut in cuts_of(10, 3):
            alive = [min(m, 3 - s) for s in range(3)]
            pieces = zip(alive, pieces_of(costs, cut), strict=True)
            needs = [sum(c.held + n * c.activation for c in piece) for n, piece in pieces]
            fits += [cut] if max(needs) <= memory else []
        if not fits:
            with pytest.raises(mm.UsageError, match="no cut of 10 layers into 3 stages fits"):
                schedules.partition(costs, 3, microbatches=m, memory=memory)
            continue
        sizes = schedules.partition(costs, 3, microbatches=m, memory=memory)
        assert sizes in fits
        assert value_of(times, sizes, m) == pytest.approx(min(value_of(times, cut, m) for cut in fits))
    assert sorted(schedules.partition([1.0] * 7, 2, chunks=2, microbatches=4)) == [1, 2, 2, 2]
    with pytest.raises(mm.UsageError, match="3 layers cannot make 4 stages"):
        schedules.partition([1, 1, 1], 2, chunks=2, microbatches=4)


ROWS, COUNT, WIDTHS = 4, 8, (16, 64)


def pipeline(schedule, widths, placement=None):
    """A step over stages of some hidden widths, its arguments, and the same without tasks."""
    placement = placement or range(len(widths))
    meshes = submeshes(max(placement) + 1, (1,))

    def layer(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    def loss(weights, x, homes=None):
        for n, w in enumerate(weights):
            x = layer(w, x) if homes is None else mm.task(layer, f"stage{n}", mesh=homes[n])(w, x)
        return jnp.sum(x**2)

    draw = np.random.default_rng(0)
    weights = [[draw.normal(size=s).astype(np.float32) / 8 for s in ((32, k), (k, 32))] for k in widths]
    batch = draw.normal(size=(ROWS * COUNT, 32)).astype(np.float32)
    homes = [meshes[n] for n in placement]
    body = jax.value_and_grad(lambda weights, x: loss(weights, x, homes))
    step = mm.jit(mm.microbatch(body, size=ROWS, argnum=1, schedule=schedule))
    return step, (weights, batch), jax.jit(jax.value_and_grad(loss))


def test_a_step_is_measured_and_made_again(tmp_path):
    """It uses estimates first, then its own profile; the table is kept in a file. All results are plain JAX's."""
    first, args, reference = pipeline("auto", WIDTHS)
    assert_same(first(*args), reference(*args))
    plan = first.plan(*args)
    (choice,) = plan.choices
    f, b, _ = zip(*choice.costs.times, strict=True)
    assert f[1] > 3 * f[0]  # four times as wide
    assert b[0] == 0  # nothing waits for the first stage's backward: all of it is W
    assert choice.costs.activations[1] > choice.costs.activations[0]
    assert choice.costs.sizes == "bytes"
    assert str(choice).splitlines()[0] in str(plan)
    profile = first.profile(*args)
    second, *_ = pipeline(profile.schedule, WIDTHS)
    measured = second.plan(*args).choices[0].costs
    assert measured.unit == "s"
    assert all(t > 0 for times in measured.times for t in times[::2])
    assert all(t > 0 for t in measured.transfers)
    assert_same(second(*args), reference(*args))
    second_plan = second.plan(*args)
    second_plan.choices[0].save(tmp_path / "table.json")
    custom = pipeline(mm.schedules.load(tmp_path / "table.json"), WIDTHS)[0].plan(*args)
    assert [*map(str, custom.instructions)] == [*map(str, second_plan.instructions)]
    with pytest.raises(mm.UsageError, match="has 0 loops with schedule='auto'; profile a step with one"):
        _ = dataclasses.replace(profile, plan=custom).schedule


def test_a_plan_runs_the_table_that_it_names():
    """The simulation of its instructions ends when the table's does."""
    costs = StageCosts(((1, 1, 0.5), (2, 2, 1)))
    step, args, _ = pipeline(Auto(costs, memory=3.0), WIDTHS)
    plan = step.plan(*args)
    (choice,) = plan.choices
    durations = {(s, phase): t for s, times in enumerate(costs.times) for phase, t in zip("FBW", times, strict=True)}
    assert plan.simulate(durations).makespan == pytest.approx(choice.taken.makespan)
    assert dataclasses.replace(choice.schedule, costs=None) == Auto(memory=3.0)


def test_too_little_memory_is_refused_with_the_line_of_the_loop():
    step, args, _ = pipeline(Auto(memory=1.0), WIDTHS)
    with pytest.raises(mm.UsageError, match=r"test_auto.py:\d+: schedule auto: no table keeps activations within 1 b"):
        step.plan(*args)


def needs(schedule, *shape):
    """Bytes on the device that needs most, and what was chosen."""
    step, args, _ = pipeline(schedule, *shape)
    lowered = step.lower(*args)
    return max(need.total for need in lowered.memory_estimate()), next(iter(lowered.plan.choices), None)


SHAPES = {
    "equal": ((64, 64, 64, 64),),
    "wide head": ((32, 32, 512),),
    "wide start": ((512, 32, 32),),
    "interleaved": ((64,) * 4, (0, 1, 0, 1)),
    "V": ((64,) * 6, (0, 1, 2, 2, 1, 0)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_without_a_known_device_a_plan_needs_no_more_than_that_of_1f1b(name):
    shape = SHAPES[name]
    bound = needs("dualpipe-v", *shape)[0] if name == "V" else needs("1f1b", *shape)[0]
    need, choice = needs(Auto(), *shape)
    assert need <= max(bound, needs("zb-v", *shape)[0] if name == "V" else 0)
    assert choice.taken.fits
    published = [c for c in choice.candidates if c.fits]
    assert choice.taken.makespan == min(c.makespan for c in published)


@pytest.mark.longer
@pytest.mark.telling("V", "wide head")
@pytest.mark.parametrize("name", SHAPES)
def test_no_plan_needs_more_than_the_device_has(name):
    """With less memory it takes a longer table; where none fits, the one that needs least."""
    shape = SHAPES[name]
    plans = [schedule for schedule in ("zb-v", "dualpipe-v") if name == "V"] or ["1f1b", "gpipe"]
    least, most = (f(needs(schedule, *shape)[0] for schedule in plans) for f in (min, max))
    spans = []
    for device in (2 * most, most, (least + most) // 2, least):
        need, choice = needs(Auto(device=device), *shape)
        assert need <= device
        spans.append(choice.taken.makespan)
    assert spans == sorted(spans)
    with pytest.warns(UserWarning, match=r"^schedule auto: by .* no table fits into 1 byte") as record:
        assert needs(Auto(device=1.0), *shape)[0] <= most
    assert record[0].filename == __file__


def test_the_bound_holds_for_measured_costs_too():
    step, args, _ = pipeline(Auto(), *SHAPES["wide head"])
    schedule = step.profile(*args).schedule
    bound = needs("1f1b", *SHAPES["wide head"])[0]
    assert schedule.device == bound
    need, choice = needs(schedule, *SHAPES["wide head"])
    assert choice.costs.unit == "s"
    assert need <= bound


def test_a_loop_that_comes_back_up_gets_a_v():
    """Its route is found; V shapes are among the tables; results are those of plain JAX."""
    step, args, reference = pipeline("auto", *SHAPES["V"])
    (choice,) = step.plan(*args).choices
    assert choice.schedule.route == (0, 1, 2, 2, 1, 0)
    assert {"zb-v", "dualpipe-v"} <= {c.name for c in choice.candidates}
    assert_same(step(*args), reference(*args))
    (other,) = pipeline("auto", *SHAPES["interleaved"])[0].plan(*pipeline("auto", *SHAPES["interleaved"])[1]).choices
    assert other.schedule.route == ()


def test_memory_for_activations_is_taken_at_its_word():
    """The user's number bounds the table; a device that is given besides bounds the plan."""
    shape = SHAPES["equal"]
    _, free = needs(Auto(memory=1e9), *shape)
    need, bounded = needs(Auto(memory=1e9, device=needs("1f1b", *shape)[0]), *shape)
    assert free.limit == 1e9
    assert need <= needs("1f1b", *shape)[0]
    assert free.taken.makespan <= bounded.taken.makespan
    with pytest.raises(mm.UsageError, match="bytes of a device must be a finite number of at least 0, got -1"):
        Auto(device=-1)


DOUBLE_V = (0, 1, 1, 0, 0, 1, 1, 0)


def test_a_loop_that_goes_down_and_up_twice():
    """No published table goes that way: stages are numbered round and round."""
    step, args, reference = pipeline("auto", (32,) * 8, DOUBLE_V)
    assert_same(step(*args), reference(*args))
    (choice,) = step.plan(*args).choices
    assert choice.schedule.route == ()
    assert "taken" in str(choice)
