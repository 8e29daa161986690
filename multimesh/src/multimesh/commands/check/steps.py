"""Steps of a check, each in all processes and under a time limit. A step that hangs says what it was doing."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from multimesh.errors import LostProcessError, MultiMeshError
from multimesh.processes import agree
from multimesh.processes.liveness import name_process

OK, FAILED, ABSENT = "ok", "FAILED", "-"
LATE = 5.0  # seconds that the answer of a process may come after its step


@dataclass(frozen=True)
class Row:
    """The finding of one step of the check."""

    verdict: str  # `OK`; `FAILED`; `ABSENT`: there is nothing to try here
    measured: str  # a sentence for the table
    remedy: str = ""  # the remedy, where the verdict is not `OK`
    code: int = 0  # exit code of the class of the failure; 0 if it is none
    processes: Sequence[int] = ()  # those at fault, where that is known
    name: str = ""  # the thing that was tried
    seconds: float = 0.0  # how long the step took


@dataclass
class Bench:
    """A check that runs: its grid of devices, and what this process is doing.

    ``meshes`` has a mesh with the axis "data" for each stage, once the devices are known.
    """

    processes: int
    stages: int
    per_stage: int
    quick: bool
    folder: Path
    doing: str = "starting"
    meshes: tuple[Mesh, ...] = ()

    @property
    def accelerated(self) -> bool:
        """Whether the devices are others than CPUs."""
        return any(device.platform != "cpu" for mesh in self.meshes for device in mesh.devices.flat)

    def is_here(self, stage: int) -> bool:
        """Return whether a stage has a device of this process."""
        return any(device.process_index == jax.process_index() for device in self.meshes[stage].devices.flat)


@dataclass(frozen=True)
class Step:
    """A step of a check: how it is measured in all processes, and judged in process 0."""

    name: str  # of its row
    limit: float  # seconds. They are for a step that hangs; a slow one is told of, not refused.
    measure: Callable[[Bench], Any]  # called in every process; returns JSON data. It keeps `Bench.doing` true.
    # called in process 0 with what each process measured; returns the row without its name
    judge: Callable[[Bench, Sequence[Any]], Row]
    # remedy, if_wrong: the remedy if the step hangs, or ends with an error
    remedy: str = "docs/clusters.md has the usual causes"
    if_wrong: str = ""

    def run(self, bench: Bench) -> tuple[Row, bool]:
        """Return the row, the same in all processes, and whether all of them answer still."""
        start = time.monotonic()
        answer = self._measure_within_limit(bench)

        def decide(every: Sequence[bytes]) -> bytes:
            members = [json.loads(text) for text in every]
            return json.dumps([vars(self._judge(bench, members)), all("late" not in text for text in members)]).encode()

        try:
            data = json.dumps(answer).encode()
            fields, answers = json.loads(agree.decide_together(f"check: {self.name}", data, decide, self.limit + LATE))
            row = Row(**fields)
        except LostProcessError as error:
            text = str(error).partition("; do all")[0]
            row, answers = Row(FAILED, text, self.remedy, error.exit_code, find_processes(text)), False
        return dataclasses.replace(row, name=self.name, seconds=time.monotonic() - start), answers

    def _measure_within_limit(self, bench: Bench) -> dict[str, Any]:
        """Measure in a thread of its own, because a wait in C++ code cannot be interrupted."""
        answer: dict[str, Any] = {}

        def work() -> None:
            try:
                answer["value"] = self.measure(bench)
            except MultiMeshError as error:
                answer["error"] = error.exit_code, str(error)
            except Exception as error:  # noqa: BLE001 - a row tells it
                first = next(iter(str(error).strip().splitlines()), "")
                answer["error"] = 1, f"{type(error).__name__}: {first}, while {bench.doing}"

        bench.doing = self.name
        thread = threading.Thread(target=work, name=f"check: {self.name}", daemon=True)
        thread.start()
        thread.join(self.limit)
        return {"late": (LostProcessError.exit_code, bench.doing)} if thread.is_alive() else answer

    def _judge(self, bench: Bench, answers: Sequence[dict[str, Any]]) -> Row:
        """Return the row of what each process answered. An error may be why others are late."""
        for kind, verb, remedy in (
            ("error", "", self.if_wrong),
            ("late", f" did not end within {self.limit:.0f} s", self.remedy),
        ):
            ranks = [rank for rank, answer in enumerate(answers) if kind in answer]
            if ranks:
                code, text = answers[ranks[0]][kind]
                more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
                faulty = ranks if len(ranks) < len(answers) else []  # of all processes none may be at fault
                return Row(FAILED, f"{name_process(ranks[0])}{more}{verb}: {text}", remedy, code, faulty)
        return self.judge(bench, [answer["value"] for answer in answers])


def find_processes(text: str) -> list[int]:
    """Return the process that a sentence on a lost one names last, as the one at fault."""
    return [int(rank) for rank in re.findall(r"process (\d+)(?:, [^;]*?)? of \d+", text)[-1:]]
