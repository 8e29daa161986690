"""``--zero``: state of the optimizer, and gradients, are laid out over data parallelism; training is the same."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
from killing import records
from parity import ROOT, run_cases, small_job

from multimesh_maxtext.command.check_flags import find_job_notes
from multimesh_maxtext.command.cli import main
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.job import find_maxtext
from multimesh_maxtext.command.steps import reference_job
from multimesh_maxtext.command.translate import configuration

SMALL = (
    *("--num-layers", 2, "--model-dims", 64, "--num-heads", 4, "--sequence-length", 32, "dtype=float32"),
    *("--cpus", 4, "--dp", 2, "--pp", 2, "--batch-size", 8, "--microbatch-size", 2, "learning_rate_schedule_steps=8"),
)


def train(root: Path, output: Path, *words: Any) -> int:
    return main([str(word) for word in (*SMALL, "--output", output, *words)], root=root)


def state_bytes(output: Path) -> int:
    """Bytes of the fullest device after a step, but for batches and keys, which are small."""
    return max(json.loads((output / "placement.json").read_text())["stepped"]["bytes"].values())


@pytest.mark.longer
@pytest.mark.timeout(1800)
def test_moments_are_shared_out_and_a_checkpoint_moves_between_kinds_and_grids(root: Path, tmp_path: Path):
    """AdamW's two moments are two thirds of the bytes. Steps stay the same, also without sharded moments."""
    text, resume = ("--text", root / "LICENSE"), ("--checkpoint", tmp_path / "ck", "--resume")
    assert train(root, tmp_path / "plain", "--num-steps", 4, *text) in (0, 13)
    assert train(root, tmp_path / "zero", "--num-steps", 2, "--zero", 1, *resume, *text) in (0, 13)
    assert state_bytes(tmp_path / "zero") < 0.75 * state_bytes(tmp_path / "plain")
    other = ("--cpus", 8, "--tp", 2, "--zero", 2)
    assert train(root, tmp_path / "zero", "--num-steps", 3, *other, *resume, *text) in (0, 13)
    assert train(root, tmp_path / "zero", "--num-steps", 4, *resume, *text) in (0, 13)
    actual, expected = ([record["learning/loss"] for record in records(tmp_path / name)] for name in ("zero", "plain"))
    assert actual == pytest.approx(expected, rel=1e-5)


def test_verify_compares_in_float32_with_a_program_whose_moments_are_not_sharded(job: Any, paths: Any):
    """It does so where nobody names a type; the type of ``dtype=`` stays."""
    flags = ["--cpus", "4", "--dp", "2", "--pp", "2", "--zero", "1", "--verify"]
    training = job(flags)
    config, reference = (configuration(program, paths) for program in (training, reference_job(training)))
    assert config["dtype"] == reference["dtype"] == "float32"
    assert "shard_optimizer_over_data" not in config | reference
    assert any("--verify trains in dtype=float32" in note for note in find_job_notes(read(flags), training))
    rounded = job([*flags, "dtype=bfloat16"])
    assert rounded.model.resolved["dtype"] == reference_job(rounded).model.resolved["dtype"] == "bfloat16"


@pytest.mark.longer
def test_a_step_reduces_each_gradient_once_and_gathers_each_parameter_once(tmp_path: Path):
    """After the loop, on each stage. As compiled for CPUs, where a reduce-scatter is an all-reduce and a slice."""
    sizes = "--cpus 4 --dp 2 --pp 2 --num-layers 2 --model-dims 64 --microbatch-size 2 dtype=float32"
    jobs = {str(zero): small_job([*sizes.split(), "--zero", str(zero)], 2, tmp_path) for zero in (0, 1, 2)}
    cases = {record["name"]: record for record in run_cases("compile", jobs, tmp_path / "kernels", find_maxtext(ROOT))}
    assert not any(record["error"] for record in cases.values())
    matrices = {tuple(shape) for shape in cases["0"]["parameters"]}
    times = {name: counts(record, matrices) for name, record in cases.items()}
    reduced, gathered = (collections.Counter(), collections.Counter())
    for (kind, shape), number in times["0"].items():
        {"all-reduce": reduced, "all-gather": gathered}[kind][shape] += number
    assert sum(reduced.values()) >= len(matrices)
    assert not gathered
    for name in ("1", "2"):
        assert {shape: times[name]["all-reduce", shape] for shape in reduced} == reduced
        assert {shape: times[name]["all-gather", shape] for shape in reduced} == reduced


def counts(record: dict[str, Any], matrices: set[tuple[int, ...]]) -> collections.Counter[tuple[str, tuple[int, ...]]]:
    """Return the number of arrays of a parameter's shape for each kind of collective in a step: none in the loop."""
    counter = collections.Counter[tuple[str, tuple[int, ...]]]()
    for kernel in record["kernels"]:
        for collective in kernel["collectives"]:
            shapes = [shape for shape in map(tuple, collective["shapes"]) if shape in matrices]
            assert not (shapes and kernel["looped"]), (kernel["name"], collective)
            counter.update((collective["kind"], shape) for shape in shapes)
    return counter
