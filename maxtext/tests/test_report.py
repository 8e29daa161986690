"""What is read from a run, and what counts as success."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from multimesh_maxtext import outcome
from multimesh_maxtext.command.report import step_table, summary
from multimesh_maxtext.command.steps import Evaluation, Follower, Step, check_agreement, compare, judge, largest
from multimesh_maxtext.errors import (
    DisagreementError,
    FlagError,
    InterruptedRunError,
    LauncherError,
    LossNotFallingError,
    LossNotFiniteError,
    NoSpaceError,
    PreemptedError,
    ProcessKilledError,
    ProcessLostError,
    StoppedEarlyError,
    TrainerFailedError,
    error_classes,
)

LOG = Path("maxtext.log")


def steps(*losses: float) -> list[Step]:
    return [Step(number, loss, 1.0, 0.5, 1024.0) for number, loss in enumerate(losses)]


def normed(*values: tuple[float, float]) -> list[Step]:
    return [Step(number, loss, norm, 0.1, 64.0) for number, (loss, norm) in enumerate(values)]


@pytest.mark.parametrize("losses", [(3.0, 2.0), (3.0, 3.1, 2.9), (5.0, 4.0, 4.5, 4.2, 3.0, 3.9), (7.0,)])
def test_a_run_whose_loss_falls_is_a_success(losses: tuple[float, ...]):
    judge(steps(*losses), 0, None, expected=len(losses), log=LOG)


@pytest.mark.parametrize(
    ("losses", "returncode", "error", "message"),
    [
        ((3.0, 2.0, 1.0), 1, TrainerFailedError, "failed with exit code 1 after 3 of 3 steps; see "),
        ((3.0,), -9, TrainerFailedError, r"killed by SIGKILL \(out of memory\?\) after 1 of 3 steps"),
        ((3.0, math.nan), 1, LossNotFiniteError, "the loss of step 1 is nan; lower learning_rate="),
        ((3.0, math.inf, 2.0), 0, LossNotFiniteError, "the loss of step 1 is inf"),
        ((3.0, 2.0), 0, StoppedEarlyError, "ended after 2 of 3 steps without an error"),
        ((), 0, StoppedEarlyError, "ended after 0 of 3 steps"),
        ((3.0, 1.0, 3.0), 0, LossNotFallingError, r"from 3.0000 to 3.0000; train longer"),
        ((3.0, 1.0, 3.5), 0, LossNotFallingError, "from 3.0000 to 3.5000"),
    ],
)
def test_anything_else_is_not(losses: tuple[float, ...], returncode: int, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        judge(steps(*losses), returncode, None, expected=3, log=LOG)


@pytest.mark.parametrize(
    ("returncode", "kind", "code"),
    [
        (-9, ProcessKilledError, 17),
        (17, ProcessLostError, 17),
        (1, TrainerFailedError, 10),
    ],
)
def test_a_process_that_is_lost_has_a_code_of_its_own(tmp_path: Path, returncode: int, kind: type, code: int):
    (tmp_path / "log").touch()
    with pytest.raises(TrainerFailedError, match="after 1 of 3 steps") as raised:
        judge(steps(3.0), returncode, None, expected=3, log=tmp_path / "log", several=True)
    assert (type(raised.value), raised.value.exit_code) == (kind, code)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PreemptedError("it ends, in any words; go on"), r"^it ends, in any words after 1 of 3 steps; go on$"),
        (FlagError("MaxText refuses this"), r"^MaxText refuses this$"),
        (NoSpaceError("/f: full; make room"), r"^/f: full after 1 of 3 steps; make room$"),
        (TrainerFailedError("the trainer failed with ValueError: x"), r"ValueError: x after 1 of 3 steps; see "),
    ],
)
def test_the_outcome_that_the_trainer_wrote_is_the_error(tmp_path: Path, error: LauncherError, message: str):
    """Its class and exit code, whatever the words are, also through the file."""
    outcome.reserve(tmp_path / "outcome.json")
    assert outcome.read(tmp_path / "outcome.json") is None
    outcome.write(outcome.outcome_of(error), tmp_path / "outcome.json")
    for returncode in (0, 1, -9):
        with pytest.raises(type(error), match=message) as raised:
            judge(steps(3.0), returncode, outcome.read(tmp_path / "outcome.json"), expected=3, log=LOG)
        assert raised.value.exit_code == error.exit_code


def test_an_outcome_that_follows_from_another_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outcome, "_PATIENCE", 0.1)
    assert [outcome.doubt(cause) for cause in error_classes()].count(0) == len(error_classes()) - 4
    lost, failed, full = ProcessLostError("lost"), TrainerFailedError("failed"), NoSpaceError("full; make room")
    (tmp_path / "process-1").mkdir()
    killed = ProcessKilledError("killed")
    cases = (full, lost, full), (full, failed, full), (lost, failed, failed), (failed, lost, failed)
    cases += (killed, failed, killed), (failed, killed, killed), (lost, killed, killed)
    interrupted = InterruptedRunError("SIGTERM ended it")  # by a launcher that ends all where one fails
    cases += (full, interrupted, full), (lost, interrupted, interrupted)
    for other, own, expected in cases:
        outcome.write(outcome.outcome_of(other), tmp_path / "process-1/outcome.json")
        outcome.write(outcome.outcome_of(own), tmp_path / "outcome.json")
        found = outcome.find_cause(tmp_path, 2, own)
        assert (type(found), str(found)) == (type(expected), str(expected))
        assert found.shared == (found is not own or own.shared)


def test_who_started_all_believes_a_cause_and_else_the_code_that_came_first(tmp_path: Path):
    """Where one fails the others may have to be told to end."""
    failed, interrupted, full = TrainerFailedError("failed"), InterruptedRunError("SIGTERM"), NoSpaceError("full; room")
    (tmp_path / "process-1").mkdir()
    for errors, code, expected in (
        ((interrupted, failed), 10, 10),
        ((interrupted, failed), 130, 130),
        ((full, failed), 10, 20),
    ):
        for name, error in zip((".", "process-1"), errors, strict=True):
            outcome.write(outcome.outcome_of(error), tmp_path / name / "outcome.json")
        first = outcome.find_first(tmp_path, 2, code=code)
        assert first is not None
        assert first.exit_code == expected


def test_a_resumed_run_is_judged_by_its_own_steps_and_the_losses_before():
    before, after = steps(3.0, 2.5), [Step(2, 2.6, 1.0, 0.5, 1024.0), Step(3, 2.7, 1.0, 0.5, 1024.0)]
    judge(after, 0, None, expected=4, log=LOG, before=before, first=2)
    judge(after, 0, None, expected=4, log=LOG, first=2)  # nothing is known of steps 0 and 1
    with pytest.raises(LossNotFallingError, match=r"from 2.0000 to 2.7000"):
        judge(after, 0, None, expected=4, log=LOG, before=steps(2.0, 2.0), first=2)
    with pytest.raises(StoppedEarlyError):  # one step twice
        judge([*steps(3.0, 2.0), *steps(1.0)], 0, None, expected=3, log=LOG)
    with pytest.raises(StoppedEarlyError, match="after 1 of 2 steps"):
        judge(after[:1], 0, None, expected=4, log=LOG, before=before, first=2)


def record(step: int, loss: float, seconds: float) -> str:
    values = {"learning/loss": loss, "learning/raw_grad_norm": 1.5, "learning/total_weights": 64.0}
    return json.dumps({"step": float(step), **values, "perf/step_time_seconds": 0.01, "perf/step_seconds": seconds})


def test_steps_are_followed_with_the_times_of_their_records(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    follower = Follower(metrics)
    assert follower.poll() == []
    metrics.write_text(record(0, 7.0, 2.5) + "\n" + record(1, 6.0, 0.75)[:20])
    assert [(step.number, step.seconds) for step in follower.poll()] == [(0, 2.5)]
    metrics.write_text(record(0, 7.0, 2.5) + "\n" + record(1, 6.0, 0.75) + "\n")
    with metrics.open("a") as file:
        file.write('{"eval/avg_loss": 5.0, "step": 0}\n{"eval/avg_loss": 5.5, "eval/total_loss": 11.0, "step": 1}\n')
    (step,) = follower.poll()
    assert (step.loss, step.gradient_norm, step.seconds, step.tokens_per_second) == (6.0, 1.5, 0.75, 64 / 0.75)
    assert follower.poll() == []
    assert follower.evaluations == [Evaluation(1, 5.5)]
    assert Follower(metrics, skip=metrics.stat().st_size).poll() == []
    metrics.write_text("orn line}\n" + record(2, 5.0, 1.0) + "\n")  # emptied, and read anew
    assert [step.number for step in follower.poll()] == [2]


def test_the_table_is_short_and_has_first_and_last():
    console = Console(width=100, record=True, quiet=False, file=io.StringIO())
    console.print(step_table(steps(*(100.0 - i for i in range(60)))))
    rows = console.export_text().splitlines()
    assert len(rows) == 13
    assert rows[0].split() == ["step", "loss", "gradient", "norm", "step", "time", "tokens/s"]
    assert rows[1].split()[:2] == ["0", "100.0000"]
    assert rows[-1].split() == ["59", "41.0000", "1.0000", "0.500", "s", "2,048"]


def test_json_has_null_where_a_number_is_not_finite():
    found = summary(steps(math.nan), [], [], {"log": LOG}, None)
    assert json.loads(json.dumps(found, allow_nan=False))["steps"][0]["loss"] is None


def test_runs_that_differ_by_rounding_agree():
    pairs = compare(normed((2.0, 1.0), (1.0, 0.5)), normed((2.00001, 1.0), (1.0, 0.500002)))
    check_agreement(pairs, dtype="float32")
    assert largest(pairs) == pytest.approx(5e-6, rel=0.01)


@pytest.mark.parametrize("other", [(1.0001, 0.5), (1.0, 0.50001), (float("nan"), 0.5), (1.0, float("inf"))])
def test_runs_that_differ_by_more_do_not(other: tuple[float, float]):
    pairs = compare(normed((2.0, 1.0), other), normed((2.0, 1.0), (1.0, 0.5)))
    with pytest.raises(DisagreementError, match=r"step 1: .* more than 1e-05; report it with both logs"):
        check_agreement(pairs, dtype="float32")
    with pytest.raises(DisagreementError, match=r"bfloat16 rounds; compare with dtype=float32"):
        check_agreement(pairs, dtype="bfloat16")
