"""Programs that run at once: their answers, and the first of their errors."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tooling.core import errors, proc


def test_answers_come_in_the_order_of_the_questions() -> None:
    slow, quick = partial(proc.run, ["sh", "-c", "sleep 0.2; echo slow"]), partial(proc.run, ["echo", "quick"])
    assert [each.text for each in proc.together(slow, quick)] == ["slow", "quick"]
    assert proc.together() == []


def test_of_two_errors_the_first_in_order_is_raised() -> None:
    late, early = partial(proc.run, ["sh", "-c", "sleep 0.3; exit 3"]), partial(proc.run, ["no-such-program"])
    for _ in range(3):
        with pytest.raises(errors.ToolError, match="exit status 3"):
            proc.together(late, early)


def test_after_an_error_programs_can_be_started_again() -> None:
    with pytest.raises(errors.ToolError, match="exit status 1"):
        proc.together(partial(proc.run, ["false"]), partial(proc.run, ["sleep", "0.2"]))
    assert proc.run(["echo", "later"]).text == "later"


def test_so_many_run_at_once(tmp_path: Path) -> None:
    alone = partial(proc.run, ["mkdir", tmp_path / "one"]), partial(proc.run, ["rmdir", tmp_path / "one"])
    assert len(proc.together(*alone * 5, at_once=1)) == 10


def test_an_error_within_is_told_and_leaves_the_programs_beside_it_alone() -> None:
    """The program beside was ended, and its complaint (no engine answers) was told in place of the error."""

    def within() -> None:
        proc.together(partial(proc.run, ["sh", "-c", "sleep 0.1; exit 3"]), partial(proc.run, ["true"]))

    with pytest.raises(errors.ToolError, match=r"exit 3.*exit status 3"):
        proc.together(partial(proc.run, ["sleep", "0.5"]), within)


def test_an_interrupt_ends_all_programs() -> None:
    code = "from functools import partial; from tooling.core import proc; "
    code += "proc.together(*[partial(proc.run, ['sleep', '60'])] * 3, at_once=2)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    tasks = Path(f"/proc/{process.pid}/task")
    while len(found := [each for file in tasks.glob("*/children") for each in file.read_text().split()]) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1].endswith("KeyboardInterrupt\n")
    assert not [each for each in found if Path("/proc", each).exists()]
