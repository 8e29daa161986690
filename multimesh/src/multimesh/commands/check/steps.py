"""Steps of a check, each in all processes and under a time limit. A step that hangs says what it was doing."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from multimesh.commands.check import verdicts
from multimesh.commands.check.verdicts import Row, make_failure
from multimesh.errors import LostProcessError, MultiMeshError
from multimesh.processes import agree
from multimesh.processes.initialize import Processes, name_process

LATE = 5.0  # seconds that the answer of a process may come after its step


@dataclass
class Bench:
    """A check that runs: the job, its grid of devices, and what this process is doing.

    ``meshes`` has a mesh with the axis "data" for each stage, once the devices are known.
    """

    job: Processes
    stages: int
    per_stage: int
    quick: bool
    folder: Path
    doing: str = "starting"
    meshes: tuple[Mesh, ...] = ()

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.job.rank

    @property
    def accelerated(self) -> bool:
        """Whether the devices are others than CPUs."""
        return any(device.platform != "cpu" for device in self.meshes[0].devices.flat)

    def own_stages(self) -> list[int]:
        """Return the stages that have a device of this process."""
        return [
            stage
            for stage, mesh in enumerate(self.meshes)
            if any(device.process_index == self.rank for device in mesh.devices.flat)
        ]


@dataclass(frozen=True)
class Probe:
    """A step of a check: how it is measured in all processes, and judged in process 0."""

    name: str  # of its row
    limit: float  # seconds. They are for a step that hangs; a slow one is told of, not refused.
    measure: Callable[[Bench], Any]  # called in every process; returns JSON data. It keeps `Bench.doing` true.
    # called in process 0 with what each process measured; returns the rows
    judge: Callable[[Bench, Sequence[Any]], list[Row]]
    # remedy, if_wrong: the remedy if the step hangs, or ends with an error
    remedy: str = "docs/clusters.md has the usual causes"
    if_wrong: str = ""


def find_processes(text: str) -> list[int]:
    """Return the process that a sentence on a lost one names last, as the one at fault."""
    return [int(rank) for rank in re.findall(r"process (\d+)(?:, [^;]*?)? of \d+", text)[-1:]]


def run_steps(steps: Sequence[Probe], bench: Bench, tell: Callable[[Sequence[Row]], None]) -> tuple[list[Row], bool]:
    """Run the steps in all processes; ``tell`` gets the rows of each as soon as all know them.

    Returns the rows, the same in all processes; and whether all processes answer still. Otherwise the rest was left.
    """
    rows: list[Row] = []
    for step in steps:
        new, answers = _run(step, bench)
        rows += new
        tell(new)
        if not answers:
            return rows, False
    return rows, True


def _run(step: Probe, bench: Bench) -> tuple[list[Row], bool]:
    begun = time.monotonic()
    answer = _within_limit(step, bench)

    def decide(every: Sequence[bytes]) -> bytes:
        said = [json.loads(text) for text in every]
        new = _judge(step, bench, said, time.monotonic() - begun)
        return json.dumps([verdicts.to_json(new), all("late" not in text for text in said)]).encode()

    try:
        said = agree.decide_together(f"check: {step.name}", json.dumps(answer).encode(), decide, step.limit + LATE)
    except LostProcessError as error:
        text = str(error).partition("; do all")[0]
        more = {"seconds": time.monotonic() - begun, "processes": find_processes(text)}
        return [make_failure(step.name, text, step.remedy, error.exit_code, **more)], False
    new, answers = json.loads(said)
    return verdicts.from_json(new), answers


def _within_limit(step: Probe, bench: Bench) -> dict[str, Any]:
    """Measure in a thread of its own, because a wait in C++ code cannot be interrupted."""
    result: dict[str, Any] = {}

    def work() -> None:
        try:
            result["value"] = step.measure(bench)
        except MultiMeshError as error:
            result["error"], result["code"] = str(error), error.exit_code
        except Exception as error:  # noqa: BLE001 - a row tells it
            first = next(iter(str(error).strip().splitlines()), "")
            result["error"], result["code"] = f"{type(error).__name__}: {first}, while {bench.doing}", 1

    bench.doing = step.name
    thread = threading.Thread(target=work, name=f"check: {step.name}", daemon=True)
    thread.start()
    thread.join(step.limit)
    return {"late": bench.doing} if thread.is_alive() else result


def _judge(step: Probe, bench: Bench, said: Sequence[dict[str, Any]], seconds: float) -> list[Row]:
    def some(ranks: Mapping[int, Any]) -> list[int]:
        """Return processes as those at fault. If they are all processes, the fault may lie elsewhere."""
        return [*ranks] if len(ranks) < len(said) else []

    late = {rank: reply["late"] for rank, reply in enumerate(said) if "late" in reply}
    wrong = {rank: reply for rank, reply in enumerate(said) if "error" in reply}
    new = []
    if wrong:  # it may be why others are late
        rank, first = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        text = f"{name_process(rank)}{more}: {first['error']}"
        new.append(make_failure(step.name, text, step.if_wrong, first["code"], processes=some(wrong)))
    if late:
        rank, doing = next(iter(late.items()))
        more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
        text = f"{name_process(rank)}{more} did not end within {step.limit:.0f} s: {doing}"
        new.append(make_failure(step.name, text, step.remedy, LostProcessError.exit_code, processes=some(late)))
    if not new:
        new = step.judge(bench, [reply["value"] for reply in said])
    return [Row(**{**vars(row), "seconds": seconds}) for row in new]
