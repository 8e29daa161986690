"""Simulated schedules: idle time is what the papers say, and peaks are what the schedules promise."""

import itertools

import pytest
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


@pytest.mark.parametrize("name", NAMED)
def test_idle_time_is_the_published(name):
    """Over p in {2, 4, 8}, m in {p, 2p, 4p} and costs that a formula is for."""
    shapes = [Shape(p, schedules.get(name).usual, m) for p, m in GRID]
    agreements = [forecast.simulate_schedule(name, shape, costs).agrees for shape in shapes for costs in COSTS]
    assert False not in agreements
    assert True in agreements or "wavefront" in name


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
    """Longer weight gradients leave (p-1) tB; the paper assumes equal times."""
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
    span_of = {Cell(s.phases, s.stage, s.microbatch): s for s in line.spans}
    for cell, span in span_of.items():
        for need in schedules.needs(cell, stages):
            crossing = span_of[need].row != span.row
            assert span.start >= span_of[need].end + (transfer if crossing else 0.0)
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


@pytest.mark.parametrize(
    ("costs", "word"),
    [
        ({"F": 1, "B": 1}, "expected one for each of F, B and W, got 'F', 'B'"),
        ({"F": 1, "B": 1, "W": 1, "X": 1}, "'X'"),
        ({"F": 1, "B": -1, "W": 1}, "that of B must be a finite number of at least 0, got -1"),
        ({"F": float("nan"), "B": 1, "W": 1}, "that of F"),
        ({"F": float("inf"), "B": 1, "W": 1}, "that of F"),
        ({"F": "1", "B": 1, "W": 1}, "got '1'"),
    ],
)
def test_bad_costs(costs, word):
    with pytest.raises(mm.UsageError) as error:
        simulate(schedules.get("1f1b").table(2, 1, 2, True), costs)
    assert word in str(error.value)
