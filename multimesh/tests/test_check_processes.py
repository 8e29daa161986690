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


def check(folder, *words, **env):
    """Run a command in a folder; returns its code, the JSON that process 0 prints, and all else that was said."""
    child = subprocess.run([*MULTIMESH, *words], capture_output=True, text=True, env=ENV | env, timeout=300, cwd=folder)
    output = child.stdout + child.stderr
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, output
    return child.returncode, json.loads(lines[0]), output


UNFIT = ("have_another_folder", "be_slow", "be_stopped", "hang")
"""Faults of one process, whose node is named. Of the others all have a part."""


@pytest.mark.telling("have_another_folder", "be_stopped", "hang")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_row_with_its_process_and_a_code(tmp_path, fault):
    steps, flags, expected, name, message = FAULTS[fault]
    unfit = tmp_path / "unfit"
    words = [str(CASES), fault, steps, "--json", f"--unfit={unfit}", "--quick", *flags]
    code, document, output = check(tmp_path, "spawn", "-n", "2", *words)
    assert document["rows"], output
    (row,) = [row for row in document["rows"] if row["verdict"] == "FAILED"]
    assert row["name"] == name, output
    assert re.search(message, row["measured"]), row
    assert (row["code"], document["exit_code"]) == (expected, expected), output
    assert code == expected, output
    assert "Traceback" not in output
    assert document["unfit_nodes"] == ["n1"] * (fault in UNFIT), output
    assert (unfit.read_text() if unfit.exists() else "") == "n1\n" * (fault in UNFIT)


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
    code, document, output = check(tmp_path, *words, JAX_NUM_CPU_DEVICES=devices)
    assert code == document["exit_code"] == 0, output
    assert {row["verdict"] for row in document["rows"]} <= {"ok", "-"}, document
    names = [row["name"] for row in document["rows"]]
    assert names[:6] == ["meeting", "devices", "GPUs", "versions", "shared folder", "products"]
    report = (tmp_path / "report.json").read_text()
    assert str(tmp_path) not in report
    assert [row["name"] for row in json.loads(report)["rows"]] == names
    assert not [*tmp_path.glob(".multimesh-check-*")]


def test_processes_end_as_soon_as_the_table_is_there(tmp_path):
    """They do not wait until heartbeats of those that left are missed."""
    words = ["spawn", "-n", "2", str(CASES), "none", "devices", "--json"]
    patient = ENV | {"MULTIMESH_SILENCE_TIMEOUT": "60"}
    with subprocess.Popen([*MULTIMESH, *words], stdout=subprocess.PIPE, text=True, env=patient, cwd=tmp_path) as job:
        assert any(line.startswith("{") for line in job.stdout)
        start = time.monotonic()
        assert job.wait(100) == 0
    assert time.monotonic() - start < 25


def test_a_flag_that_hangs_pipelines_is_told_once(tmp_path):
    """Given to both processes, it is refused by `check`, too."""
    flags = ENV | {"XLA_FLAGS": "--xla_gpu_shard_autotuning=true"}
    words = [str(CASES), "none", "devices,versions", "--json"]
    process = subprocess.run(
        [*MULTIMESH, "spawn", "-n", "2", *words], capture_output=True, text=True, env=flags, cwd=tmp_path
    )
    assert process.stderr.count("XLA_FLAGS has --xla_gpu_shard_autotuning=true") == 1, process.stderr
    assert process.returncode == 4
    assert "marin issue 7024" in json.loads(process.stdout.splitlines()[-1])["rows"][-1]["remedy"]
