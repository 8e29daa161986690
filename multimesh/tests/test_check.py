"""The judgments of `python -m multimesh check`: what processes measured, and the rows that follow."""

import argparse
import dataclasses
import re
import subprocess
import time
from pathlib import Path

import pytest
from multimesh.__main__ import main
from multimesh.check import compute, device_file, files, machine, run, steps, transfers, verdicts, workloads
from multimesh.check.verdicts import Row
from multimesh.hardware import devices, known_faults
from multimesh.processes.initialize import Processes

JOB = Processes("spawn", 0, ("n1", "n2"))
WELL = {"jax": "0.12.0", "jaxlib": "0.12.0", "XLA_FLAGS": ""}


class Grid:
    """The part of a `Bench` that judges read, on hosts of one job."""

    def __init__(self, accelerated=True, kind="NVIDIA H100 80GB HBM3", per_stage=2, hosts=("n1", "n2")):
        self.job, self.stages, self.per_stage, self.accelerated = (
            Processes("Slurm", 0, hosts),
            2,
            per_stage,
            accelerated,
        )
        self.folder = Path("/tmp")
        device = [argparse.Namespace(device_kind=kind, process_index=number) for number in range(2)]
        self.meshes = [argparse.Namespace(devices=argparse.Namespace(flat=[each] * per_stage)) for each in device]


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
echo "0, 570.86, P0, 1980, 1980, 80000, 81559, 0, 0x0000000000000000, 33, 16, 16"
echo "1, 570.86, P8, 345, 1980, 21000, 81559, 3, 0x0000000000000040, 88, 8, 16"
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
    for words in (
        "3 errors in memory",
        "slowed down (reasons 0x40, 88 C)",
        "8 of 16 lanes",
        "21000 of 81559",
        "Link 3",
    ):
        assert words in told
    assert "GPU 0" not in told


def test_without_gpus_there_is_no_row_of_them():
    assert machine.judge_gpus([{"gpus": [], "links": []}]) == []


def test_devices_of_another_kind_or_number_are_named():
    well = {"kinds": ["H100"] * 2, "free": [70e9], "cores": [0], "gpus": [], "links": []}
    found = machine.judge_devices(Grid(), [well, well | {"cores": [1]}])
    assert [(row.name, row.verdict) for row in found] == [("devices", "ok")]
    assert found[0].numbers == {"devices": 4.0, "memory": 70e9}
    (row,) = machine.judge_devices(Grid(), [well, well, well | {"kinds": ["H100"]}])
    assert "sees 1 H100, most see 2 H100" in row.measured
    both = [well | {"cores": [0, 1]}] * 2
    assert [row.name for row in machine.judge_devices(Grid(hosts=("n1", "n1")), both)] == ["devices", "affinity"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("cpu", None),
    ],
)
def test_the_device_of_the_table_has_a_word_of_the_kind(kind, name):
    found = compute.look_up_device(kind)
    assert (found and found.name) == name


def test_the_slowest_device_is_named_if_it_is_far_slower():
    fast, slow = {"product": 600e12, "copy": 3e12}, {"product": 400e12, "copy": 2e12}
    (row,) = compute.judge_products(Grid(), [[fast, fast], [fast, fast]])
    assert (row.verdict, row.numbers) == ("ok", {"product": 600e12, "copy": 3e12})
    assert "of h100" in row.expected
    (row,) = compute.judge_products(Grid(), [[fast, fast], [fast, slow]])
    assert (row.verdict, row.code) == ("FAILED", 4)
    assert "slowest 400, device 1 of process 1" in row.measured
    (row,) = compute.judge_products(Grid(), [[slow | {"product": 200e12}]] * 2)
    assert row.verdict == "note"
    shared = Grid(accelerated=False, kind="cpu")  # devices of a process share its cores
    (row,) = compute.judge_products(shared, [[fast, {"product": 1.0, "copy": 1.0}], [fast, fast]])
    assert row.verdict == "ok"
    (row,) = compute.judge_products(Grid(accelerated=False, kind="cpu"), [[fast], [slow]])
    assert (row.verdict, row.expected) == ("ok", "")


def test_stages_of_one_device_have_no_collectives():
    assert compute.judge_collectives(Grid(), [{}, {}])[0].verdict == "-"
    (row,) = compute.judge_collectives(
        Grid(), [{"0": {"seconds": 1e-5, "rate": 300e9}}, {"1": {"seconds": 2e-5, "rate": 1e9}}]
    )
    assert (row.verdict, row.numbers) == ("note", {"collective": 1e9})
    assert "slowest in stage 1" in row.measured


def test_the_slowest_pair_of_stages_is_named():
    every = [
        {"0": {"seconds": 1e-5, "there": 40e9, "back": 10e9}},
        {"1": {"seconds": 2e-5, "there": 40e9, "back": 40e9}},
    ]
    (row,) = transfers.judge_alone("device_put")(Grid(), every)
    assert row.verdict == "note"
    assert "20 us small; 10 GB/s large, slowest between process 0" in row.measured
    assert row.numbers == {"latency": 2e-5, "network": 10e9}
    (row,) = transfers.judge_alone("pull")(Grid(hosts=("n1", "n1")), every)
    assert (row.verdict, row.numbers["link"]) == ("ok", 10e9)
    assert transfers.judge_alone("pull")(Grid(), ["there is one stage"] * 2)[0].verdict == "-"


def test_a_folder_that_is_not_shared_names_the_process():
    (row,) = files.judge_files(Grid(), [{"fault": ""}, {"fault": "what process 0 wrote is not there"}])
    assert (row.verdict, row.code) == ("FAILED", 2)
    assert "process 1" in row.measured


@pytest.mark.parametrize("far", [1.0, float("nan")])
def test_a_pipeline_that_computes_something_else_fails(far):
    every = [{"gpipe": {"far": 1e-7, "seconds": 1}, "1f1b": {"far": far, "seconds": 1}, "zb-v": {"refused": "odd"}}]
    (row,) = workloads.judge_schedules(Grid(), every)
    assert (row.verdict, row.code) == ("FAILED", 14)
    every[0]["1f1b"]["far"] = 1e-7
    assert workloads.judge_schedules(Grid(), every)[0].verdict == "ok"


def test_a_death_that_nobody_tells_in_time_fails():
    said = "multimesh: process 0 of 2 (n1, pid 1) ends because process 1 of 2 (n1, pid 2) was killed by SIGKILL\n"
    good = {"seconds": 0.5, "said": said, "code": 17}
    assert workloads.judge_kill(Grid(), [good, None])[0].verdict == "ok"
    for bad in ({"seconds": 60.0}, {"said": "Terminating process"}, {"code": -6}):
        assert workloads.judge_kill(Grid(), [good | bad])[0].code == 17


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


def test_an_error_is_a_row_and_the_next_step_knows():
    def wrong(bench):
        raise ValueError("a fault\nin two lines")

    def ask(bench):
        return "first" in bench.failed

    every = [
        steps.Probe("first", 60, wrong, lambda bench, every: []),
        steps.Probe("second", 60, ask, lambda bench, every: [Row("second", "ok", str(every[0]))]),
    ]
    found, answers = steps.run_steps(every, bench(), lambda new: None)
    assert answers
    assert re.search("process 0 of 1.*: ValueError: a fault, while first$", found[0].measured)
    assert found[1].measured == "True"


def test_every_step_has_a_limit_and_the_quick_ones_are_a_part():
    every, quick = run.steps(False), run.steps(True)
    assert all(0 < step.limit <= 400 for step in every)
    assert {step.name for step in quick} < {step.name for step in every}


def test_the_table_has_remedies_below_their_rows():
    found = [Row("a", "ok", "1", "2"), verdicts.make_failure("b", "wrong", "mend it", 4)]
    assert verdicts.table(found).splitlines()[1:] == [
        "a     ok      0.0      1 (2)",
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


def test_the_measured_device_serves_the_planner(tmp_path, capsys):
    found = [
        Row("meeting", "ok", "", numbers={"processes": 16.0, "hosts": 2.0}),
        Row("devices", "ok", "", numbers={"devices": 16.0, "memory": 8e10}),
        Row("products", "ok", "", numbers={"product": 6e14, "copy": 3e12}),
        Row("collectives in stages", "ok", "", numbers={"collective": 3e11}),
        Row("transfers by device_put", "ok", "", numbers={"latency": 1e-5, "network": 4e10}),
    ]
    file = tmp_path / "measured.toml"
    file.write_text(device_file.device_table(found))
    device = devices.device("measured", file)
    assert (device.bf16, device.link, device.network, device.domain) == (6e14, 3e11, 4e10, 8)
    words = ["suggest", "--model", "llama3-8b", "--device", "measured", "--devices-file", str(file), "--nodes", "2"]
    assert main(words) == 0
    assert "measured" in capsys.readouterr().out
