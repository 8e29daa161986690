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


@pytest.mark.full
def test_agreements_of_many_are_cheap_and_leave_one_key():
    small, large = processes_scale.agreements([8, 1024])
    assert small["keys left"] == large["keys left"] == 1, large
    assert large["agreement s"] < 3, large
    assert large["profile's run s"] < 30, large
