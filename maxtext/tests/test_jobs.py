"""The folders of jobs for Slurm: what one description makes, and the flags that their processes start with.

Nothing here is a Slurm: the scripts are run as srun would start one of their processes, with ``--dry-run``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import original
import pytest

from multimesh_maxtext.options import read
from multimesh_maxtext.settle import settle

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "maxtext"))

import jobs  # noqa: E402


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.folder)
def test_a_folder_is_what_its_description_makes(job: jobs.Job):
    made = jobs.files(job)
    found = {path.name: path.read_text() for path in (jobs.HERE / job.folder).iterdir()}
    assert found == made, "run maxtext/jobs.py --write"
    assert "@" not in "".join(made.values()).replace("$@", "").replace("[@]", "")
    for name in made:
        assert os.access(jobs.HERE / job.folder / name, os.X_OK) == name.endswith(".sh")


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.folder)
def test_a_process_of_a_job_starts_with_flags_that_fit(job: jobs.Job, maxtext: Path):
    size = job.processes or 8
    slurm = {"STEP_NODELIST": "n[1-8]", "NTASKS": str(size), "LOCALID": "3", "PROCID": str(size - 1)}
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}}
    own = [] if job.processes else ["--pp", "2", "--dp", "4", "--batch-size", "32"]
    line = [str(jobs.HERE / job.folder / job.machine.script), "--dry-run", "--json", "--num-steps", "7", *own]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    start = json.loads(done.stdout)
    assert start["configuration"]["steps"] == 7  # what is given comes last
    assert start["environment"]["JAX_LOCAL_DEVICE_IDS"] == "3"
    handed = json.loads(start["environment"]["MULTIMESH_MAXTEXT"])
    if job.folder in original.SCRIPTS:
        theirs = settle(read(original.SCRIPTS[job.folder].split()), maxtext / "maxtext").job
        assert size == theirs.devices
        for key, value in (("stages", theirs.options.pp), ("interleave", theirs.options.interleave)):
            assert handed[key] == value
        assert handed["schedule"] == theirs.options.schedule
        assert start["configuration"]["gradient_accumulation_steps"] == theirs.microbatches
        assert start["configuration"]["max_target_length"] == theirs.options.sequence_length


def test_perlmutter_is_started_as_its_users_are_told_to():
    made = jobs.files(next(job for job in jobs.JOBS if job.folder == "perlmutter"))["job.sbatch"]
    assert "--gpus-per-task=1 --gpu-bind=none" in made
    assert all(engine in made for engine in ("shifter --image=", "podman-hpc run", "CHECKOUT"))
