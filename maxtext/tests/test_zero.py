"""``--zero 1``: the state of the optimizer is laid out over data parallelism, and training is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from killing import records

from multimesh_maxtext.command.cli import main
from multimesh_maxtext.command.options import read
from multimesh_maxtext.command.settle import settle
from multimesh_maxtext.command.sizes import planner_configuration

SMALL = (
    *("--num-layers", 2, "--model-dims", 64, "--num-heads", 4, "--sequence-length", 32, "dtype=float32"),
    *("--cpus", 4, "--dp", 2, "--pp", 2, "--batch-size", 8, "--microbatch-size", 2, "learning_rate_schedule_steps=8"),
)


def train(root: Path, output: Path, *words: Any) -> int:
    return main([str(word) for word in (*SMALL, "--output", output, *words)], root=root)


def held(output: Path) -> int:
    """Bytes of the fullest device after a step, but for batches and keys, which are small."""
    return max(json.loads((output / "placement.json").read_text())["stepped"]["bytes"].values())


@pytest.mark.longer
@pytest.mark.timeout(1800)
def test_moments_are_shared_out_and_steps_are_those_of_one_program(root: Path, tmp_path: Path):
    """With AdamW's two moments, two thirds of the bytes; a checkpoint of one kind is read by the other."""
    text = ("--text", root / "LICENSE")
    assert train(root, tmp_path / "plain", "--num-steps", 4, *text) in (0, 13)
    assert train(root, tmp_path / "zero", "--num-steps", 4, "--zero", 1, "--verify", *text) in (0, 13)
    assert held(tmp_path / "zero") < 0.75 * held(tmp_path / "plain")
    kept = ("--checkpoint", tmp_path / "ck")
    assert train(root, tmp_path / "moved", "--num-steps", 2, "--zero", 1, *kept, *text) in (0, 13)
    assert train(root, tmp_path / "moved", "--num-steps", 4, "--resume", *kept, *text) in (0, 13)
    losses = [[record["learning/loss"] for record in records(tmp_path / name)] for name in ("moved", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_planner_is_told(maxtext: Path):
    flags = "--gpus 1 --nodes 4 --dp 2 --pp 2 --batch-size 8"
    for given, sharded in (("--zero 1", "optimizer"), ("", "none")):
        job = settle(read([*flags.split(), *given.split()]), maxtext / "maxtext").job
        assert planner_configuration(job).sharded == sharded
