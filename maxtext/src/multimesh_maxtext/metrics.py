"""What MaxText reports while it trains: one Step for every line of its metrics file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_COMPLETED = re.compile(r"^[IWE](\d{4} \d\d:\d\d:\d\d\.\d{6}) .*completed step: (\d+),", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes
    ----------
    number
        From 0.
    loss
        Mean cross entropy of the step's tokens, in nats.
    gradient_norm
        Global norm of the gradient before clipping.
    seconds
        From the completion of the step before; of step 0: compilation and the step.
    tokens
        Tokens of the step over all devices.
    """

    number: int
    loss: float
    gradient_norm: float
    seconds: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens over all devices per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: the optimizer step that it came after, and the mean loss over its tokens in nats."""

    step: int
    loss: float


class Follower:
    """Reads the steps of a run as they are written.

    Attributes
    ----------
    evaluations
        Those read so far.
    """

    def __init__(self, metrics: Path, log: Path, *, skip: int = 0) -> None:
        """Follow the files; ``skip`` bytes of the metrics are an earlier run's."""
        self._metrics = _Tail(metrics, skip)
        self._log = _Tail(log)
        self._completed: dict[int, datetime] = {}
        self.evaluations: list[Evaluation] = []

    def poll(self) -> list[Step]:
        """Return the steps completed since the last poll."""
        # MaxText logs a step before it writes its metrics, so read in the other order.
        records = [record for record in map(_parse, self._metrics.lines()) if record]
        for stamp, number in _COMPLETED.findall("\n".join(self._log.lines())):
            self._completed[int(number)] = datetime.strptime(f"2000{stamp}", "%Y%m%d %H:%M:%S.%f")
        # MaxText also writes the running means of an evaluation, which have no total.
        done = (record for record in records if "eval/total_loss" in record)
        self.evaluations += [Evaluation(int(record["step"]), record["eval/avg_loss"]) for record in done]
        return [self._step(record) for record in records if "learning/loss" in record]

    def _step(self, record: dict[str, float]) -> Step:
        number = int(record["step"])
        return Step(
            number=number,
            loss=record["learning/loss"],
            gradient_norm=record.get("learning/raw_grad_norm", record.get("learning/grad_norm", float("nan"))),
            seconds=self._seconds(number, record["perf/step_time_seconds"]),
            tokens=record["learning/total_weights"],
        )

    def _seconds(self, number: int, dispatched: float) -> float:
        """Take the time from the log: MaxText's own figure is when the step was dispatched, not when it was done."""
        before, now = self._completed.get(number - 1), self._completed.get(number)
        if before is None or now is None or now < before:
            return dispatched
        return (now - before).total_seconds()


def keep_before(metrics: Path, log: Path, step: int) -> list[Step]:
    """Cut the records of a step and all later ones off a metrics file; return the steps that remain."""
    end = position = 0
    if metrics.exists():
        for line in metrics.read_bytes().splitlines(keepends=True):
            position += len(line)
            record = _parse(line.decode("utf-8", "replace")) or {}
            if "learning/loss" in record and record["step"] < step:
                end = position
        os.truncate(metrics, end)
    return Follower(metrics, log).poll()


def _parse(line: str) -> dict[str, float] | None:
    """Return a record; ``None`` for a torn line, left where MaxText emptied the file (it does so when it evaluates)."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


class _Tail:
    """Complete lines that were appended to a file since the last look; the file may not exist yet, or be emptied."""

    def __init__(self, path: Path, skip: int = 0) -> None:
        self._path = path
        self._offset = skip

    def lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        yield from data[:end].decode("utf-8", "replace").splitlines()
