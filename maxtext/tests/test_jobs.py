"""The folders of jobs for Slurm and Kubernetes: what they share, and the flags that processes start with.

Nothing here is a cluster: a process is started as srun or a kubelet would start it, with ``--dry-run``. A real Slurm
runs the batch scripts in tests/integration/processes/test_jobs.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import original
import pytest
import yaml

from multimesh_maxtext.command.options import read
from multimesh_maxtext.command.settle import settle
from multimesh_maxtext.command.sizes import forecast_step

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "maxtext"))

import jobs  # noqa: E402


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.folder)
def test_a_folder_has_what_it_shares(job: jobs.Job):
    made = jobs.files(job)
    found = {path.name: path.read_text() for path in (jobs.HERE / job.folder).iterdir()}
    assert found == made, "run maxtext/jobs.py --write"
    assert job.flags in re.sub(r" +\\\n +", " ", "".join(made.values()))
    checked = [text for name, text in made.items() if name.endswith(".sh") or name == "jobset.yaml"]
    assert all(re.search(r" --check[ ,]", text) for text in checked)
    for name in made:
        assert os.access(jobs.HERE / job.folder / name, os.X_OK) == name.endswith(".sh")


@pytest.mark.telling("gpt3-175b-64gpus-run-original.sh", "slurm-run.sh")
@pytest.mark.parametrize(
    ("job", "script"),
    [(job, name) for job in jobs.JOBS for name in jobs.files(job) if name.endswith(".sh")],
    ids=lambda value: value if isinstance(value, str) else value.folder,
)
def test_a_process_of_a_job_starts_with_flags_that_fit(job: jobs.Job, script: str, maxtext: Path):
    size = job.processes or 8
    slurm = {"STEP_NODELIST": "n[1-8]", "NTASKS": str(size), "LOCALID": "3", "PROCID": str(size - 1)}
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}}
    own = [] if job.processes else ["--pp", "2", "--dp", "4", "--batch-size", "32"]
    line = [str(jobs.HERE / job.folder / script), "--dry-run", "--json", "--num-steps", "7", *own]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    start = json.loads(done.stdout)
    assert start["configuration"]["steps"] == 7  # what is given comes last
    assert start["environment"]["JAX_LOCAL_DEVICE_IDS"] == "3"
    handed = json.loads(start["environment"]["MULTIMESH_MAXTEXT"])
    if job.folder in original.SCRIPTS and (script == "run-original.sh" or not job.theirs):
        theirs = settle(read(original.SCRIPTS[job.folder].split()), maxtext / "maxtext").job
        assert size == theirs.devices
        for key, value in (("stages", theirs.options.pp), ("interleave", theirs.options.interleave)):
            assert handed[key] == value
        assert handed["schedule"] == theirs.options.schedule
        assert start["configuration"]["gradient_accumulation_steps"] == theirs.microbatches
        assert start["configuration"]["max_target_length"] == theirs.options.sequence_length


def test_perlmutter_is_started_as_its_users_are_told_to():
    made = jobs.files(jobs.find("perlmutter"))["job.sbatch"]
    assert "--gpus-per-task=1 --gpu-bind=none" in made
    assert all(engine in made for engine in ("shifter --image=", "podman-hpc run", "CHECKOUT"))


def fields(required: str = "", **others: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with these fields, all of which but those in ``required`` may be left out, and no others."""
    return {"type": "object", "properties": others, "required": required.split(), "additionalProperties": False}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


WORD, COUNT, YES = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
SECRET = fields("name key", name=WORD, key=WORD, optional=YES)
SOURCE = {
    "oneOf": [
        fields("fieldRef", fieldRef=fields("fieldPath", fieldPath=WORD)),
        fields("secretKeyRef", secretKeyRef=SECRET),
    ]
}
CONTAINER = fields(
    "name",
    **dict.fromkeys(("name", "image"), WORD),
    **dict.fromkeys(("command", "args"), items(WORD)),
    env=items(fields("name", name=WORD, value=WORD, valueFrom=SOURCE)),
    resources=fields(limits={"type": "object", "additionalProperties": COUNT}),
    volumeMounts=items(fields("name mountPath", name=WORD, mountPath=WORD)),
)
VOLUME = fields(
    "name",
    name=WORD,
    persistentVolumeClaim=fields("claimName", claimName=WORD),
    emptyDir=fields(medium={"enum": ["", "Memory"]}),
)
POD = fields(
    "containers", restartPolicy={"enum": ["Never", "OnFailure"]}, containers=items(CONTAINER), volumes=items(VOLUME)
)
EXIT = fields("operator values", operator={"enum": ["In", "NotIn"]}, values=items(COUNT))
KUBERNETES_JOB = fields(
    "template",
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    **dict.fromkeys(("parallelism", "completions", "backoffLimit"), COUNT),
    successPolicy=fields("rules", rules=items(fields(succeededCount=COUNT, succeededIndexes=WORD))),
    podFailurePolicy=fields("rules", rules=items(fields("action", action={"enum": ["FailJob"]}, onExitCodes=EXIT))),
    template=fields(spec=POD),
)
RULE = fields(
    "action name", name=WORD, action={"enum": ["FailJobSet", "RestartJobSet"]}, onJobFailureReasons=items(WORD)
)
JOBSET = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=fields("name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,53}[a-z0-9])?$"}),
    spec=fields(
        network=fields(enableDNSHostnames=YES, publishNotReadyAddresses=YES),
        failurePolicy=fields(maxRestarts=COUNT, rules=items(RULE)),
        replicatedJobs=items(
            fields("name template", name=WORD, replicas=COUNT, template=fields(spec=KUBERNETES_JOB)),
        ),
    ),
)
"""The fields of a JobSet that ours use, as its CustomResourceDefinition has them (v1alpha2, August 2026)."""


@pytest.mark.telling("llama3-70b-64gpus")
@pytest.mark.parametrize(
    "job", [job for job in jobs.JOBS if "jobset.yaml" in jobs.files(job)], ids=lambda job: job.folder
)
def test_a_jobset_starts_the_processes_of_its_folder(job: jobs.Job, maxtext: Path, tmp_path: Path):
    """Its fields are those of a JobSet; a pod that has what a kubelet gives it knows who it is."""
    text = jobs.files(job)["jobset.yaml"]
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, JOBSET)
    falls_back = yaml.safe_load(text.replace("# successPolicy", "successPolicy"))
    assert falls_back["spec"]["replicatedJobs"][0]["template"]["spec"]["successPolicy"]
    jsonschema.validate(falls_back, JOBSET)
    (part,) = manifest["spec"]["replicatedJobs"]
    (container,) = part["template"]["spec"]["template"]["spec"]["containers"]
    assert part["template"]["spec"]["completions"] * container["resources"]["limits"]["nvidia.com/gpu"] == job.processes
    given = {entry["name"]: entry.get("value", "1") for entry in container["env"]}  # index and restart are 1
    name = manifest["metadata"]["name"]
    assert given["JAX_COORDINATOR_ADDRESS"] == f"{name}-{part['name']}-0-0.{name}:61440"
    line = [sys.executable, str(jobs.HERE / "run.py"), *container["args"], "--dry-run", "--json"]
    line = [word.replace("/srv/", f"{tmp_path}/") for word in line]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA", "SLURM"))}
    done = subprocess.run(line, env={**clean, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    start = json.loads(done.stdout)
    assert start["environment"]["JAX_LOCAL_DEVICE_IDS"] == "0,1,2,3,4,5,6,7"
    assert str(tmp_path / job.folder / "output/process-1/metrics.jsonl") == start["configuration"]["metrics_file"]


@pytest.mark.parametrize("folder", original.LIMITS)
def test_a_page_has_the_forecasts_of_its_flags_beside_the_limits_of_the_original(folder: str, maxtext: Path):
    job = jobs.find(folder)
    size, seconds = original.LIMITS[folder]
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+)e9 \|", jobs.files(job)["README.md"])
    forecasts = [tuple(map(float, row)) for row in rows]
    assert forecasts[2] == (seconds, size / 1e9)
    for flags, (step_seconds, step_size) in zip((job.flags, job.theirs), forecasts[:2], strict=True):
        words = ["--nodes", str(job.processes), "--gpus", "1", "--device", "h100", "--forecast", *flags.split()]
        step = forecast_step(settle(read(words), maxtext / "maxtext").job)
        assert step is not None
        assert (step.seconds, step.bytes / 1e9) == pytest.approx((step_seconds, step_size), rel=2e-3)
        assert step.seconds < seconds
        assert step.bytes < size


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("line", ["flags", "theirs"])
@pytest.mark.parametrize("folder", original.LIMITS)
def test_the_plan_of_a_large_job_is_within_the_limits_of_the_original(folder: str, line: str, run: Any, tmp_path: Path):
    job = jobs.find(folder)
    devices = ("--nodes", job.processes, "--gpus", 1, "--device", "h100")
    done = run(*devices, *getattr(job, line).split(), "--forecast", "--json", "--output", tmp_path)
    assert done.code == 0, done.stderr
    size, seconds = original.LIMITS[folder]
    assert max(need["total"] for need in done.json["forecast"]) < size
    assert done.json["seconds"] < seconds
