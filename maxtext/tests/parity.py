"""Pipelines of MultiMesh against one program of MaxText, many small trainings at a time.

A case is a command line of ``maxtext/run.py``, checked and translated as that does; only the trainer's process is
shared: one for all pipelines, and one for all single programs with as many devices. Those run MaxText as it was
published, without our patches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.xla_flags import QUICK

from multimesh import schedules
from multimesh_maxtext.command.check_flags import check_job
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.dataset import read_texts, write_corpus
from multimesh_maxtext.command.job import Job, Paths, find_maxtext
from multimesh_maxtext.command.steps import reference_job
from multimesh_maxtext.command.translate import launch
from multimesh_maxtext.handoff import PIPELINE, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
METRICS = ("learning/loss", "learning/raw_grad_norm", "learning/grad_norm", "learning/param_norm")
BASE = "refs/multimesh/base"  # MaxText as it was published, in third_party/maxtext
SMALL = "--model-dims 32 --mlp-dims 32 --sequence-length 32 --attention dot_product --batch-size 8"
CORPUS = ROOT / "LICENSE"  # text, so that every step and every microbatch has tokens of its own
# Half the time to compile; both trainings are compiled alike.
XLA = " ".join((*QUICK, "--xla_force_host_platform_device_count="))
GRADIENTLESS = ("['self_attention']['key']['bias']", "['layers_5']['layer_scalar']")
"""Softmax does not see a bias of the keys, nor the norm after the last layer of `grid.UNLIKE`'s gemma4 its scale: the
gradient is hardly more than the rounding of a zero, which Adam makes steps of."""


@dataclass(frozen=True)
class Result:
    """A pair of trainings.

    The error of whichever failed; metrics and norms of parameters of both, step by step; the devices of the pipeline's
    arrays, by path, when they were created and after a step; how long both took.
    """

    error: str | None
    steps: list[tuple[dict[str, float], dict[str, float]]]
    parameters: list[tuple[dict[str, float], dict[str, float]]]
    placement: dict[str, dict[str, list[int]]]
    seconds: float

    def gap(self, key: str) -> float:
        """Largest relative difference of a metric over all steps."""
        return max(_relative(actual[key], expected[key]) for actual, expected in self.steps)

    @property
    def parameter_gap(self) -> float:
        """Largest relative difference of the norm of any parameter after any step."""
        assert all(actual.keys() == expected.keys() for actual, expected in self.parameters)
        return max(
            _relative(norm, expected[name])
            for actual, expected in self.parameters
            for name, norm in actual.items()
            if not any(part in name for part in GRADIENTLESS)
        )


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference) if reference else abs(value)


def compare(cases: Mapping[str, str], folder: Path, *, steps: int = 20) -> dict[str, Result]:
    """Train every case (a name and its flags; ``TABLE`` is a custom schedule) as a pipeline and as one program.

    Pipelines that differ in their schedule only have one program in common.
    """
    jobs = {name: small_job(flags.split(), steps, folder) for name, flags in cases.items()}
    assert len({job.devices for job in jobs.values()}) == 1, "one process has one number of devices"
    pipelines = _run(jobs, folder / "pipelines", find_maxtext(ROOT))
    references = {name: reference_job(job) for name, job in jobs.items()}
    first = {name: next(other for other in references if references[other] == references[name]) for name in references}
    programs, unpatched = dict[str, dict[str, Any]](), published(folder / "published")
    for devices in sorted({job.devices for job in references.values()}):
        group = {name: references[name] for name in first.values() if references[name].devices == devices}
        programs |= _run(group, folder / f"programs-{devices}", unpatched)
    return {name: _result(pipelines[name], programs[first[name]], shared=name != first[name]) for name in cases}


def small_job(flags: Sequence[str], steps: int, folder: Path) -> Job:
    """Return the job of a small model with these flags; ``TABLE`` is the file of a custom schedule.

    A microbatch has a row for each device at least: of fewer, MaxText as it was published drops rows that it loads.
    """
    argv = [*SMALL.split(), *flags, "--num-steps", str(steps), "--text", str(CORPUS)]
    if "TABLE" in argv:
        index = argv.index("TABLE")
        base = _check([*argv[: index - 1], *argv[index + 1 :], "--schedule", "wavefront"])
        argv[index] = str(_write_table(base, folder))
    job = _check(argv)
    if job.rows >= job.mesh_devices:
        return job
    sizes = ["--microbatch-size", str(job.mesh_devices), "--batch-size", str(job.mesh_devices * job.microbatches)]
    return _check([*argv, *sizes])


def _check(argv: Sequence[str]) -> Job:
    return check_job(read(argv), find_maxtext(ROOT) / "maxtext")


def _write_table(job: Job, folder: Path) -> Path:
    """Write the table of a schedule that is there already as a user would write one of their own."""
    o = job.flags
    rows = schedules.get("wavefront").table(o.pp, o.interleave, job.microbatches, backward=True)
    file = folder / f"table-{o.pp}-{o.interleave}-{job.microbatches}.json"
    file.write_text(json.dumps([[[c.microbatch, f"{c.phase}{c.stage}"] for c in row] for row in rows]))
    return file


def published(folder: Path) -> Path:
    """Write MaxText as it was published, without our patches; return the folder for ``PYTHONPATH``."""
    folder.mkdir(parents=True)
    line = ["git", "-C", str(ROOT / "third_party/maxtext"), "archive", BASE, "src"]
    tree = subprocess.run(line, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=tree, check=True)
    return folder / "src"


def run_cases(kind: str, jobs: Mapping[str, Job], folder: Path, maxtext: Path) -> list[dict[str, Any]]:
    """Train jobs in one process or compile their kernels, and return the JSON lines that `trainings` writes."""
    folder.mkdir(parents=True)
    (text,) = read_texts([CORPUS])
    cases, environment = [], dict[str, str]()
    for number, (name, job) in enumerate(jobs.items()):
        output = folder / str(number)
        output.mkdir()
        paths = Paths(python=sys.executable, maxtext=maxtext, output=output, metrics=output / "metrics.jsonl")
        write_corpus([text], paths.text, sequence_length=job.flags.sequence_length)
        start = launch(job, paths, inherited={}, gpu_memory=None)
        argv = start.command[start.command.index("train") + 1 :]
        handoff = start.environment[VARIABLE] if PIPELINE in start.environment else None
        cases.append({"name": name, "argv": argv, "handoff": handoff})
        environment |= start.environment
    (devices,) = {job.devices for job in jobs.values()}
    environment["XLA_FLAGS"] = f"{XLA}{devices}"
    (folder / "cases.json").write_text(json.dumps(cases))
    script = str(Path(__file__).with_name("trainings.py"))
    line = [sys.executable, "-P", script, kind, str(folder / "cases.json"), str(folder / "results")]
    with (folder / "log").open("w") as log:
        subprocess.run(line, env={**os.environ, **environment}, stdout=log, stderr=log, check=True)
    return [json.loads(line) for line in (folder / "results").read_text().splitlines()]


def _run(jobs: Mapping[str, Job], folder: Path, maxtext: Path) -> dict[str, dict[str, Any]]:
    records = run_cases("train", jobs, folder, maxtext)
    for number, record in enumerate(records):
        metrics = folder / str(number) / "metrics.jsonl"
        record["steps"] = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        placement = folder / str(number) / "placement.json"
        placements = json.loads(placement.read_text()) if placement.exists() else {}
        record["placement"] = {when: state["arrays"] for when, state in placements.items()}
    return {record["name"]: record for record in records}


def _result(pipeline: dict[str, Any], reference: dict[str, Any], *, shared: bool) -> Result:
    seconds = pipeline["seconds"] + (0 if shared else reference["seconds"])
    error = pipeline["error"] or (reference["error"] and f"one program: {reference['error']}")
    if error:
        return Result(error, [], [], {}, seconds)
    steps, parameters = (list(zip(pipeline[key], reference[key], strict=True)) for key in ("steps", "parameters"))
    return Result(None, steps, parameters, pipeline["placement"], seconds)
