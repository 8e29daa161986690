"""The judgments of `python -m multimesh check`: what processes measured, and the rows that follow."""

import argparse
import dataclasses
import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from multimesh.commands.check import machine, rates, run
from multimesh.commands.check.steps import FAILED, OK, Bench, Row, Step
from multimesh.core import known_faults
from multimesh.marking.contexts import TRANSPORTS

WELL = {"jax": "0.12.0", "jaxlib": "0.12.0", "XLA_FLAGS": ""}


class Grid:
    """The part of a `Bench` that judges read, on hosts of one job."""

    quick, per_stage, stages, folder = True, 2, 2, Path("/tmp")

    def __init__(self, accelerated=True):
        self.accelerated = accelerated
        devices = [argparse.Namespace(process_index=number) for number in range(2)]
        self.meshes = [argparse.Namespace(devices=argparse.Namespace(flat=[device] * 2)) for device in devices]


@pytest.mark.parametrize(
    ("judge", "every", "verdict", "code", "processes", "words"),
    [
        (machine.judge_versions, [WELL, WELL], "ok", 0, (), "jax 0.12.0, jaxlib 0.12.0"),
        (
            *(machine.judge_versions, [WELL, WELL | {"NCCL_ALGO": "Ring"}], "FAILED", 2, ()),
            r"NCCL_ALGO: process 0 .* has '', process 1 .* has 'Ring'",
        ),
        (machine.judge_versions, [WELL | {"NCCL": "2.30.7"}], "FAILED", 4, (), "^NCCL 2.30.7$"),
        (
            machine.judge_versions,
            [WELL | {"XLA_FLAGS": "--xla_gpu_shard_autotuning"}] * 2,
            "FAILED",
            4,
            (),
            "XLA_FLAGS",
        ),
        (machine.judge_devices, [["H100"] * 2] * 2, "ok", 0, (), "2 x 2 H100; a grid of 2 stages x 2"),
        (machine.judge_devices, [["H100"] * 2] * 2 + [["H100"]], "FAILED", 2, [2], "sees 1 H100, most see 2 H100"),
        (machine.judge_gpus, [[], []], "-", 0, (), "none"),
        (machine.judge_gpus, [[["", ""]], []], "ok", 0, (), "all links up"),
        (
            machine.judge_gpus,
            [[["", ""]], [["GPU 1 is hot", "cool it"]]],
            "FAILED",
            4,
            [1],
            "process 1 .*: GPU 1 is hot",
        ),
        (machine.judge_folder, ["", "what process 0 wrote is not there"], "FAILED", 2, [1], "process 1"),
        (rates.judge_products, [[6e14, 6e14], [6e14, 6e14]], "ok", 0, (), "600 TFLOP/s"),
        (rates.judge_products, [[6e14, 6e14], [6e14, 4e14]], "FAILED", 4, [1], "slowest 400, device 1 of process 1"),
        (rates.judge_collectives, [{}, {}], "-", 0, (), "a stage has one device"),
        (rates.judge_collectives, [{"0": 300e9}, {"1": 1e9}], "ok", 0, (), "slowest in stage 1"),
        (rates.judge_transfers, ["there is one stage"] * 2, "-", 0, (), "one stage"),
        (
            rates.judge_transfers,
            [
                {"pairs": {"0": [1e-5, 10e9]}, "turn": 1.0, "turns": 20},
                {"pairs": {"1": [2e-5, 40e9]}, "turn": 1.0, "turns": 20},
            ],
            *("ok", 0, (), "20 us small; 10 GB/s large, slowest between process 0"),
        ),
        (rates.judge_training, [{"far": 1e-7, "seconds": 1}], "ok", 0, (), "1.0e-07"),
        (rates.judge_training, [{"far": float("nan"), "seconds": 1}], "FAILED", 14, (), "nan"),
    ],
)
def test_what_processes_measured_is_a_row(judge, every, verdict, code, processes, words):
    row = judge(Grid(), every)
    assert (row.verdict, row.code, row.processes) == (verdict, code, processes)
    assert re.search(words, row.measured), row
    assert row.remedy or verdict != "FAILED"


def test_cpu_devices_of_a_process_share_its_cores():
    shared = Grid(accelerated=False)
    assert rates.judge_products(shared, [[6e14, 1.0], [6e14, 6e14]]).verdict == OK
    assert rates.judge_products(shared, [[6e14], [4e14]]).verdict == OK


def test_flags_that_hang_pipelines_are_those_of_one_table(monkeypatch):
    collectives = "--xla_gpu_enable_command_buffer"
    for bad, report in (
        ("--a=1 --xla_gpu_shard_autotuning", "marin issue 7024"),
        ("--xla_gpu_shard_autotuning=True", "marin issue 7024"),
        (f"{collectives}=FUSION,COLLECTIVES", "pull request 8277"),
        (f"{collectives}=+COLLECTIVES", "pull request 8277"),
    ):
        (fault,) = known_faults.find_overrides({"XLA_FLAGS": bad})
        assert report in fault
    tuning = [f"--xla_gpu_shard_autotuning={value}" for value in ("false", "False", "0")]
    for good in ("", *tuning, *(f"{collectives}={value}" for value in ("", "FUSION", "FUSION,-COLLECTIVES"))):
        assert not known_faults.find_overrides({"XLA_FLAGS": good})
    new = dataclasses.replace(known_faults.AUTOTUNING, name="xla_gpu_new", hangs="2", report="a report")
    monkeypatch.setattr(known_faults, "FLAGS", (*known_faults.FLAGS, new))
    assert "(a report)" in known_faults.find_overrides({"XLA_FLAGS": "--xla_gpu_new=2"})[0]


def test_versions_of_nccl_that_hang_pipelines_are_refused_with_their_report():
    (fault,) = known_faults.find_bad_versions({"NCCL": "2.30.7"})
    assert "NVIDIA/jaxpp issue 11" in fault
    assert "install 2.31.2 or later" in fault
    for good in ("2.31.2", "2.32.3", "2.29.1", ""):
        assert not known_faults.find_bad_versions({"NCCL": good})


@pytest.mark.stand_in("a libnccl.so of one function")
def test_the_version_of_nccl_is_what_its_library_says(tmp_path):
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23007; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert machine.nccl_version([str(library)]) == "2.30.7"
    assert machine.nccl_version([str(tmp_path / "none.so"), str(library)]) == "2.30.7"


SMI = """#!/bin/sh
if [ "$1" = nvlink ]; then
  echo "GPU 0: NVIDIA H100 (UUID: GPU-1)"; echo "	 Link 0: 26.562 GB/s"
  echo "GPU 1: NVIDIA H100 (UUID: GPU-2)"; echo "	 Link 3: <inactive>"
  exit
fi
echo "0, P0, 80000, 81559, 0, 0x0000000000000000, 33"
echo "1, P8, 21000, 81559, 3, 0x0000000000000040, 88"
"""


@pytest.mark.stand_in("an nvidia-smi that prints lines of one")
def test_gpus_that_are_not_well_are_named(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    text = machine.judge_gpus(Grid(), [machine.look_at_gpus()]).measured
    for words in ("3 errors in memory", "slowed down (reasons 0x40, 88 C)", "21000 of 81559", "Link 3"):
        assert words in text
    assert "GPU 0" not in text


def run_steps(*every):
    """The rows of steps of one process, and whether each answered."""
    bench = Bench(1, 0, 0, True, Path())
    return [step.run(bench) for step in every]


def test_a_step_that_hangs_says_what_it_was_doing():
    def hang(bench):
        bench.doing = "waiting for nobody"
        time.sleep(600)

    first = Step("first", 60, lambda bench: 1, lambda bench, every: Row(OK, str(every)))
    second = Step("second", 0.2, hang, lambda bench, every: Row(OK, ""), "wait")
    (one, answers), (two, silent) = run_steps(first, second)
    assert (one.name, one.verdict, one.measured, answers) == ("first", OK, "[1]", True)
    assert two.measured.endswith("did not end within 0 s: waiting for nobody")
    assert (two.code, two.remedy, silent) == (17, "wait", False)


def test_an_error_is_a_row():
    def fail(bench):
        raise ValueError("a fault\nin two lines")

    ((row, answers),) = run_steps(Step("first", 60, fail, lambda bench, every: Row(OK, "")))
    assert answers
    assert re.search("process 0 of 1.*: ValueError: a fault, while first$", row.measured)


def test_every_step_has_a_limit_and_every_transport_a_step():
    steps, quick = run.steps(False), run.steps(True)
    assert {f"transfers by {name}" for name in TRANSPORTS} <= {step.name for step in steps}
    assert all(0 < fast.limit <= step.limit <= 400 for fast, step in zip(quick, steps, strict=True))


def test_the_table_has_remedies_below_their_rows_and_names_unfit_nodes(capsys, tmp_path):
    rows = [Row(OK, "1", name="a"), Row(FAILED, "wrong", "mend it", 4, [3], "b")]
    options = argparse.Namespace(json=False, unfit=tmp_path / "unfit", report=tmp_path / "report")
    run.finish(options, rows, 4, ["n1", "n1", "n2", "n2"])
    assert capsys.readouterr().out.splitlines()[2:] == [
        *("a     ok      0.0      1", "b     FAILED  0.0      wrong", "                       -> mend it", ""),
        *("FAILED: b: wrong", "unfit nodes: n2"),
    ]
    assert options.unfit.read_text() == "n2\n"
    assert json.loads(options.report.read_text())["unfit_nodes"] == ["host 1"]


def test_a_report_has_no_hosts_users_addresses_or_paths(monkeypatch):
    monkeypatch.setattr(run.getpass, "getuser", lambda: "ada")
    text = "process 1 of 2 (gpu-10, pid 7) and gpu-1 at 10.0.0.1:41275 in /tmp/ada/ck of ada; jax 0.12.0.1, 1/2 GB/s"
    anonymous = "process 1 of 2 (host 1, pid 7) and host 0 at ADDRESS in PATH of USER; jax 0.12.0.1, 1/2 GB/s"
    assert run.without_names({"rows": [{"said": text, "code": 0}]}, ["gpu-1", "gpu-10"]) == {
        "rows": [{"said": anonymous, "code": 0}]
    }


def test_a_folder_that_cannot_be_written_is_named():
    bench = Bench(processes=1, stages=1, per_stage=1, quick=True, folder=Path("/proc/nope"))
    assert machine.try_folder(bench) == "can't write there: No such file or directory"
    assert not bench.accelerated
