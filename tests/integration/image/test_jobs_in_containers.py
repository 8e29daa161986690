"""The Slurm jobs in containers of the image: what they write stays when the containers have gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from multimesh_maxtext.errors import LossNotFallingError

from tests.integration.parts import pyxis, slurm
from tooling.core.files import ROOT

TINY = (
    *("--no-check", "--gpus=0", "--cpus=2", "--dp=1", "--tp=2", "--interleave=1", "--num-layers=2"),
    "--attention=dot_product",
    *("--sequence-length=32", "--model-dims=32", "--num-heads=4", "--batch-size=8", "dtype=float32", "vocab_size=512"),
)
"""CPU devices in place of GPUs and their attention, and a small model; all else is the folder's own."""


@pytest.mark.full
@pytest.mark.slurm
@pytest.mark.stand_in("two Slurm nodes on one machine, CPU devices; containers of the real engine in place of pyxis")
@pytest.mark.parametrize("by", ["docker", "pyxis"])
def test_a_job_in_containers_leaves_its_files_and_goes_on_from_them(
    image: dict[str, Any], cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Metrics, logs, checkpoints and compiled programs; a folder of MOUNTS is read. Another job resumes."""
    data, output, checkpoint, cache = (tmp_path / name for name in ("data", "out", "ck", "cache"))
    data.mkdir()
    (data / "text").write_text((ROOT / "LICENSE").read_text(encoding="utf-8"))
    variables = {"IMAGE": image["image"], "MOUNTS": f"{data}:{data}:ro", "XDG_CACHE_HOME": str(cache)}
    if by == "pyxis":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/srun").symlink_to(pyxis.__file__)
        Path(pyxis.__file__).chmod(0o755)
        variables["PATH"] = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, value in (cluster | variables).items():
        monkeypatch.setenv(name, value)
    place = [f"--output={output}", f"--checkpoint={checkpoint}", "checkpoint_period=1", f"--text={data / 'text'}"]
    text = submit(tmp_path / "first.log", *TINY, *place, "--num-steps=2")
    assert "\nstep 1 of 2  loss " in text, text
    assert [*cache.glob("multimesh/*")]
    assert (checkpoint / "1/commit_success.txt").exists()
    assert (output / "maxtext.log").read_text()
    text = submit(tmp_path / "second.log", *TINY, *place, "--num-steps=3", "--resume")
    assert "\nstep 2 of 3  loss " in text, text
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    owners = {path.stat().st_uid for folder in (output, checkpoint, cache) for path in folder.rglob("*")}
    assert owners == {os.getuid()}


def submit(log: Path, *flags: str) -> str:
    """Run the job of a folder to its end, whether its loss fell or rose; return its log."""
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={log}"]
    job = ROOT / "maxtext/llama3-8b-16gpus/job.sbatch"
    process = subprocess.run(["sbatch", *options, str(job), *flags], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    try:
        code = slurm.wait(process.stdout.strip(), log)
    finally:
        subprocess.run(["scancel", "--quiet", process.stdout.strip()], check=False)
    text = log.read_text(errors="replace")
    assert code in (0, LossNotFallingError.exit_code), text
    return text
