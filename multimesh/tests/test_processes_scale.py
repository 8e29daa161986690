"""The benchmark of the control plane: its small sizes hold what the large ones promise."""

import processes_scale
import pytest


@pytest.mark.full
@pytest.mark.parametrize("count", [8, 256])
def test_processes_meet_and_are_watched_at_little_cost(count):
    row = processes_scale.watched(count, 5.0)
    assert row["process 0 says"] == f"process {count - 1} of {count} is out of reach", row
    assert row["its CPU s"] < 5, row
    assert row["core %"] < 15, row
    assert row["agreement s"] < 2, row
    assert row["death s"] < processes_scale.SILENCE + 4, row


@pytest.mark.full
def test_clocks_of_many_are_compared_soon_and_leave_no_key():
    for row in processes_scale.compared([8, 1024]):
        assert row["keys left"] == 0, row
        assert row["clocks s"] < 30, row
