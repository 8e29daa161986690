"""Who holds up the others: lines of the trainer's log that go to stderr as well."""

import pytest

from multimesh_maxtext.command.told import HoldUps


def test_a_process_that_holds_up_others_is_shown_with_its_stack_and_nothing_else(capsys: pytest.CaptureFixture):
    told = HoldUps()
    first = "multimesh: process 1 of 2 (n2, pid 7) is in step 875 for 121 s, all others are in step 876"
    told.show(["step 3 is done", first])
    told.show(
        ["\0\0Thread 0x1 (most recent call first):", '  File "train.py", line 3 in step', "step 4 is done", "  x"]
    )
    told.show(["multimesh: process 0 of 2 waits for process 1 of 2 (n2, pid 7)", "multimesh: compiled in 3 s"])
    assert capsys.readouterr().err.splitlines() == [
        first,
        "Thread 0x1 (most recent call first):",
        '  File "train.py", line 3 in step',
        "multimesh: process 0 of 2 waits for process 1 of 2 (n2, pid 7)",
    ]


def test_so_many_lines_are_shown_of_a_run(capsys: pytest.CaptureFixture):
    told = HoldUps()
    told.show(["multimesh: process 1 of 2 is in step 1 for 9 s"] * 1000)
    assert len(capsys.readouterr().err.splitlines()) == 400
