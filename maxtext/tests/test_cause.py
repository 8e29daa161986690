"""Of the errors that the processes of a job find, each tells the one that is no echo of another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from multimesh_maxtext.command import cause, restarts
from multimesh_maxtext.command.cause import Causes
from multimesh_maxtext.command.options import read
from multimesh_maxtext.command.reasons import read_meeting
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import (
    CheckpointError,
    LauncherError,
    ProcessLostError,
    StoppedEarlyError,
    TrainerFailedError,
    UnreadError,
)

NAMED = ProcessLostError("process 0 of 2 (n1, pid 7) was killed by SIGKILL, after 5 of 9 steps")
ABORTED = ProcessLostError("the trainer was killed by SIGABRT after 6 of 9 steps")
FAILED = TrainerFailedError("the trainer failed with exit code 1 after 6 of 9 steps")
FULL = CheckpointError("--checkpoint ck: a checkpoint cannot be written (No space left on device)")


@pytest.mark.parametrize(
    ("other", "mine", "code", "told"),
    [
        (UnreadError("nobody reads the output any more"), NAMED, 141, "process 0: nobody reads the output any more"),
        (FULL, FAILED, 15, f"process 0: {FULL}"),
        (NAMED, ABORTED, 17, str(NAMED)),
        (NAMED, FULL, 15, str(FULL)),
        (FAILED, ABORTED, 17, str(ABORTED)),
        (StoppedEarlyError("the data ended"), StoppedEarlyError("so it did"), 11, "so it did"),
    ],
)
def test_a_better_reason_of_another_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: LauncherError, mine: LauncherError, code: int, told: str
):
    """With its exit code; it is silent where another process of the same launcher has told it."""
    monkeypatch.setattr(cause, "_PATIENCE", 0.2)
    Causes(tmp_path, 0, 0, 2).note(other)
    found = Causes(tmp_path, 0, 1, 2).settle(mine)
    assert (found.exit_code, str(found)) == (code, told)
    assert found.shared == (found is not mine)


def test_an_earlier_run_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cause, "_PATIENCE", 0.2)
    Causes(tmp_path, 0, 0, 2).note(FULL)
    assert Causes(tmp_path, 1, 1, 2).settle(NAMED) is NAMED  # another attempt
    Causes(tmp_path, 0, 0, 2).begin()
    assert Causes(tmp_path, 0, 1, 2).settle(NAMED) is NAMED
    assert Causes(tmp_path, 0, 0, 1).settle(ABORTED) is ABORTED  # one process leaves no file


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Training stopped: Job received termination signal (SIGTERM).\n", "a signal ended the run, and a checkpoint"),
        (
            "multimesh: process 1 of 2 (n2, pid 7) was killed by SIGKILL after 7 steps\n",
            "process 1 of 2 .* SIGKILL after 0 of 9 steps$",
        ),
        (
            "multimesh: process 0 of 2 ends because process 1 of 2 (n2, pid 7) has been stopped (SIGSTOP) for 4 s\n",
            "process 1 .* 4 s after 0 of 9 steps$",
        ),
        ("", "a process was lost"),
    ],
)
def test_an_attempt_that_ended_without_a_word_has_the_reason_of_its_logs(tmp_path: Path, said: str, why: str):
    """Steps are those of the training, which the table counts, and not calls of the library."""
    (tmp_path / "maxtext-older.log").write_text("multimesh: said before\n")
    (tmp_path / "maxtext.log").write_text(said)
    paths, options = Paths("", Path(), tmp_path, tmp_path / "metrics.jsonl"), read(["--num-steps", "9"]).options
    assert re.match(why, restarts.reason(options, paths, 2))
    restarts.keep_log(paths.log, 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "maxtext-before-restart-1.log",
        "maxtext-before-restart-1-older.log",
    }
    assert re.match(why, restarts.reason(options, paths, 2, 1))


def test_a_port_that_is_taken_is_told_with_its_own_code():
    said = "process 0 of 2 (n1, pid 7) cannot listen at [::]:61440: Address already in use; choose another"
    error = read_meeting(f"more\nmultimesh: {said}\n", 2)
    assert error is not None
    assert (str(error), error.exit_code, error.shared) == (said, 2, False)
    assert read_meeting(f"more\nmultimesh: {said}\n", 1) is None
    assert read_meeting("more\n", 2) is None
