"""Real MaxText as a pipeline of MultiMesh, against the same MaxText as one program."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full  # test_parity.py and validate-cpu.sh hold for every change what these hold in detail

Run = Callable[..., Any]
GRID = ("--cpus", 8, "--dp", 2, "--tp", 2, "--pp", 2, "--batch-size", 16, "--microbatch-size", 2)
TINY = ("--model-dims", 64, "--mlp-dims", 64, "--sequence-length", 64, "--attention", "dot_product", "dtype=float32")
EXPERTS = ("num_experts=4", "base_moe_mlp_dim=64", "sparse_matmul=false")
COMPARED = ("learning/loss", "learning/raw_grad_norm", "learning/grad_norm", "learning/param_norm")


@dataclass(frozen=True)
class Pair:
    """A pipeline's run and the run of one program that it is compared with."""

    report: dict[str, Any]
    output: Path

    def records(self, folder: str = "") -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.output / folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def placement(self) -> dict[str, Any]:
        return json.loads((self.output / "placement.json").read_text())

    def difference(self, key: str) -> float:
        both = zip(self.records(), self.records("spmd"), strict=True)
        return max(abs(ours[key] - theirs[key]) / abs(theirs[key]) for ours, theirs in both)


def train_both(run: Run, output: Path, *arguments: Any) -> Pair:
    done = run(*TINY, "--verify", "--json", "--output", output, *arguments)
    assert done.code == 0, done.stderr
    return Pair(done.json, output)


@pytest.fixture(scope="module")
def pair(run: Run, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """20 steps of 1F1B on text, so that every step and every microbatch has tokens of its own."""
    output = tmp_path_factory.mktemp("pair")
    return train_both(run, output, *GRID, "--num-layers", 4, "--num-steps", 20, "--seed", 3, "--text", root / "LICENSE")


@pytest.mark.parametrize("key", COMPARED)
def test_twenty_steps_equal_those_of_one_program(pair: Pair, key: str):
    assert len(pair.records()) == len(pair.records("spmd")) == 20
    assert pair.difference(key) <= 1e-5


def test_the_two_runs_are_what_they_claim_to_be(pair: Pair):
    """MaxText's mesh has the devices of one stage in both; both see every microbatch; one of them knows no stages."""
    reference = (pair.output / "spmd/maxtext.log").read_text()
    pipeline = (pair.output / "maxtext.log").read_text()
    for log in (pipeline, reference):
        assert "Num_devices: 4," in log
        assert "Config param gradient_accumulation_steps: 4" in log
        assert "Config param global_batch_size_to_load: 16" in log
    assert {step["tokens"] for step in pair.report["steps"]} == {16 * 63.0}
    assert not (pair.output / "spmd/placement.json").exists()


@pytest.mark.parametrize("when", ["created", "stepped"])
def test_every_array_of_the_state_lies_on_its_stage_only(pair: Pair, when: str):
    arrays = pair.placement[when]["arrays"]
    stage_of = {"layers_0": 0, "layers_1": 0, "layers_2": 1, "layers_3": 1, "logits_dense": 1, "decoder_norm": 1}
    stage_of["token_embedder"] = 0
    stages = ([0, 1, 2, 3], [4, 5, 6, 7])
    for part, stage in stage_of.items():
        mine = {path: devices for path, devices in arrays.items() if f"'{part}'" in path}
        assert len([path for path in mine if "'mu'" in path]) == len([path for path in mine if "'nu'" in path]) > 0
        assert [path for path, devices in mine.items() if devices != stages[stage]] == []
    assert [path for path, devices in arrays.items() if devices not in stages] == []


def test_no_device_holds_the_whole_state(pair: Pair):
    """Two stages of like size: when training begins each device holds its part of one of them, and nothing else."""
    held = {int(device): size for device, size in pair.placement["created"]["bytes"].items()}
    whole = held[0] + held[4]  # a device of each stage: what every device would hold without stages
    assert set(held) == set(range(8))
    assert max(held.values()) <= 0.55 * whole


@pytest.mark.parametrize(
    "arguments",
    [
        (*GRID, "--num-layers", 2, "--schedule", "gpipe"),
        (*GRID, "--num-layers", 2, "logits_via_embedding=true"),
        (*GRID, "--num-layers", 2, "--remat", "full", "opt_type=sgd"),
        (*GRID, "--num-layers", 2, "gradient_clipping_threshold=0"),
        ("--cpus", 8, "--fsdp", 2, "--pp", 4, "--num-layers", 4, "--batch-size", 16),
        ("--cpus", 8, "--tp", 2, "--pp", 4, "--num-layers", 4, "--batch-size", 8, "--sequence-parallel"),
        ("--cpus", 2, "--pp", 2, "--num-layers", 2, "--batch-size", 1),
        (*GRID, "--num-layers", 2, "decoder_block=gpt3"),
        (*GRID, "--num-layers", 2, "decoder_block=mixtral", *EXPERTS),
    ],
    ids=["gpipe", "tied", "sgd", "unclipped", "fsdp-pp4", "sp-pp4", "one-microbatch", "gpt3", "mixtral"],
)
def test_other_pipelines_equal_one_program(run: Run, root: Path, tmp_path: Path, arguments: tuple[Any, ...]):
    found = train_both(run, tmp_path, "--num-steps", 5, *arguments, "--text", root / "LICENSE")
    for key in COMPARED:
        assert found.difference(key) <= 1e-5
