"""One run of two processes, and what it tells beside its log: a textfile of metrics, records for a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = "--spawn --nodes 2 --cpus 1 --pp 2 --num-layers 2 --model-dims 32 --mlp-dims 32 --num-heads 2 --num-steps 4"
JOB += " --sequence-length 32 --batch-size 8 --microbatch-size 2 --attention dot_product eval_interval=2 --json"
HOOK = """
import json, os
def log(record):
    with open(os.environ["RECORDS"], "a") as file:
        print(json.dumps([os.getpid(), record]), file=file)
    if record["step"] == 1:
        raise ValueError("not this one")
"""


@pytest.mark.longer
@pytest.mark.multiprocess
def test_a_collector_reads_the_newest_step_and_a_hook_gets_every_record_once(run: Callable[..., Any], tmp_path: Path):
    (tmp_path / "mine.py").write_text(HOOK)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RECORDS": str(tmp_path / "records")}
    flags = ("--metrics-hook", "mine:log", "--prometheus", tmp_path / "run.prom", "--output", tmp_path / "out")
    result = run(*JOB.split(), *flags, env=environment)
    assert result.code in (0, 13), result.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    metrics = dict(line.split() for line in (tmp_path / "run.prom").read_text().splitlines() if line[0] != "#")
    losses = [row["learning/loss"] for row in rows if "learning/loss" in row]
    assert (len(losses), float(metrics["multimesh_step"]), float(metrics["multimesh_steps_wanted"])) == (4, 3, 4)
    assert float(metrics["multimesh_loss"]) == pytest.approx(losses[-1])
    assert float(metrics["multimesh_step_seconds"]) > 0
    assert result.stderr.count("--metrics-hook mine:log: ValueError at step 1: not this one") == 1
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert len({process for process, _ in records}) == 1
    assert [record for _, record in records] == [row for row in rows if {"learning/loss", "eval/total_loss"} & {*row}]
    assert any("eval/total_loss" in record for _, record in records)
