"""Tables of the schedules, as the papers draw them."""

import collections
import itertools

import pytest

import multimesh as mm
from multimesh import schedules

SHAPES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (4, 4), (4, 9)]  # submeshes, microbatches


def drawn(schedule, submeshes, microbatches, backward=True, chunks=1):
    """One line a submesh: phase and microbatch."""
    table = schedules.get(schedule).table(submeshes, chunks, microbatches, backward)
    return [" ".join(f"{c.phase}{c.microbatch}" for c in row) for row in table]


def test_gpipe_fills_and_drains():
    assert drawn("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_alternates_after_a_warm_up_that_is_shorter_on_later_stages():
    assert drawn("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages():
    assert drawn("1f1b", 3, 1) == ["F0 B0"] * 3


@pytest.mark.parametrize("name", schedules.names())
def test_forward_only(name):
    assert drawn(name, 2, 3, backward=False) == ["F0 F1 F2"] * 2


def test_gpipe_with_two_stages_on_a_submesh():
    (row, _) = schedules.get("gpipe").table(2, 2, 1, True)
    assert [(c.phase, c.stage) for c in row] == [("F", 0), ("F", 2), ("B", 2), ("B", 0)]


@pytest.mark.parametrize(("submeshes", "microbatches"), SHAPES)
@pytest.mark.parametrize("name", schedules.names())
def test_every_cell_stands_once_in_the_row_of_its_submesh(name, submeshes, microbatches):
    table = schedules.get(name).table(submeshes, 1, microbatches, True)
    assert len(table) == submeshes
    for rank, row in enumerate(table):
        found = collections.Counter((c.phase, c.stage, c.microbatch) for c in row)
        assert found == collections.Counter(itertools.product("FB", [rank], range(microbatches)))


def alive(row):
    """The most microbatches between forward and backward."""
    return max(itertools.accumulate(1 if c.phase == "F" else -1 for c in row))


@pytest.mark.parametrize(("submeshes", "microbatches"), SHAPES)
def test_1f1b_holds_at_most_p_minus_r_microbatches_and_gpipe_all(submeshes, microbatches):
    f1b, fill = schedules.get("1f1b"), schedules.get("gpipe")
    for rank, row in enumerate(f1b.table(submeshes, 1, microbatches, True)):
        assert f1b.limit(submeshes, rank) == submeshes - rank
        assert alive(row) == min(submeshes - rank, microbatches)
    for rank, row in enumerate(fill.table(submeshes, 1, microbatches, True)):
        assert fill.limit(submeshes, rank) is None
        assert alive(row) == microbatches


def test_1f1b_refuses_several_stages_on_a_submesh():
    with pytest.raises(mm.UsageError, match="1f1b has one stage a submesh, but the loop has 2; use gpipe"):
        schedules.get("1f1b").table(2, 2, 4, True)


def test_names():
    assert schedules.get("fill-drain") == schedules.get("gpipe")
    assert schedules.get(schedules.get("1f1b")) is schedules.get("1f1b")
    with pytest.raises(mm.UsageError, match="unknown schedule 'zigzag'; known: gpipe, "):
        schedules.get("zigzag")
