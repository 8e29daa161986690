"""What a real MaxText pipeline tells about itself: forecast, plan, timelines, profile."""

from __future__ import annotations

import collections
import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multimesh.passes.pipeline import PASSES

pytestmark = pytest.mark.longer

Run = Callable[..., Any]
JOB = ("--cpus", 4, "--tp", 2, "--pp", 2, "--num-layers", 2, "--model-dims", 64, "--mlp-dims", 64, "--num-steps", 3)
JOB += ("--sequence-length", 32, "--batch-size", 4, "--attention", "dot_product", "--remat", "full")
PLAN = {"costs.json", "plan.txt", "plan.json", "plan.svg", "plan.html", "plan.perfetto.json"}


@pytest.fixture(scope="module")
def run_folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was profiled and whose plan was dumped."""
    folder = tmp_path_factory.mktemp("trained")
    result = run(*JOB, "--output", folder, "--dump", folder / "dump", "--profile")
    assert result.code == 0, result.stderr
    return folder


def test_the_plan_is_dumped(run_folder: Path):
    dump = run_folder / "dump"
    assert {path.name for path in dump.iterdir()} >= PLAN
    plan = json.loads((dump / "plan.json").read_text())
    runs = [step for step in plan["instructions"] if step["kind"] == "RUN" and "phase" in step]
    cells = collections.Counter((step["submesh"], step["phase"]) for step in runs)
    # Four microbatches; the last stage runs forward and backward in one program.
    assert cells == {(0, "F"): 4, (0, "B"): 4, (1, "B"): 4}
    assert ElementTree.parse(dump / "plan.svg").getroot().tag.endswith("svg")
    assert json.loads((dump / "plan.perfetto.json").read_text())["traceEvents"]
    assert (dump / "plan.txt").read_text().count(": RUN ") == len(
        [s for s in plan["instructions"] if s["kind"] == "RUN"]
    )


def test_the_program_after_every_pass_is_dumped_and_those_of_xla_are_not(run_folder: Path):
    names = {path.name for path in (run_folder / "dump").iterdir()} - PLAN
    assert names == {f"{number:02}-{name}.txt" for number, name in enumerate([*PASSES, "kernels"])}
    assert "loop x4 1f1b" in (run_folder / "dump/00-inline_calls.txt").read_text()


def test_the_profile_has_timelines(run_folder: Path):
    assert [path.stat().st_size > 0 for path in run_folder.rglob("*.xplane.pb")] == [True]
    timelines = run_folder / "timelines"
    for name in ("measured", "simulated"):
        assert ElementTree.parse(timelines / f"{name}.svg").getroot().tag.endswith("svg")
        assert (timelines / f"{name}.svg").read_text() in (timelines / f"{name}.html").read_text()
        assert json.loads((timelines / f"{name}.perfetto.json").read_text())["traceEvents"]
    assert "submesh  measured" in (timelines / "timeline.txt").read_text()


def test_a_forecast_is_near_what_a_run_holds(run: Run, run_folder: Path, tmp_path: Path):
    """Refused before anything is compiled or allocated; parameters and moments are those that the run created."""
    result = run(*JOB, "--output", tmp_path, "--device-memory", "1MiB")
    assert result.code == 16, result.stderr
    assert "on each device (" in result.stderr.splitlines()[-1]
    assert "but a device has 1 MiB; use " in result.stderr
    assert "Compiling" not in (tmp_path / "maxtext.log").read_text()
    assert not (tmp_path / "placement.json").exists()
    bytes_of = json.loads((run_folder / "placement.json").read_text())["created"]["bytes"]
    for stage, need in enumerate(json.loads((tmp_path / "forecast.json").read_text())["forecast"]):
        assert need["parameters"] + need["optimizer"] == pytest.approx(bytes_of[str(2 * stage)], rel=0.02)
        assert need["activations"] > 0
        assert need["gradients"] > 0


@pytest.mark.telling("autoselected")
@pytest.mark.parametrize("attention", ["autoselected", "cudnn_flash_te", "dot_product"])
def test_a_forecast_needs_no_gpus(run: Run, tmp_path: Path, attention: str):
    """Of four GPUs in four processes, with the attention of tokamax or cuDNN; kept is no square of the sequence."""
    job = ("--nodes", 4, "--gpus", 1, *JOB[2:], "--sequence-length", 1024, "--attention", attention, "--fbmem", 70)
    job = (*job, "--forecast", "--device", "h100", "--output", tmp_path, "--json")
    result = run(*job, "base_num_kv_heads=2", "num_experts=1")
    assert result.code == 0, result.stderr
    table = result.json
    assert len(table["forecast"]) == 2
    assert 0 < table["bubble"] < 1
    assert table["limit"] == int(81_559 * 2**20 * round(70_000 / 81_559, 4))
    assert table["tokens_per_second"] > 0
    for stage in table["host"]:  # of four microbatches a forward and a backward kernel each
        assert stage["kernels"] > 8
        assert 0 < stage["transfers"] < stage["arrays"]
    assert ElementTree.parse(tmp_path / "forecast/forecast.svg").getroot().tag.endswith("svg")
    squares = 2 * 1024 * 1024 * 4  # heads on a device, pairs of tokens, float32
    largest = max(need["activations"] + need["workspace"] for need in table["forecast"])
    assert (largest > squares) == (attention == "dot_product")


GPUS = ("--nodes", 4, "--gpus", 1, *JOB[2:], "--attention", "cudnn_flash_te", "--forecast", "--compile")
DEVICES = ["h100", "b200"]


@pytest.mark.compile_gpu
@pytest.mark.telling("h100")
@pytest.mark.parametrize("device", DEVICES)
def test_stages_are_compiled_for_gpus_that_are_not_there(run: Run, tmp_path: Path, device: str):
    """With cuDNN's attention. XLA gives parameters, moments and gradients the bytes that the forecast gives them.

    MaxText's own programs have the same products, on as many devices for each copy of the model.
    """
    result = run(*GPUS, "--backend", "spmd", "--device", device, "--output", tmp_path, "--json")
    assert result.code == 0, result.stderr
    table = result.json
    stages, program, pipeline = (table["programs"][name] for name in ("multimesh", "program", "pipeline"))
    assert stages["flops"] == pytest.approx(program["flops"], rel=0.001)
    assert pipeline["flops"] >= stages["flops"]
    assert 0 < stages["peak"] < program["peak"]
    assert all(0 < step["bytes copied"] < step["bytes accessed"] for step in (stages, program, pipeline))
    assert table["compilation"]["kernels"] >= table["compilation"]["compiled"] > 0  # no two of these stages are alike
    assert any("cudnn" in name for calls in table["calls"] for name in calls)
    assert all(costs["flops"] > 0 for costs in table["costs"])
    assert all(
        sum(costs[kind] for kind in ("all-reduce", "all-gather", "reduce-scatter")) > 0 for costs in table["costs"]
    )
    for need, compiled in zip(table["forecast"], table["compiled"], strict=True):
        names = ("parameters", "optimizer", "batch")
        assert [need[name] for name in names] == [compiled[name] for name in names]
        assert compiled["total"] == sum(size for name, size in compiled.items() if name != "total")


@pytest.mark.full  # that program is compiled above too, beside a pipeline
@pytest.mark.compile_gpu
def test_one_program_is_compiled_without_a_pipeline(run: Run, tmp_path: Path):
    job = ("--nodes", 2, "--gpus", 1, "--tp", 2, *JOB[6:])
    result = run(*job, "--forecast", "--compile", "--device", "h100", "--output", tmp_path)
    assert result.code == 0, result.stderr
    assert "peak of a device" in result.stdout


@pytest.mark.full
@pytest.mark.compile_gpu
@pytest.mark.parametrize("device", DEVICES)
def test_a_device_with_a_byte_less_than_xla_assigns_is_refused(run: Run, tmp_path: Path, device: str):
    job = (*GPUS, "--device", device, "--output", tmp_path)
    result = run(*job, "--json")
    assert result.code == 0, result.stderr
    most = max(need["total"] for need in result.json["compiled"])
    refusal = run(*job, "--device-memory", most - 1)
    assert refusal.code == 16, refusal.stderr
    assert "but a device has" in refusal.stderr
    assert f"the same as XLA compiled it for {device}" in refusal.stdout
    assert "compiling kernels: " in refusal.stdout


@pytest.mark.full
def test_every_process_makes_the_same_plan_and_trains_nothing_for_it(run: Run, tmp_path: Path):
    """Under another hash seed, with scanned layers whose weight gradients are made apart."""
    plans = []
    for seed in "12":
        folder = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed}
        job = (*JOB, "--scan-layers", "--schedule", "zb-h1", "--output", folder)
        result = run(*job, "--dump", folder / "dump", "--dump-only", env=environment)
        assert (result.code, result.stdout) == (0, f"compiled; the plan is in {folder / 'dump'}\n"), result.stderr
        assert not (folder / "metrics.jsonl").exists()
        plans.append((folder / "dump/plan.txt").read_text())
    assert plans[0] == plans[1]


@pytest.mark.full
def test_parameters_gathered_once_a_step_save_most_of_the_bytes(run: Run, tmp_path: Path):
    """Of eight microbatches in two pieces a stage: a tenth of the gathered bytes, a fifth of the reduced ones."""
    job = ("--cpus", 4, "--fsdp", 2, *JOB[4:], "--num-layers", 4, "--interleave", 2, "--schedule", "looped-bfs")
    job = (*job, "--batch-size", 16, "--microbatch-size", 1)
    costs = []
    for flags in ((), ("--gather-once",)):
        folder = tmp_path / str(len(costs))
        result = run(*job, *flags, "--output", folder, "--dump", folder / "dump", "--dump-only")
        assert result.code == 0, result.stderr
        costs.append(json.loads((folder / "dump/costs.json").read_text()))
    gathered, reduced = (
        [sum(stage[kind] for stage in stages) for stages in costs] for kind in ("all-gather", "all-reduce")
    )
    assert gathered[1] / gathered[0] <= 0.1
    assert reduced[1] / reduced[0] <= 0.2
