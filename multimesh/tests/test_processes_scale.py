"""The benchmark of the control plane: its small sizes hold what the large ones promise."""

import processes_scale
import pytest


@pytest.mark.full
@pytest.mark.parametrize("count", [8, 512, 2048])
def test_processes_meet_and_are_watched_at_little_cost(count):
    row = processes_scale.watched(count, 5.0, {"command line": ["train.py"] * 150})
    assert row["hub's CPU s"] < 10 * max(count, 1024) / 8192, row
    assert row["core %"] < 8, row
    assert row["death s"] < 2, row
    assert row["agreement s"] < 2 * max(count, 2048) / 8192, row


@pytest.mark.full
def test_clocks_of_many_are_compared_soon_and_leave_no_key():
    for row in processes_scale.compared([8, 1024]):
        assert row["keys left"] == 0, row
        assert row["clocks s"] < 30, row
