"""The folders of jobs for Slurm and Kubernetes: their settings, what they share, and what processes start with.

Nothing here is a cluster: a process is started as srun or a kubelet would start it, with ``--dry-run``. A real Slurm
runs the batch scripts in tests/integration/processes/test_jobs.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import original
import pytest
import yaml

from multimesh_maxtext.command.check_flags import check_job
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.forecasting import forecast_step, planner_configuration
from multimesh_maxtext.command.job import transformer
from multimesh_maxtext.errors import InterruptedRunError, PreemptedError, ProcessLostError
from multimesh_planner import step_time

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "maxtext"
DGX = ("llama3-8b-16gpus", "llama3-70b-64gpus", "gpt3-175b-64gpus")
FOLDERS = (*DGX, "perlmutter", "slurm")


def settings(folder: str, word: str = "FLAGS") -> str:
    """The words of a kind in the settings of a folder."""
    text = (JOBS / folder / "job.sbatch").read_text(encoding="utf-8")
    return " ".join(re.findall(rf"^#{word} (.*)$", text, re.MULTILINE))


def size(folder: str) -> tuple[int, int]:
    """Nodes, and processes on each."""
    counts = dict(re.findall(r"--(nodes|ntasks-per-node)=(\d+)", settings(folder, "SBATCH")))
    return int(counts.get("nodes", 1)), int(counts.get("ntasks-per-node", 8))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_its_settings_and_can_be_copied(folder: str, tmp_path: Path):
    """All else are links to what the folders share, which a copy holds."""
    shared = {path.name: path.read_bytes() for path in (JOBS / "slurm").iterdir()}
    shutil.copytree(JOBS / folder, tmp_path / folder)  # follows links
    for path in (tmp_path / folder).iterdir():
        if path.name != "job.sbatch":
            name = "run.sh" if path.name.startswith("run-") else path.name
            assert path.read_bytes() == shared[name]
            assert (JOBS / folder / path.name).is_symlink() or folder == "slurm"
        assert os.access(path, os.X_OK) == path.name.startswith("run")
    assert (tmp_path / folder / "job.sh").exists()


@pytest.mark.telling("gpt3-175b-64gpus-run-original.sh", "slurm-run.sh")
@pytest.mark.parametrize(
    ("folder", "script"), [(folder, path.name) for folder in FOLDERS for path in (JOBS / folder).glob("run*.sh")]
)
def test_a_process_of_a_job_starts_with_flags_that_fit(folder: str, script: str, maxtext: Path):
    nodes, gpus = size(folder)
    slurm = {"STEP_NODELIST": "n[1-8]", "NTASKS": str(nodes * gpus), "LOCALID": "3", "PROCID": str(nodes * gpus - 1)}
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}}
    grid = ["--pp", "2", "--dp", "4", "--batch-size", "32"] if folder == "slurm" else []
    line = [str(JOBS / folder / script), "--dry-run", "--json", "--num-steps", "7", *grid]
    process = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    start = json.loads(process.stdout)
    assert start["configuration"]["steps"] == 7  # what is given comes last
    assert start["environment"]["JAX_LOCAL_DEVICE_IDS"] == "3"
    config = json.loads(start["environment"]["MULTIMESH_RUN"])
    if folder in original.SCRIPTS and (script == "run-original.sh" or not settings(folder, "ORIGINAL")):
        expected = check_job(read(original.SCRIPTS[folder].split()), maxtext / "maxtext")
        assert nodes * gpus == expected.devices
        for key, value in (("stages", expected.flags.pp), ("interleave", expected.flags.interleave)):
            assert config[key] == value
        assert config["schedule"] == expected.flags.schedule
        assert start["configuration"]["gradient_accumulation_steps"] == expected.microbatches
        assert start["configuration"]["max_target_length"] == expected.flags.sequence_length


SCONTROL = """#!/bin/sh
case "$MUTE $*" in
  "all "* | "nodes show "[hn]*) ;;
  *" show job 7") echo "   Command=$FOLDER/job.sbatch --text x" ;;
  *" show hostnames"*) echo n1 ;;
  *" show node"*) echo "NodeName=n1 NodeAddr=10.0.0.1" ;;
  *) echo "scontrol $*" ;;
esac
"""
CALLED = """#!/bin/sh
[ "$*" = --help ] && echo "$HELP" || echo "$(basename "$0") $*"
exit ${CODE:-0}
"""
ENGINES = {
    "pyxis": ("--container-image", [], "--container-image=I --container-mounts="),
    "shifter": ("", ["shifter"], "shifter --image=I"),
    "podman-hpc": ("", ["podman-hpc"], "podman-hpc run"),
    "docker": ("", [], "docker run"),
    "checkout": ("", [], f"{ROOT}/maxtext/slurm/run.sh"),
}


def submit(folder: Path, tmp_path: Path, *flags: str, programs: Any = (), **variables: str) -> str:
    """What a batch script starts, where the programs of a cluster only say their words."""
    (tmp_path / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, **dict.fromkeys(("srun", *programs), CALLED)}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"JOB_ID": "7", "NNODES": "2", "JOB_NODELIST": "n[1-2]"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()} | {"FOLDER": str(folder), **variables}
    environment |= {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    line = ["bash", str(folder / "job.sbatch"), *flags]
    child = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert bool(child.returncode) == bool(child.stderr or int(variables.get("CODE", 0)))  # nothing fails without a word
    return child.stdout + child.stderr


@pytest.mark.stand_in("programs of a cluster that print their words")
@pytest.mark.telling("docker", "checkout")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_copied_folder_starts_containers_that_see_what_flags_name(engine: str, tmp_path: Path):
    shutil.copytree(JOBS / "llama3-70b-64gpus", tmp_path / "mine")
    help_, programs, words = ENGINES[engine]
    place = {"CHECKOUT": str(ROOT)} if engine == "checkout" else {"IMAGE": "I"}
    names = {"--text": "a/t", "--prometheus": "b/p.prom", "--metrics-file": "c/m", "--export": "d", "--checkpoint": "e"}
    flags = [word for flag, name in names.items() for word in (flag, f"{tmp_path}/{name}")]
    text = submit(tmp_path / "mine", tmp_path, *flags, f"--output={tmp_path}/f", programs=programs, HELP=help_, **place)
    last = text.splitlines()[-1]
    assert words in last
    assert f"{settings('llama3-70b-64gpus')} {' '.join(flags)} --output={tmp_path}/f" in last
    mounts = set(re.findall(rf"{tmp_path}/(\w):{tmp_path}/\1\b", last))
    assert mounts == (set() if engine == "checkout" else set("abcdef"))


@pytest.mark.stand_in("programs of a cluster that print their words")
@pytest.mark.parametrize(
    ("code", "flags", "end"),
    [
        ("17", ("--checkpoint", "/ck"), "scontrol requeue 7"),
        ("17", (), ""),
        ("10", ("--checkpoint", "/ck"), ""),
        ("0", ("--checkpoint", "/ck", "--overwrite"), "--checkpoint /ck --resume"),
        ("0", ("--overwrite",), "--overwrite --overwrite"),
    ],
)
def test_a_job_comes_again_where_it_can_go_on(tmp_path: Path, code: str, flags: tuple[str, ...], end: str):
    """By the exit code of srun; and what comes again goes on from its checkpoint, or begins anew."""
    restart = {"SLURM_RESTART_COUNT": "1", "SCRIPT": "run-original.sh"}
    output = submit(JOBS / "gpt3-175b-64gpus", tmp_path, *flags, CODE=code, CHECKOUT=str(ROOT), **restart)
    assert output.splitlines()[-1].endswith(end or ("--resume" if flags else "--overwrite"))
    assert settings("gpt3-175b-64gpus", "ORIGINAL") in output


@pytest.mark.stand_in("programs of a cluster that print their words")
@pytest.mark.parametrize(
    ("mute", "message"),
    [("nodes", "scontrol shows no node of n[1-2], so nothing says where"), ("all", "error: no job.sh in '.'")],
)
def test_a_scontrol_that_prints_nothing_is_named(tmp_path: Path, mute: str, message: str):
    assert message in submit(JOBS / "slurm", tmp_path, MUTE=mute, CHECKOUT=str(ROOT))


@pytest.mark.stand_in("programs of a cluster that print their words")
@pytest.mark.parametrize("flag", ["--text my.md", "--output out", "--metrics-file=here/m.jsonl"])
def test_a_folder_that_a_container_would_keep_to_itself_is_named_with_its_flag(tmp_path: Path, flag: str):
    said = submit(JOBS / "slurm", tmp_path, *flag.split(), IMAGE="I")
    assert said.startswith(f"error: {flag.replace('=', ' ')} is a path within the container")


@pytest.mark.parametrize("flag", ["--nodes 2", "--nodes=16", "--gpus 8", "--gpus=16"])
def test_a_process_refuses_what_the_options_of_sbatch_say(flag: str):
    variables = {**os.environ, "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
    line = [str(JOBS / "slurm/run.sh"), "--dry-run", *flag.split(), "--pp", "2"]
    process = subprocess.run(line, env=variables, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: leave out --nodes and --gpus: sbatch's ")


FIELDS = """
apiVersion kind metadata.name spec.network.enableDNSHostnames spec.network.publishNotReadyAddresses
spec.failurePolicy.maxRestarts spec.failurePolicy.rules.name spec.failurePolicy.rules.action
spec.failurePolicy.rules.onJobFailureReasons spec.replicatedJobs.name spec.replicatedJobs.replicas
"""
JOB = """
completionMode parallelism completions backoffLimit podFailurePolicy.rules.action template.spec.restartPolicy
podFailurePolicy.rules.onExitCodes.operator podFailurePolicy.rules.onExitCodes.values
"""
POD = """
containers.name containers.image containers.command containers.args containers.env.name containers.env.value
containers.resources.limits.nvidia.com/gpu containers.volumeMounts.name
containers.volumeMounts.mountPath volumes.name volumes.persistentVolumeClaim.claimName volumes.emptyDir.medium
"""
"""Fields of a JobSet, as its CustomResourceDefinition has them (v1alpha2, August 2026), of a Job, and of a pod."""


def paths_in(value: Any, path: str = "") -> Iterator[str]:
    """The fields of a manifest, without the numbers of items."""
    for key, item in value.items() if isinstance(value, dict) else [("", row) for row in value]:
        name = ".".join(filter(None, (path, key)))
        if isinstance(item, dict | list):
            yield from paths_in(item, name)
        else:
            yield name


@pytest.mark.telling("llama3-70b-64gpus")
@pytest.mark.parametrize("folder", DGX)
def test_a_jobset_starts_the_processes_of_a_folder(folder: str, maxtext: Path, tmp_path: Path):
    """Its fields are those of a JobSet; a pod that has what a kubelet gives it knows who it is."""
    nodes, gpus = size(folder)
    text = (JOBS / "slurm/jobset.yaml").read_text(encoding="utf-8")
    manifest = yaml.safe_load(text.replace("FOLDER", folder).replace("NODES", str(nodes)))
    job = "spec.replicatedJobs.template.spec"
    allowed = {*FIELDS.split(), *(f"{job}.{field}" for field in JOB.split())}
    assert {*paths_in(manifest)} <= {*allowed, *(f"{job}.template.spec.{field}" for field in POD.split())}
    (part,) = manifest["spec"]["replicatedJobs"]
    (container,) = part["template"]["spec"]["template"]["spec"]["containers"]
    (rule,) = part["template"]["spec"]["podFailurePolicy"]["rules"]
    kinds = ProcessLostError, PreemptedError, InterruptedRunError
    codes = {128 + signal.SIGKILL, 128 + signal.SIGTERM}
    assert set(rule["onExitCodes"]["values"]) == {kind.exit_code for kind in kinds} | codes  # those that start again
    assert part["template"]["spec"]["completions"] == nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    env = {entry["name"]: entry["value"] for entry in container["env"]} | {"JOB_COMPLETION_INDEX": "1"}
    name = manifest["metadata"]["name"]
    assert env["JAX_COORDINATOR_ADDRESS"] == f"{name}-{part['name']}-0-0.{name}:61440"
    (line,) = container["args"]
    line = line.replace("/opt/maxtext/run.py", f"{sys.executable} {JOBS}/run.py").replace("/opt/maxtext", str(JOBS))
    line = line.replace("/srv/", f"{tmp_path}/") + " --dry-run --json"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA", "SLURM"))}
    process = subprocess.run(
        [*container["command"][1:], line], env={**clean, **env}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    start = json.loads(process.stdout)
    assert start["environment"]["JAX_LOCAL_DEVICE_IDS"] == "0,1,2,3,4,5,6,7"
    assert str(tmp_path / folder / "output/process-1/metrics.jsonl") == start["configuration"]["metrics_file"]


@pytest.mark.parametrize("folder", original.LIMITS)
def test_a_page_has_the_forecasts_of_its_flags_beside_the_limits_of_the_original(folder: str, maxtext: Path):
    limit, seconds = original.LIMITS[folder]
    page = (JOBS / "slurm" / "README.md").read_text(encoding="utf-8")
    table = page.partition(f"| {folder.rpartition('-')[0]} | seconds")[2].partition("\n\n")[0]
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+)e9 \|", table)
    forecasts = [tuple(map(float, row)) for row in rows]
    assert forecasts[2] == (seconds, limit / 1e9)
    for word, (step_seconds, step_size) in zip(("FLAGS", "ORIGINAL"), forecasts[:2], strict=True):
        words = ["--nodes", "64", "--gpus", "1", "--device", "h100", "--forecast", *settings(folder, word).split()]
        job = check_job(read(words), maxtext / "maxtext")
        step = step_time(transformer(job.model), planner_configuration(job), "h100", "maxtext")
        assert step.seconds == forecast_step(job)["seconds"]
        assert (step.seconds, step.bytes / 1e9) == pytest.approx((step_seconds, step_size), rel=2e-3)
        assert step.seconds < seconds
        assert step.bytes < limit


ABOVE_XLA = 0.056
"""The most by which a forecast of memory was above XLA's. For llama3-70b XLA needs 72.7e9 bytes, and the forecast is
75.5e9: it lets gathers of all weight gradients begin together, whatever `--xla-ag-threshold` says."""


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("word", ["FLAGS", "ORIGINAL"])
@pytest.mark.parametrize("folder", original.LIMITS)
def test_the_plan_of_a_large_job_is_within_the_limits_of_the_original(folder: str, word: str, run: Any, tmp_path: Path):
    devices = ("--nodes", 64, "--gpus", 1, "--device", "h100")
    result = run(*devices, *settings(folder, word).split(), "--forecast", "--json", "--output", tmp_path)
    assert result.code == 0, result.stderr
    limit, seconds = original.LIMITS[folder]
    assert max(need["total"] for need in result.json["forecast"]) < (1 + ABOVE_XLA) * limit
    assert result.json["seconds"] < seconds
