"""Records of steps around checkpoints, with a logger in MaxText's manner: it writes a record one step late.

And a file that asks for a profile of a run that is on its way.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from multimesh_maxtext.handoff import SECONDS, TIME
from multimesh_maxtext.trainer import records
from multimesh_maxtext.trainer.records import FOLDER, REQUEST, STEPS, profile_on_request


class Result:
    """An array of a step that goes on."""

    def __init__(self) -> None:
        self._end = threading.Event()

    def block_until_ready(self) -> None:
        self._end.wait()

    def end(self) -> None:
        self._end.set()


class Logger:
    """MaxText's, but for what it writes."""

    config = SimpleNamespace(num_target_devices=1, base_output_directory="none")

    def __init__(self) -> None:
        self._buffered: list[Any] = []
        self.written: list[tuple[int, float]] = []
        self.ended: list[float] = []

    def record_train_metrics(self, metrics: dict[str, Any], step: int, step_time: float) -> None:
        metrics["scalar"]["perf/step_time_seconds"] = step_time

    def write_metrics(self, metrics: dict[str, Any], step: int, metric_type: str = "train") -> None:
        if records.recording(metrics, step, metric_type):
            self.written.append((step, metrics["scalar"][SECONDS]))
            self.ended.append(metrics["scalar"][TIME])

    def buffer_and_write_metrics(self, metrics: dict[str, Any], step: int) -> None:
        if self._buffered:
            self.write_metrics(*self._buffered.pop())
        self._buffered.append((metrics, step))


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Logger:
    monkeypatch.setattr(records, "_started", {})
    monkeypatch.setattr(records, "_last_end", None)
    return Logger()


def start(logger: Logger, step: int, seconds: float = 0.0) -> tuple[dict[str, Any], Result]:
    result = Result()
    metrics = {"scalar": {"learning/loss": result}}
    records.stepped(logger, metrics, step, timedelta(seconds=seconds))
    return metrics, result


class Clock:
    """A clock that goes on when the test says so, and knows who looked at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looked = threading.Semaphore(0)

    def monotonic(self) -> float:
        self._looked.release()
        return self.now

    def time(self) -> float:
        return 1e9 + self.now

    def advance(self, seconds: float) -> None:
        """Wait for the next look, then let time pass."""
        self._looked.acquire()
        self.now += seconds


def test_a_step_takes_from_the_end_of_the_one_before_to_its_own_whenever_records_are_written(
    logger: Logger, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    monkeypatch.setattr(records, "time", clock)
    for step in range(3):
        metrics, result = start(logger, step, seconds=5.0 if step == 0 else 0.0)
        clock.advance(0.1)
        result.end()
        clock.advance(0.05)  # as where starting a step waits for its end
        logger.buffer_and_write_metrics(metrics, step)
    logger.buffer_and_write_metrics({}, 3)
    assert [step for step, _ in logger.written] == [0, 1, 2]
    assert [seconds for _, seconds in logger.written] == pytest.approx([5.1, 0.15, 0.15])
    assert logger.ended == pytest.approx([1e9 + 0.1, 1e9 + 0.25, 1e9 + 0.4])


def test_a_checkpoint_is_written_after_the_records_of_all_steps_and_none_is_written_twice(logger: Logger):
    for step in range(4):
        metrics, result = start(logger, step)
        result.end()
        if step in (0, 2):
            records.saving()
            assert [step for step, _ in logger.written] == [*range(step + 1)]
        logger.buffer_and_write_metrics(metrics, step)
    assert [step for step, _ in logger.written] == [0, 1, 2]
    records.saving()  # of the last step, once all are done
    assert [step for step, _ in logger.written] == [0, 1, 2, 3]


def test_records_of_evaluations_are_left_alone(logger: Logger):
    assert records.recording({"scalar": {}}, 0, "running_eval")


def steps(output: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()
        profile_on_request(output, step)


def test_a_file_profiles_the_next_steps_and_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steps(tmp_path, 0, 2)
    assert not (tmp_path / FOLDER).exists()
    (tmp_path / REQUEST).touch()
    steps(tmp_path, 3, 2 + STEPS)
    assert (tmp_path / REQUEST).exists()
    steps(tmp_path, 3 + STEPS, 3 + STEPS)
    assert not (tmp_path / REQUEST).exists()
    assert [*(tmp_path / FOLDER).rglob("*.xplane.pb")]
    assert f"profile of steps 4 to {3 + STEPS} goes to {tmp_path / FOLDER}" in capsys.readouterr().out


def test_what_goes_wrong_is_told_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / REQUEST).touch()
    jax.profiler.start_trace(tmp_path / "another")
    try:
        steps(tmp_path, 0, 1)
    finally:
        jax.profiler.stop_trace()
    assert "multimesh: no profile (" in capsys.readouterr().out
    assert not (tmp_path / REQUEST).exists()
