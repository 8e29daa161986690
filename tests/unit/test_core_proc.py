"""Programs that run at once: their answers, and the first of their errors."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tooling.core import errors, proc


def test_answers_come_in_the_order_of_the_questions() -> None:
    slow, quick = partial(proc.run, ["sh", "-c", "sleep 0.2; echo slow"]), partial(proc.run, ["echo", "quick"])
    assert [each.text for each in proc.together(slow, quick)] == ["slow", "quick"]
    assert proc.together() == []


def test_an_error_ends_the_programs_of_the_others() -> None:
    started = time.monotonic()
    missing = partial(proc.run, ["sh", "-c", "sleep 0.2; false"])
    hanging = partial(proc.run, ["sleep", "60"], check=False)
    with pytest.raises(errors.ToolError, match="exit status 1"):
        proc.together(missing, hanging)
    assert time.monotonic() - started < 30
    assert proc.run(["echo", "later"]).text == "later", "programs can be started again"


def test_of_two_errors_the_first_in_order_is_raised() -> None:
    late, early = partial(proc.run, ["sh", "-c", "sleep 0.3; exit 3"]), partial(proc.run, ["no-such-program"])
    for _ in range(3):
        with pytest.raises(errors.ToolError, match="exit status 3"):
            proc.together(late, early)
