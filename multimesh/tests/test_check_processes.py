"""`python -m multimesh check` of real processes: all is well, or one of them has a fault."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spawning import ON_CPU

pytestmark = pytest.mark.multiprocess

CASES = Path(__file__).with_name("check_cases.py")
ENV = ON_CPU | {"NPROC": "64", "MULTIMESH_SILENCE_TIMEOUT": "4", "MULTIMESH_START_TIMEOUT": "200"}
MULTIMESH = (sys.executable, "-m", "multimesh")
WHO = r"process 1 of 2 \(\S+?(, pid \d+)?\)"
FAULTS = {  # the steps that are tried, further flags, the exit code, the row that fails and its words
    "have_another_jax": ("devices", [], 2, "meeting", rf"jax: process 0 .* where {WHO} has '9.9'"),
    "have_another_folder": ("devices,shared folder", [], 2, "shared folder", f"{WHO}(: what process 0)? wrote"),
    "be_slow": ("devices,products", [], 4, "products", f"slowest .*, device 0 of {WHO}"),
    "be_deaf": ("devices,transfers by pull", [], 17, "transfers by pull", "did not end within 8 s: transfers by"),
    "be_stopped": ("devices,products,plans", [], 17, "all processes live", f"{WHO} has been out of reach"),
    "hang": ("devices,products,plans", [], 17, "products", f"{WHO} did not end within 8 s: products"),
    "a wrong mesh": ("devices", ["--stages", "3"], 4, "devices", "3 stages of 1 devices need 3, and JAX finds 2"),
}


def check(folder, *words, **more):
    """Run a command in a folder; returns its code, the JSON that process 0 prints, and all else that was said."""
    done = subprocess.run([*MULTIMESH, *words], capture_output=True, text=True, env=ENV | more, timeout=300, cwd=folder)
    said = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, said
    return done.returncode, json.loads(lines[0]), said


UNFIT = ("have_another_folder", "be_slow", "be_stopped", "hang")
"""Faults of one process, whose node is named. Of the others all have a part."""


@pytest.mark.telling("have_another_folder", "be_stopped", "hang")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_row_with_its_process_and_a_code(tmp_path, fault):
    wanted, flags, want, name, told = FAULTS[fault]
    listed = tmp_path / "unfit"
    words = [str(CASES), fault, wanted, "--json", f"--unfit={listed}", "--quick", *flags]
    code, found, said = check(tmp_path, "spawn", "-n", "2", *words)
    assert found["rows"], said
    (row,) = [row for row in found["rows"] if row["verdict"] == "FAILED"]
    assert row["name"] == name, said
    assert re.search(told, row["measured"]), row
    assert (row["code"], found["exit_code"]) == (want, want), said
    assert code == want, said
    assert "Traceback" not in said
    assert found["unfit_nodes"] == ["n1"] * (fault in UNFIT), said
    assert (listed.read_text() if listed.exists() else "") == "n1\n" * (fault in UNFIT)


@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (2, ["--quick"]),
        pytest.param(4, ["--stages", "2"], marks=pytest.mark.full),
        pytest.param(8, ["--quick"], marks=pytest.mark.full),
        pytest.param(1, [], marks=pytest.mark.full),
        pytest.param(1, ["--stages", "1"], marks=pytest.mark.full),
    ],
)
def test_processes_that_are_well_pass_every_row(tmp_path, count, flags):
    devices = str(4 // count or 1)
    words = ["check", "-n", str(count), "--json", *flags, "--report", "report.json"]
    code, found, said = check(tmp_path, *words, JAX_NUM_CPU_DEVICES=devices)
    assert code == found["exit_code"] == 0, said
    assert {row["verdict"] for row in found["rows"]} <= {"ok", "-"}, found
    names = [row["name"] for row in found["rows"]]
    assert names[:6] == ["meeting", "devices", "GPUs", "versions", "shared folder", "products"]
    report = (tmp_path / "report.json").read_text()
    assert str(tmp_path) not in report
    assert [row["name"] for row in json.loads(report)["rows"]] == names
    assert not [*tmp_path.glob(".multimesh-check-*")]


def test_processes_end_as_soon_as_the_table_is_there(tmp_path):
    """Not when the heartbeats of those that left are missed."""
    words = ["spawn", "-n", "2", str(CASES), "none", "devices", "--json"]
    patient = ENV | {"MULTIMESH_SILENCE_TIMEOUT": "60"}
    with subprocess.Popen([*MULTIMESH, *words], stdout=subprocess.PIPE, text=True, env=patient, cwd=tmp_path) as job:
        assert any(line.startswith("{") for line in job.stdout)
        begun = time.monotonic()
        assert job.wait(100) == 0
    assert time.monotonic() - begun < 25


def test_a_flag_that_hangs_pipelines_is_told_once(tmp_path):
    """Given to both processes, it is refused by `check`, too."""
    flags = ENV | {"XLA_FLAGS": "--xla_gpu_shard_autotuning=true"}
    words = [str(CASES), "none", "devices,versions", "--json"]
    done = subprocess.run(
        [*MULTIMESH, "spawn", "-n", "2", *words], capture_output=True, text=True, env=flags, cwd=tmp_path
    )
    assert done.stderr.count("XLA_FLAGS has --xla_gpu_shard_autotuning=true") == 1, done.stderr
    assert done.returncode == 4
    assert "marin issue 7024" in json.loads(done.stdout.splitlines()[-1])["rows"][-1]["remedy"]
