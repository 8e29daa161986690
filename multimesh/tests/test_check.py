"""The judgments of `python -m multimesh check`: what processes measured, and the rows that follow."""

import argparse
import dataclasses
import re
import subprocess
import time
from pathlib import Path

import pytest
from multimesh.commands.check import compute, files, machine, run, steps, transfers, verdicts, workload
from multimesh.commands.check.verdicts import Row
from multimesh.core import known_faults
from multimesh.processes.initialize import Processes

JOB = Processes("spawn", 0, ("n1", "n2"))
WELL = {"jax": "0.12.0", "jaxlib": "0.12.0", "XLA_FLAGS": ""}


class Grid:
    """The part of a `Bench` that judges read, on hosts of one job."""

    quick, per_stage, stages, folder = True, 2, 2, Path("/tmp")

    def __init__(self, accelerated=True):
        self.job, self.accelerated = Processes("Slurm", 0, ("n1", "n2")), accelerated
        devices = [argparse.Namespace(process_index=number) for number in range(2)]
        self.meshes = [argparse.Namespace(devices=argparse.Namespace(flat=[device] * 2)) for device in devices]


def test_the_same_versions_pass_and_others_name_both_processes():
    assert machine.judge_versions(Grid(), [WELL, dict(WELL)])[0].verdict == "ok"
    (row,) = machine.judge_versions(Grid(), [WELL, WELL | {"NCCL_ALGO": "Ring"}])
    assert (row.verdict, row.code) == ("FAILED", 2)
    assert re.search(r"NCCL_ALGO: process 0 .* has 'none', process 1 .* has 'Ring'", row.measured)


def test_versions_and_flags_that_hang_pipelines_are_refused_with_their_report():
    (row,) = machine.judge_versions(Grid(), [WELL | {"NCCL": "2.30.7"}])
    assert (row.measured, row.code) == ("NCCL 2.30.7", 4)
    assert "NVIDIA/jaxpp issue 11" in row.remedy
    assert "install 2.31.2 or later" in row.remedy
    for good in ("2.31.2", "2.32.3", "2.29.1", ""):
        assert not known_faults.find_bad_versions({"NCCL": good})


def test_flags_that_hang_pipelines_are_those_of_one_table(monkeypatch):
    assert all(flag.why and flag.report and flag.ours for flag in known_faults.FLAGS)
    collectives = "--xla_gpu_enable_command_buffer"
    for bad, report in (
        ("--a=1 --xla_gpu_shard_autotuning", "marin issue 7024"),
        ("--xla_gpu_shard_autotuning=True", "marin issue 7024"),
        (f"{collectives}=FUSION,COLLECTIVES", "pull request 8277"),
        (f"{collectives}=+COLLECTIVES", "pull request 8277"),
    ):
        (said,) = known_faults.find_overrides({"XLA_FLAGS": bad})
        assert report in said
        (row,) = machine.judge_versions(Grid(), [WELL | {"XLA_FLAGS": bad}] * 2)
        assert (row.verdict, row.code) == ("FAILED", 4)
    tuning = [f"--xla_gpu_shard_autotuning={value}" for value in ("false", "False", "0")]
    for good in ("", *tuning, *(f"{collectives}={value}" for value in ("", "FUSION", "FUSION,-COLLECTIVES"))):
        assert not known_faults.find_overrides({"XLA_FLAGS": good})
    new = dataclasses.replace(known_faults.AUTOTUNING, name="xla_gpu_new", hangs="2", report="a report")
    monkeypatch.setattr(known_faults, "FLAGS", (*known_faults.FLAGS, new))
    assert "(a report)" in known_faults.find_overrides({"XLA_FLAGS": "--xla_gpu_new=2"})[0]


def test_nodes_at_fault_are_named():
    rows = [verdicts.make_failure("products", "slow", "", processes=[3]), Row("GPUs", "ok", "", processes=[0])]
    nodes = ["n1", "n1", "n2", "n2"]
    assert verdicts.unfit_nodes(rows, nodes) == ["n2"]
    assert verdicts.unfit_nodes([*rows, verdicts.make_failure("GPUs", "hot", "", processes=[0])], nodes) == ["n1", "n2"]
    assert verdicts.unfit_nodes(rows[1:], nodes) == verdicts.unfit_nodes(rows, ()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("process 0 of 16 (n1, pid 70) ends because process 3 of 16 (n2, pid 88) was killed by SIGKILL", [3]),
        ("check: products: process 3, 5 and 2 more of 16 has not come here within 65 s", [3]),
        ("the store is gone", []),
    ],
)
def test_the_process_at_fault_is_the_last_that_a_sentence_names(text, found):
    assert steps.find_processes(text) == found


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
    found = machine.judge_gpus([{"gpus": machine.gpu_table(), "links": machine.gpu_links()}])
    assert {row.verdict for row in found} == {"FAILED"}
    told = "\n".join(row.measured for row in found)
    for words in ("3 errors in memory", "slowed down (reasons 0x40, 88 C)", "21000 of 81559", "Link 3"):
        assert words in told
    assert "GPU 0" not in told


def test_devices_of_another_kind_or_number_are_named():
    well = {"kinds": ["H100"] * 2, "gpus": [], "links": []}
    rows = machine.judge_devices(Grid(), [well, well])
    assert [(row.name, row.verdict) for row in rows] == [("devices", "ok")]  # without GPUs there is no row of them
    (row,) = machine.judge_devices(Grid(), [well, well, well | {"kinds": ["H100"]}])
    assert "sees 1 H100, most see 2 H100" in row.measured


def test_the_slowest_device_is_named_if_it_is_far_slower():
    fast, slow = 600e12, 400e12
    assert compute.judge_products(Grid(), [[fast, fast], [fast, fast]])[0].verdict == "ok"
    (row,) = compute.judge_products(Grid(), [[fast, fast], [fast, slow]])
    assert (row.verdict, row.code) == ("FAILED", 4)
    assert "slowest 400, device 1 of process 1" in row.measured
    shared = Grid(accelerated=False)  # devices of a process share its cores
    assert compute.judge_products(shared, [[fast, 1.0], [fast, fast]])[0].verdict == "ok"
    assert compute.judge_products(shared, [[fast], [slow]])[0].verdict == "ok"


def test_the_slowest_stage_and_pair_of_stages_are_named():
    assert compute.judge_collectives(Grid(), [{}, {}])[0].verdict == "-"
    assert "slowest in stage 1" in compute.judge_collectives(Grid(), [{"0": 300e9}, {"1": 1e9}])[0].measured
    every = [{"pairs": {"0": [1e-5, 10e9]}, "turn": 1.0}, {"pairs": {"1": [2e-5, 40e9]}, "turn": 1.0}]
    (row,) = transfers.judge("device_put", Grid(), every)
    assert row.verdict == "ok"
    assert "20 us small; 10 GB/s large, slowest between process 0" in row.measured
    assert transfers.judge("pull", Grid(), ["there is one stage"] * 2)[0].verdict == "-"


def test_a_folder_that_is_not_shared_names_the_process():
    (row,) = files.judge_files(Grid(), ["", "what process 0 wrote is not there"])
    assert (row.verdict, row.code) == ("FAILED", 2)
    assert "process 1" in row.measured


@pytest.mark.parametrize(("far", "want"), [(1e-7, ("ok", 0)), (1.0, ("FAILED", 14)), (float("nan"), ("FAILED", 14))])
def test_a_pipeline_that_computes_something_else_fails(far, want):
    (row,) = workload.judge_training(Grid(), [{"far": far, "seconds": 1}])
    assert (row.verdict, row.code) == want


def bench(**more):
    return steps.Bench(Processes("nobody", 0, ("n1",)), 0, 0, True, Path(), **more)


def test_a_step_that_hangs_says_what_it_was_doing_and_the_rest_is_left():
    def hang(bench):
        bench.doing = "waiting for nobody"
        time.sleep(600)

    told = []
    every = [
        steps.Probe("first", 60, lambda bench: 1, lambda bench, every: [Row("first", "ok", str(every))]),
        steps.Probe("second", 0.2, hang, lambda bench, every: [], "wait"),
        steps.Probe("third", 60, lambda bench: 1, lambda bench, every: []),
    ]
    found, answers = steps.run_steps(every, bench(), told.append)
    assert [row.name for row in found] == ["first", "second"]
    assert not answers
    assert found[1].measured.endswith("did not end within 0 s: waiting for nobody")
    assert (found[1].code, found[1].remedy, verdicts.exit_code(found)) == (17, "wait", 17)
    assert [len(new) for new in told] == [1, 1]


def test_an_error_is_a_row():
    def wrong(bench):
        raise ValueError("a fault\nin two lines")

    every = [
        steps.Probe("first", 60, wrong, lambda bench, every: []),
        steps.Probe("second", 60, lambda bench: 1, lambda bench, every: [Row("second", "ok", str(every[0]))]),
    ]
    found, answers = steps.run_steps(every, bench(), lambda new: None)
    assert answers
    assert re.search("process 0 of 1.*: ValueError: a fault, while first$", found[0].measured)
    assert found[1].measured == "1"


def test_every_step_has_a_limit():
    every, quick = run.steps(False), run.steps(True)
    assert all(0 < fast.limit <= step.limit <= 400 for fast, step in zip(quick, every, strict=True))


def test_the_table_has_remedies_below_their_rows():
    found = [Row("a", "ok", "1"), verdicts.make_failure("b", "wrong", "mend it", 4)]
    assert verdicts.table_of_rows(found).splitlines()[1:] == [
        "a     ok      0.0      1",
        "b     FAILED  0.0      wrong",
        "                       -> mend it",
    ]
    assert verdicts.from_json(verdicts.to_json(found)) == found


def test_a_report_has_no_hosts_users_addresses_or_paths(monkeypatch):
    monkeypatch.setattr(verdicts, "_user", lambda: "ada")
    said = "process 1 of 2 (gpu-10, pid 7) and gpu-1 at 10.0.0.1:41275 in /tmp/ada/ck of ada; jax 0.12.0.1, 1/2 GB/s"
    want = "process 1 of 2 (host 1, pid 7) and host 0 at ADDRESS in PATH of USER; jax 0.12.0.1, 1/2 GB/s"
    assert verdicts.without_names({"rows": [{"said": said, "code": 0}]}, ["gpu-1", "gpu-10"]) == {
        "rows": [{"said": want, "code": 0}]
    }
