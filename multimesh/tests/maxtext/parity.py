"""Pipelines of MultiMesh against one program of MaxText, many small trainings at a time.

Each case is a command line of ``maxtext/run.py``, checked and translated as that does; only the trainer's process is
shared: one for all pipelines, one for all single programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimesh.maxtext.checks import Job, check_backend, check_flags, check_job
from multimesh.maxtext.flags import parse
from multimesh.maxtext.handoff import VARIABLE
from multimesh.maxtext.locate import find_maxtext
from multimesh.maxtext.model import describe_model
from multimesh.maxtext.text import read_texts, write_corpus
from multimesh.maxtext.translate import TRAINER, Paths, launch
from multimesh.maxtext.verify import reference_job

ROOT = Path(__file__).resolve().parents[3]
METRICS = ("learning/loss", "learning/raw_grad_norm", "learning/grad_norm", "learning/param_norm")
SMALL = "--model-dims 32 --mlp-dims 32 --sequence-length 32 --attention dot_product --batch-size 16"
TEXT = ("--text", str(ROOT / "LICENSE"))


@dataclass(frozen=True)
class Result:
    """What a pair of trainings gave; an error is that of whichever failed."""

    name: str
    error: str | None
    steps: list[tuple[dict[str, float], dict[str, float]]]
    parameters: list[tuple[dict[str, float], dict[str, float]]]
    seconds: float

    def gap(self, key: str) -> float:
        """Largest relative difference of a metric over all steps."""
        return max(_relative(ours[key], theirs[key]) for ours, theirs in self.steps)

    @property
    def parameter_gap(self) -> float:
        """Largest relative difference of the norm of any parameter after any step."""
        assert all(ours.keys() == theirs.keys() for ours, theirs in self.parameters)
        return max(_relative(value, theirs[name]) for ours, theirs in self.parameters for name, value in ours.items())


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference) if reference else abs(value)


def compare(cases: dict[str, str], folder: Path, *, steps: int = 20) -> dict[str, Result]:
    """Train every case (a name and its flags) as a pipeline and as one program."""
    jobs = {
        name: _job([*SMALL.split(), *flags.split(), "--num-steps", str(steps), *TEXT]) for name, flags in cases.items()
    }
    pipelines = _run(jobs, folder / "pipelines")
    programs = _run({name: reference_job(job) for name, job in jobs.items()}, folder / "programs")
    return {name: _result(name, pipelines[name], programs[name]) for name in cases}


def _job(argv: Sequence[str]) -> Job:
    options = parse(argv)
    check_backend(options)
    check_flags(options)
    return check_job(options, describe_model(options, find_maxtext(ROOT) / "maxtext"))


def _run(jobs: dict[str, Job], folder: Path) -> dict[str, dict[str, Any]]:
    folder.mkdir(parents=True)
    maxtext, (text,) = find_maxtext(ROOT), read_texts([Path(TEXT[1])])
    cases, environment = [], dict[str, str]()
    for name, job in jobs.items():
        output = folder / name
        output.mkdir()
        paths = Paths(python=sys.executable, maxtext=maxtext, output=output, metrics=output / "metrics.jsonl")
        write_corpus([text], paths.text, sequence_length=job.options.sequence_length)
        start = launch(job, paths, inherited={}, gpu_memory=None)
        argv = start.command[start.command.index(TRAINER) + 1 :]
        handoff = start.environment.get(VARIABLE)
        cases.append({"name": name, "argv": argv, "handoff": handoff, "devices": job.mesh_devices})
        environment |= start.environment
    # One program gets a process with as many devices as the pipelines have, but a mesh of those of one stage only.
    count = max(job.devices * (1 if job.options.staged else job.options.pp) for job in jobs.values())
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    (folder / "cases.json").write_text(json.dumps(cases))
    line = [sys.executable, "-P", str(Path(__file__).with_name("trainings.py")), str(folder / "cases.json")]
    with (folder / "log").open("w") as log:
        subprocess.run(
            [*line, str(folder / "results")], env={**os.environ, **environment}, stdout=log, stderr=log, check=True
        )
    lines = (folder / "results").read_text().splitlines()
    found = {record["name"]: record for record in map(json.loads, lines)}
    for name, record in found.items():
        metrics = folder / name / "metrics.jsonl"
        record["steps"] = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return found


def _result(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Result:
    error = ours["error"] or (theirs["error"] and f"one program: {theirs['error']}")
    pairs = [[], []] if error else [list(zip(ours[key], theirs[key], strict=True)) for key in ("steps", "parameters")]
    return Result(name, error, pairs[0], pairs[1], ours["seconds"] + theirs["seconds"])


if __name__ == "__main__":
    import tempfile

    given = dict(line.split(":", 1) for line in sys.stdin.read().splitlines() if line.strip())
    target = Path(tempfile.mkdtemp(prefix="parity-"))
    print(target)
    for name, result in compare(given, target, steps=int(sys.argv[1])).items():
        if result.error:
            print(f"{name:30} {result.seconds:5.1f} s  {result.error}")
        else:
            gaps = " ".join(f"{result.gap(key):.1e}" for key in METRICS)
            print(f"{name:30} {result.seconds:5.1f} s  {gaps}  parameters {result.parameter_gap:.1e}")
