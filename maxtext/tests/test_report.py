"""What is read from a run, and what counts as success."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from multimesh_maxtext import outcome
from multimesh_maxtext.command import training
from multimesh_maxtext.command.job import Paths
from multimesh_maxtext.command.report import step_table, summary
from multimesh_maxtext.command.steps import Run, Step, compare, judge
from multimesh_maxtext.command.training import explain_end, find_cause
from multimesh_maxtext.errors import (
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
)

NOWHERE = Paths(python="", maxtext=Path(), output=Path("none"), metrics=Path("none/metrics.jsonl"))


def run_of(*losses: float, norms: tuple[float, ...] = (), planned: range | None = None, paths: Paths = NOWHERE) -> Run:
    """A run whose steps have these losses."""
    run = Run(paths, planned or range(len(losses)))
    numbers, norms = itertools.count(run.planned.start), norms or (1.0,) * len(losses)
    run.steps = [Step(next(numbers), loss, norm, 0.5, 1024.0) for loss, norm in zip(losses, norms, strict=True)]
    return run


@pytest.mark.parametrize("losses", [(3.0, 2.0), (3.0, 3.1, 2.9), (5.0, 4.0, 4.5, 4.2, 3.0, 3.9), (7.0,)])
def test_a_run_whose_loss_falls_is_a_success(losses: tuple[float, ...]):
    assert judge(run_of(*losses), [None]) is None


@pytest.mark.parametrize(
    ("losses", "returncode", "error", "message"),
    [
        ((3.0,), -9, ProcessKilledError, "after 1 of 3 steps"),
        ((3.0,), 17, ProcessLostError, "after 1 of 3 steps"),
        ((3.0, 2.0, 1.0), 1, TrainerFailedError, "failed with exit code 1 after 3 of 3 steps; see "),
        ((3.0,), -9, TrainerFailedError, r"killed by SIGKILL \(out of memory\?\) after 1 of 3 steps"),
        ((3.0, math.nan), 1, LossNotFiniteError, "the loss of step 1 is nan; lower learning_rate="),
        ((3.0, math.inf, 2.0), 0, LossNotFiniteError, "the loss of step 1 is inf"),
        ((3.0, 2.0), 0, StoppedEarlyError, "ended without an error after 2 of 3 steps; see "),
        ((), 0, StoppedEarlyError, "ended without an error after 0 of 3 steps"),
        ((3.0, 1.0, 3.0), 0, LossNotFallingError, r"from 3.0000 to 3.0000; train longer"),
        ((3.0, 1.0, 3.5), 0, LossNotFallingError, "from 3.0000 to 3.5000"),
    ],
)
def test_anything_else_is_not(losses: tuple[float, ...], returncode: int, error: type[Exception], message: str):
    """A process of several that is lost has a code of its own."""
    end = explain_end(returncode, NOWHERE, nodes=2 if issubclass(error, ProcessLostError) else 1)
    verdict = judge(run_of(*losses, planned=range(3)), [end])
    assert type(verdict) is error
    assert re.search(message, str(verdict))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PreemptedError("it ends, in any words; go on"), r"^it ends, in any words after 1 of 3 steps; go on$"),
        (FlagError("MaxText refuses this"), r"^MaxText refuses this$"),
        (NoSpaceError("/f: full; make room"), r"^/f: full after 1 of 3 steps; make room$"),
        (TrainerFailedError("the trainer failed with ValueError: x"), r"ValueError: x after 1 of 3 steps; see "),
    ],
)
def test_the_outcome_that_the_trainer_wrote_is_the_error(paths: Paths, error: LauncherError, message: str):
    """Its class and exit code, whatever the words are, also through the file."""
    paths.outcome.write_text(outcome.ROOM)
    assert outcome.read(paths.outcome) is None
    outcome.write(error, paths.outcome)
    for returncode in (0, 1, -9, None):
        verdict = judge(run_of(3.0, planned=range(3), paths=paths), [explain_end(returncode, paths)])
        assert type(verdict) is type(error)
        assert re.search(message, str(verdict))


@pytest.mark.parametrize(("error", "fails"), [(PreemptedError("x"), False), (NoSpaceError("x"), True)])
def test_a_run_that_was_told_to_end_after_its_last_step_is_a_success(error: LauncherError, fails: bool):
    assert (judge(run_of(3.0, 2.0), [error]) is error) == fails


@pytest.mark.parametrize(
    ("outcomes", "codes", "stopped_by", "expected"),
    [
        ([], [None, None], "SIGTERM", InterruptedRunError),
        ([PreemptedError("saved")] * 2, [0, 0], "SIGTERM", PreemptedError),
        ([ProcessLostError("lost"), NoSpaceError("full; room")], [17, 1], "", NoSpaceError),
        ([ProcessLostError("lost"), TrainerFailedError("failed")], [17, 1], "", TrainerFailedError),
        ([ProcessLostError("lost")], [17, -9], "", ProcessKilledError),
        ([], [-9, None], "", ProcessKilledError),
        ([], [0, 1], "", TrainerFailedError),
    ],
)
def test_of_several_trainers_the_one_that_others_follow_tells(
    paths: Paths, outcomes: list[LauncherError], codes: list[int | None], stopped_by: str, expected: type[LauncherError]
):
    places = [paths.of_process(rank) for rank in range(2)]
    places[1].output.mkdir()
    for error, place in zip(outcomes, places, strict=False):
        outcome.write(error, place.outcome)
    ends = [explain_end(code, place, stopped_by, 2) for code, place in zip(codes, places, strict=True)]
    verdict = judge(run_of(3.0, planned=range(3), paths=paths), ends)
    assert type(verdict) is expected
    assert re.match(r"process [01] of 2 on ", verdict.who)


LOST, FAILED, FULL, KILLED, INTERRUPTED = (
    kind("why")
    for kind in (ProcessLostError, TrainerFailedError, NoSpaceError, ProcessKilledError, InterruptedRunError)
)


@pytest.mark.parametrize(
    ("other", "local", "expected"),
    [
        *((FULL, LOST, FULL), (FULL, FAILED, FULL), (LOST, FAILED, FAILED), (FAILED, LOST, FAILED)),
        *((KILLED, FAILED, KILLED), (FAILED, KILLED, KILLED), (LOST, KILLED, KILLED)),
        *((FULL, INTERRUPTED, FULL), (LOST, INTERRUPTED, INTERRUPTED)),  # by a launcher that ends all where one fails
    ],
)
def test_an_outcome_that_follows_from_another_gives_way(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, other: LauncherError, local: LauncherError, expected: LauncherError
):
    monkeypatch.setattr(training, "_DOUBT", 0.1)
    places = [paths, paths.of_process(1)]
    places[1].output.mkdir()
    outcome.write(other, places[1].outcome, "process 1 of 2 on another machine")
    cause = find_cause(local, 0, places)
    assert type(cause) is type(expected)
    assert cause.shared == (cause is not local or local.shared)
    assert type(outcome.read(places[0].outcome)) is type(local)  # where the other process looks for it
    if cause is not local:
        assert (cause.who, cause.log) == ("process 1 of 2 on another machine", places[1].log)


def test_a_resumed_run_is_judged_by_its_own_steps_and_the_losses_before():
    def judge_run(before: tuple[float, ...], steps: tuple[float, ...], planned: range) -> LauncherError | None:
        run = run_of(*steps, planned=planned)
        run.before = run_of(*before).steps
        return judge(run, [None])

    assert judge_run((), (2.6, 2.7), range(2, 4)) is None  # nothing is known of steps 0 and 1
    assert judge_run((3.0, 2.5), (2.6, 2.7), range(2, 4)) is None
    assert isinstance(judge_run((3.0, 2.5), (2.6, 2.7), range(2, 5)), StoppedEarlyError)
    assert isinstance(judge_run((2.0, 2.0), (2.6, 2.7), range(2, 4)), LossNotFallingError)
    run = run_of(3.0, 2.0, 1.0)
    run.steps[2] = run.steps[0]
    assert isinstance(judge(run, [None]), StoppedEarlyError)


def record(step: int, loss: float, seconds: float) -> str:
    values = {"learning/loss": loss, "learning/raw_grad_norm": 1.5, "learning/total_weights": 64.0}
    return json.dumps({"step": float(step), **values, "perf/step_time_seconds": 0.01, "perf/step_seconds": seconds})


def test_steps_are_followed_with_the_times_of_their_records(paths: Paths):
    run, metrics = Run(paths), paths.metrics
    assert run.read() == []
    metrics.write_text(record(0, 7.0, 2.5) + "\n" + record(1, 6.0, 0.75)[:20])
    assert [(step.number, step.seconds) for step in run.read()] == [(0, 2.5)]
    metrics.write_text(record(0, 7.0, 2.5) + "\n" + record(1, 6.0, 0.75) + "\n")
    with metrics.open("a") as file:
        file.write('{"eval/avg_loss": 5.0, "step": 0}\n{"eval/avg_loss": 5.5, "eval/total_loss": 11.0, "step": 1}\n')
    (step,) = run.read()
    assert (step.loss, step.gradient_norm, step.seconds, step.tokens_per_second) == (6.0, 1.5, 0.75, 64 / 0.75)
    assert run.read() == []
    assert run.evaluations == [{"step": 1, "loss": 5.5}]
    metrics.write_text("orn line}\n" + record(2, 5.0, 1.0) + "\n")  # emptied, and read anew
    assert [step.number for step in run.read()] == [2]


def test_the_table_is_short_and_has_first_and_last():
    console = Console(width=100, record=True, quiet=False, file=io.StringIO())
    console.print(step_table(run_of(*(100.0 - i for i in range(60)))))
    rows = console.export_text().splitlines()
    assert len(rows) == 13
    assert rows[0].split() == ["step", "loss", "gradient", "norm", "step", "time", "tokens/s"]
    assert rows[1].split()[:2] == ["0", "100.0000"]
    assert rows[-1].split() == ["59", "41.0000", "1.0000", "0.500", "s", "2,048"]


def test_json_has_null_where_a_number_is_not_finite():
    document = summary(run_of(math.nan))
    assert json.loads(json.dumps(document, allow_nan=False))["steps"][0]["loss"] is None


def test_runs_that_differ_by_rounding_agree():
    run = run_of(2.0, 1.0, norms=(1.0, 0.5))
    assert compare(run, run_of(2.00001, 1.0, norms=(1.0, 0.500002)).steps, "float32") is None
    assert max(run.differences) == pytest.approx(5e-6, rel=0.01)


@pytest.mark.parametrize("other", [(1.0001, 0.5), (1.0, 0.50001), (float("nan"), 0.5), (1.0, float("inf"))])
def test_runs_that_differ_by_more_do_not(other: tuple[float, float]):
    run, reference = run_of(2.0, other[0], norms=(1.0, other[1])), run_of(2.0, 1.0, norms=(1.0, 0.5))
    for dtype, remedy in (("float32", "report it with both logs"), ("bfloat16", "rounds; compare with dtype=float32")):
        text = str(compare(run, reference.steps, dtype))
        assert text.startswith("step 1: ")
        assert "more than 1e-05; " in text
        assert text.endswith(remedy)
