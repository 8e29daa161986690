"""--validate large on a real Slurm: what becomes of a job, and of the public tags, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.parts import processes
from workflows import errors

from .conftest import ROOT, digest_of

pytestmark = pytest.mark.slurm

OPTIONS = "--ntasks-per-node=2 --gpus-per-node=0 --time=5"


@pytest.fixture(autouse=True)
def _slurm(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (cluster | {"MULTIMESH_SLURM_OPTIONS": OPTIONS}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.stand_in("two Slurm nodes on this machine, Docker on them, and tiny images whose job trains nothing")
def test_a_job_that_passes_moves_the_tags(make_tiny, upload, target, tmp_path: Path) -> None:
    image = make_tiny(
        verdict="echo task $SLURM_PROCID of $SLURM_NTASKS, first at $JAX_COORDINATOR_ADDRESS\n"
        "echo 'ok: 3 steps, loss 9 -> 8'"
    )

    done = upload(image, "--validate", "large", "--json")

    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"|  task {rank} of 4, first at 127.0.0.1:6" in done.stderr
    assert ": completed" in done.stderr
    check = json.loads((tmp_path / "release.json").read_text())["check"]
    assert check["job"] == "large"
    assert check["verdict"].startswith(
        "ok: 3 steps, loss 9 -> 8; the llama3-8b job of Slurm with other settings: --ntasks"
    )
    assert digest_of(target, "v1") is not None


@pytest.mark.stand_in("two Slurm nodes on this machine, Docker on them, and tiny images whose job trains nothing")
@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("echo error: no GPU; exit 4", "(error: no GPU); no tag was moved"),
        ("echo all is well", "ended without a verdict on its loss"),
    ],
    ids=["fails", "says-nothing"],
)
def test_a_job_that_fails_moves_nothing(make_tiny, upload, target, verdict: str, said: str) -> None:
    assert upload(make_tiny("before")).returncode == 0
    before = digest_of(target, "v1")

    done = upload(make_tiny("after", verdict=verdict), "--validate", "large", "--latest")

    assert (done.returncode, done.stdout) == (errors.SmokeError.exit_code, ""), done.stderr
    # (Which task's exit code Slurm reports is a race: when one fails, it ends the others.)
    assert said in done.stderr.splitlines()[-1]
    assert (digest_of(target, "v1"), digest_of(target, "latest")) == (before, None)


def test_a_job_that_slurm_does_not_take(make_tiny, upload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIMESH_SLURM_OPTIONS", "--gpus-per-node=0 --partition=nowhere")
    done = upload(make_tiny(), "--validate", "large")
    assert done.returncode == errors.SmokeError.exit_code
    assert "Slurm does not take the job" in done.stderr
    assert "partition" in done.stderr.splitlines()[-1]


def test_a_slurm_that_does_not_answer_is_found_before_anything_is_done(
    upload, make_tiny, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    done = upload(make_tiny(), "--validate", "large")
    assert (done.returncode, done.stdout) == (errors.UsageError.exit_code, "")
    assert done.stderr.startswith("error: --validate large: Slurm does not answer")


@pytest.mark.stand_in("two Slurm nodes on this machine, Docker on them, and tiny images whose job trains nothing")
def test_an_interrupt_cancels_the_job(make_tiny, tmp_path: Path) -> None:
    image, said = make_tiny(verdict="echo here; sleep 300"), tmp_path / "stderr"
    subprocess.run(["docker", "tag", image.id, "multimesh-test-large:T"], check=True)
    argv = [sys.executable, "-m", "workflows", "image", "--no-build", "--repo", "multimesh-test-large", "--tag", "T"]
    with said.open("wb") as file:
        process = subprocess.Popen(
            [*argv, "--validate", "large"], stderr=file, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        processes.wait_for(lambda: said.read_text().count("|  here") == 4, "all tasks run", process=process, log=said)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)

    assert code == 130, said.read_text()
    found = re.search(r"^job (\d+) of Slurm", said.read_text(), re.MULTILINE)
    assert found is not None
    ask = ["squeue", "--noheader", "--states=all", f"--jobs={found[1]}", "--format=%T"]

    def cancelled() -> bool:
        return subprocess.run(ask, capture_output=True, text=True).stdout.strip() == "CANCELLED"

    def gone() -> bool:
        running = ["docker", "ps", "--quiet", "--filter", f"ancestor={image.id}"]
        return not subprocess.run(running, capture_output=True, text=True).stdout

    processes.wait_for(cancelled, "the job is cancelled")
    processes.wait_for(gone, "its containers ended")
