"""A pipeline over several processes of this machine: ``run.py --spawn``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multimesh_maxtext.cli import main

Run = Callable[..., Any]
STEP = (
    "--num-steps=3",
    "--batch-size=8",
    "--microbatch-size=2",
    "--sequence-length=32",
    "--model-dims=32",
    "--num-heads=2",
)


def losses(metrics: Path) -> list[tuple[float, float]]:
    records = map(json.loads, metrics.read_text().splitlines())
    return [(r["learning/loss"], r["learning/raw_grad_norm"]) for r in records if "learning/loss" in r]


@pytest.mark.multiprocess
def test_the_code_of_the_process_that_fails_is_that_of_all(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    argv = ["--spawn", "--nodes", "2", "--cpus", "1", "--pp", "3", "--output", str(tmp_path)]
    assert main(argv, root=root) == 2
    assert "error: " in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.multiprocess
def test_validate_mpi(run: Run, tmp_path: Path):
    done = run("--output", tmp_path, script="validate-mpi.sh")
    assert done.code == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ok: 3 steps, loss ")
    assert last.endswith("; the same without the pipeline")


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("pp", "nodes"), [(2, 2), (4, 4), (2, 4)])
def test_losses_are_those_of_one_process(root: Path, tmp_path: Path, pp: int, nodes: int):
    """Also where a stage spans processes (pp 2 on 4 processes, dp 2). One of them writes what all have measured."""
    job = ["--backend", "multimesh", "--pp", str(pp), "--dp", str(nodes // pp), *STEP]
    assert main([*job, "--cpus", str(nodes), "--output", str(tmp_path / "one")], root=root) == 0
    spawned = ["--spawn", "--nodes", str(nodes), "--cpus", "1", "--profile", "--output", str(tmp_path / "several")]
    assert main([*job, *spawned], root=root) == 0
    want = losses(tmp_path / "one/metrics.jsonl")
    assert len(want) == 3
    for folder in ("several", "several/process-1"):
        for got, expected in zip(losses(tmp_path / folder / "metrics.jsonl"), want, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)
    assert [path.parent for path in tmp_path.rglob("timelines")] == [tmp_path / "several"]
    assert f"of {nodes} processes" in (tmp_path / "several/timelines/measured.svg").read_text()
