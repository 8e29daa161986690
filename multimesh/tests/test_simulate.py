"""Simulated schedules: idle time is what the papers say, and peaks are what the schedules promise."""

import itertools

import pytest
import zero_bubble
from multimesh.commands import forecast
from multimesh.commands.forecast import Shape
from multimesh.schedules import Cell
from multimesh.schedules.simulate import simulate

import multimesh as mm
from multimesh import schedules

COSTS = [
    {"F": 1, "B": 1, "W": 1},
    {"F": 1, "B": 1.5, "W": 0.5},
    {"F": 2, "B": 3, "W": 1},
    {"F": 0.25, "B": 1, "W": 0.125},
]
NAMED = [name for name in schedules.names() if name != "fill-drain"]
GRID = [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 4 * p)]


def idle(name, submeshes, chunks, microbatches, costs, transfer=0.0):
    return forecast.simulate_schedule(name, Shape(submeshes, chunks, microbatches), costs, transfer).timeline.idle


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 7), (4, 2), (4, 8), (8, 32)])
@pytest.mark.parametrize("name", ["gpipe", "fill-drain", "1f1b"])
def test_gpipe_and_1f1b(name, p, m, costs):
    expected = (p - 1) * (costs["F"] + costs["B"] + costs["W"])
    assert idle(name, p, 1, m, costs) == pytest.approx([expected] * p)


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (2, 3, 8), (4, 2, 4), (4, 2, 8), (4, 4, 12), (8, 2, 32)])
def test_interleaved(p, v, m, costs):
    expected = (p - 1) * (costs["F"] + costs["B"] + costs["W"]) / v
    assert idle("interleaved", p, v, m, costs) == pytest.approx([expected] * p)


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 7), (4, 4), (4, 8), (8, 32)])
def test_zb_h1(p, m, costs):
    expected = (p - 1) * (costs["F"] + costs["B"] - costs["W"])
    assert idle("zb-h1", p, 1, m, costs) == pytest.approx([expected] * p)


@pytest.mark.parametrize("name", NAMED)
def test_idle_time_is_the_published(name):
    """Over p in {2, 4, 8}, m in {p, 2p, 4p} and costs that a formula is for."""
    shapes = [Shape(p, schedules.get(name).usual, m) for p, m in GRID]
    found = [forecast.simulate_schedule(name, shape, costs).agrees for shape in shapes for costs in COSTS]
    assert False not in found
    assert True in found or "wavefront" in name


def test_what_the_v_shapes_and_zb_h2_wait_for():
    """ZB-H2 and ZB-V: nothing, once begun. DualPipeV: half of what is published, as a forward hands on at once."""
    for p, m in GRID:
        if m >= 2 * p:
            chunks = {"zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}
            h2, v, dual = (forecast.simulate_schedule(name, Shape(p, chunks[name], m)) for name in chunks)
            assert (h2.in_a_row, v.in_a_row, dual.idle) == (0, 0, (p - 1) / 2)
            assert dual.published.idle == p - 1
            assert h2.peaks == (2 * p - 1,) * p
            assert v.peaks == (p,) * p
            assert dual.peaks == (p + 1 / 2,) * p


@pytest.mark.parametrize("costs", [{"F": 1, "B": 1, "W": 1.5}, {"F": 1, "B": 2, "W": 2}], ids=str)
def test_zb_h1_closes_no_more_than_the_gap_of_a_forward(costs):
    """With longer weight gradients (p-1) tB are left; the paper assumes equal times."""
    assert idle("zb-h1", 4, 1, 8, costs) == pytest.approx([3 * costs["B"]] * 4)
    assert schedules.get("zb-h1").idle(4, 1, 8, costs).unless == "tW > tF"


@pytest.mark.parametrize(
    ("name", "shape", "unless"),
    [
        ("interleaved", Shape(4, 2, 8), ""),
        ("interleaved", Shape(4, 2, 9), "p does not divide m"),
        ("interleaved", Shape(4, 1, 9), ""),
        ("1f1b", Shape(4, 2, 8), ""),
        ("zb-h1", Shape(4, 1, 3), "m < p"),
    ],
)
def test_where_formulas_hold(name, shape, unless):
    assert schedules.get(name).idle(shape.submeshes, shape.chunks, shape.microbatches).unless == unless
    assert forecast.simulate_schedule(name, shape).agrees is (None if unless else True)


def test_the_bubble_is_the_share_of_idle_time():
    line = forecast.simulate_schedule("1f1b", Shape(4, 1, 8)).timeline
    assert line.makespan == 33
    assert line.busy == (24,) * 4
    assert line.bubbles == pytest.approx([9 / 33] * 4)
    assert line.bubble == pytest.approx(9 / 33)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 3)])
def test_peak_activations(p, m):
    one = [name for name in NAMED if schedules.get(name).chunks != 2]
    peaks = {name: forecast.simulate_schedule(name, Shape(p, 1, m)).timeline.peaks for name in one}
    assert peaks["gpipe"] == (m,) * p
    assert peaks["1f1b"] == tuple(min(p - r, m) for r in range(p))
    assert peaks["zb-h1"] == (min(p, m),) * p
    assert peaks["wavefront"] == tuple(min(m, 2 * (p - r - 1) + (r == p - 1)) for r in range(p))


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize(("p", "v"), [(2, 1), (2, 3), (4, 1), (4, 2), (8, 12)])
def test_wavefronts_wait_as_long_as_interleaved_1f1b(p, v, costs):
    """Where the number of microbatches is a multiple of p; with others the last group is not full."""
    for m in (p, 2 * p, 4 * p):
        assert idle("wavefront", p, v, m, costs) == pytest.approx([(p - 1) * sum(costs.values()) / v] * p)


@pytest.mark.parametrize("transfer", [0.0, 0.75])
@pytest.mark.parametrize("name", NAMED)
def test_a_simulation_breaks_no_rule(name, transfer):
    """Every cell once, one at a time on a submesh, in the order of its row, after what it needs and its transfer."""
    schedule = schedules.get(name)
    stages, table = 3 * (schedule.chunks or 1), schedule.table(3, schedule.chunks or 1, 5, backward=True)
    line = simulate(table, {"F": 1, "B": 2, "W": 0.5}, transfer=transfer)
    for row, cells in enumerate(table):
        spans = line.row(row)
        assert [Cell(s.phases, s.stage, s.microbatch) for s in spans] == list(cells)
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    found = {Cell(s.phases, s.stage, s.microbatch): s for s in line.spans}
    for cell, span in found.items():
        for need in schedules.needs(cell, stages):
            crossing = found[need].row != span.row
            assert span.start >= found[need].end + (transfer if crossing else 0.0)
    assert len(line.transfers) == 2 * 2 * 5 * (schedule.chunks or 1)  # forward and backward over two borders
    assert all(t.end - t.start == transfer for t in line.transfers)


def test_transfers_lengthen_the_way_but_keep_nobody_from_computing():
    free, slow = (forecast.simulate_schedule("gpipe", Shape(2, 1, 4), transfer=t).timeline for t in (0.0, 0.5))
    assert slow.makespan == free.makespan + 2 * 0.5
    assert slow.busy == free.busy
    assert forecast.simulate_schedule("gpipe", Shape(2, 1, 4), transfer=0.5).agrees is None


def test_forward_only():
    line = simulate(schedules.get("1f1b").table(3, 1, 4, backward=False))
    assert line.makespan == 4 + 2
    assert line.peaks == (1, 1, 1)


def test_a_deadlock_names_its_cells():
    table = ((Cell("B", 0, 0), Cell("F", 0, 0)), (Cell("F", 1, 0), Cell("B", 1, 0)))
    with pytest.raises(mm.UsageError, match="deadlocks: B0 of microbatch 0, F1 of microbatch 0 wait"):
        simulate(table)


@pytest.mark.parametrize(
    ("costs", "named"),
    [
        ({"F": 1, "B": 1}, "expected one for each of F, B and W, got 'F', 'B'"),
        ({"F": 1, "B": 1, "W": 1, "X": 1}, "'X'"),
        ({"F": 1, "B": -1, "W": 1}, "that of B must be a finite number of at least 0, got -1"),
        ({"F": float("nan"), "B": 1, "W": 1}, "that of F"),
        ({"F": float("inf"), "B": 1, "W": 1}, "that of F"),
        ({"F": "1", "B": 1, "W": 1}, "got '1'"),
    ],
)
def test_bad_costs(costs, named):
    with pytest.raises(mm.UsageError) as caught:
        simulate(schedules.get("1f1b").table(2, 1, 2, True), costs)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.full if row.stages * row.microbatches > 4000 else ())
        for row in zero_bubble.ROWS
        if row.schedule not in zero_bubble.LEFT_OUT
    ],
    ids=str,
)
def test_the_bubble_rates_of_the_zero_bubble_paper(row):
    """Its cost is the longest stage's."""
    assert zero_bubble.find(row).rate == pytest.approx(row.rate, abs=1e-4)


@pytest.mark.longer
def test_the_throughput_of_the_zero_bubble_paper():
    """Transfers that block and the update of the parameters explain what was measured; nothing is fitted."""
    for row in (row for row in zero_bubble.ROWS if row.throughput):
        assert zero_bubble.find(row).throughput == pytest.approx(row.throughput, rel=0.05), row


@pytest.mark.longer
def test_the_interleaved_rates_of_the_paper_have_p_transfers_less():
    for row in (row for row in zero_bubble.ROWS if row.schedule == "1F1B-I"):
        found = zero_bubble.find(row)
        less = found.timeline.period - row.stages * found.profile.transfer
        assert 1 - max(found.timeline.busy) / less == pytest.approx(row.rate, abs=1e-4)
