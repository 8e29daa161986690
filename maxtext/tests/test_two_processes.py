"""One run of two processes, and what it tells beside its log: a textfile of metrics, records for a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.longer, pytest.mark.multiprocess]

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


@dataclass(frozen=True)
class Trained:
    """A folder with all files of a run, and how it ended."""

    folder: Path
    done: Any

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(HOOK)
    environment = {**os.environ, "PYTHONPATH": str(folder), "RECORDS": str(folder / "records")}
    told = ("--metrics-hook", "mine:log", "--prometheus", folder / "run.prom", "--output", folder / "out")
    done = run(*JOB.split(), *told, env=environment)
    assert done.code in (0, 13), done.stderr
    return Trained(folder, done)


def test_a_textfile_collector_reads_the_newest_step(trained: Trained):
    lines = (trained.folder / "run.prom").read_text().splitlines()
    scraped = dict(line.split() for line in lines if not line.startswith("#"))
    last = [row["learning/loss"] for row in trained.rows if "learning/loss" in row][-1]
    assert (float(scraped["multimesh_step"]), float(scraped["multimesh_steps_wanted"])) == (3, 4)
    assert float(scraped["multimesh_loss"]) == pytest.approx(last)
    assert float(scraped["multimesh_step_seconds"]) > 0


def test_a_hook_gets_every_record_once(trained: Trained):
    said = trained.done.stderr
    assert said.count("--metrics-hook mine:log: ValueError at step 1: not this one") == 1
    found = [json.loads(line) for line in (trained.folder / "records").read_text().splitlines()]
    assert len({process for process, _ in found}) == 1
    wanted = [row for row in trained.rows if "learning/loss" in row or "eval/total_loss" in row]
    assert [record for _, record in found] == wanted
    assert sum("learning/loss" in record for record in wanted) == 4
    assert any("eval/total_loss" in record for record in wanted)
