"""A pipeline over several processes of this machine: ``run.py --spawn``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multimesh_maxtext.command.cli import main
from multimesh_maxtext.command.dataset import write_corpus
from multimesh_maxtext.errors import UnfitError

ROOT = Path(__file__).resolve().parents[2]
STEP = ("--num-steps=3", "--batch-size=8", "--microbatch-size=2", "--sequence-length=32", "--model-dims=32")
STEP += ("--num-heads=2",)


RESUMED = (*STEP[1:], "--num-layers=4", "checkpoint_period=2", "eval_interval=2", "eval_steps=2")
WHOLE = 6


def read_records(metrics: Path) -> list[dict[str, Any]]:
    """Losses and norms of all steps and evaluations."""
    keys = ("step", "learning/loss", "learning/raw_grad_norm", "learning/param_norm", "eval/avg_loss")
    return [{k: r[k] for k in keys if k in r} for r in map(json.loads, metrics.read_text().splitlines())]


def pick_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "learning/loss" in record]


def check_same(actual: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    for record, other in zip(actual, reference, strict=True):
        assert record == {key: pytest.approx(value, rel=1e-5) for key, value in other.items()}


def part(root: Path, folder: Path, *grid: object, steps: int = WHOLE) -> int:
    """Go on with a training on text in ``folder`` up to a step; its exit code."""
    place = ["--output", folder / "out", "--checkpoint", folder / "ck", "--resume"]
    data = ["dtype=float32", f"learning_rate_schedule_steps={WHOLE}", "--text", root / "LICENSE"]
    return main([str(word) for word in (*RESUMED, *grid, *place, "--num-steps", steps, *data)], root=root)


@pytest.fixture(scope="module")
def reference(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run in one process records that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert part(root, folder, "--pp", 2, "--cpus", 2) == 0
    return read_records(folder / "out/metrics.jsonl")


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_a_run_goes_on_in_another_number_of_processes(root: Path, tmp_path: Path, reference: list[dict[str, Any]]):
    """Two processes, then one with other stages, then four, of which two load text, then two with another layout."""
    spawn = ("--spawn", "--cpus", 1)
    assert part(root, tmp_path, *spawn, "--nodes", 2, "--pp", 2, steps=2) == 0
    assert part(root, tmp_path, "--cpus", 4, "--pp", 4, steps=3) == 0
    assert part(root, tmp_path, *spawn, "--nodes", 4, "--pp", 2, "--dp", 2, "--microbatch-size", 1, steps=5) == 0
    assert part(root, tmp_path, *spawn, "--nodes", 2, "--pp", 2, "--scan-layers") == 0
    actual = read_records(tmp_path / "out/metrics.jsonl")
    assert [record["step"] for record in pick_steps(actual)] == [*range(WHOLE)]
    check_same(actual, reference)


ORDERS = ("zb-v", "dualpipe-v", "kimi-k2", "interleaved-zb", "auto", "looped-bfs")


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(3600)
def test_a_run_of_two_processes_goes_on_in_another_order(root: Path, tmp_path: Path):
    """Two steps in each, from the checkpoint of the one before, with the losses of one program of MaxText alone."""
    steps, seldom = 2 * (len(ORDERS) + 1), ("eval_interval=1000",)
    spmd = ("--backend", "spmd", "--no-scan-layers", "--cpus", 1)
    assert part(root, tmp_path / "alone", *spmd, *seldom, steps=steps) == 0
    spawn = (*seldom, "--spawn", "--cpus", 1, "--nodes", 2, "--pp", 2)
    orders = [*(("--schedule", name, "--interleave", 2) for name in ORDERS), ("--partition", "1,3")]
    for number, order in enumerate(orders, 1):
        assert part(root, tmp_path, *spawn, *order, steps=2 * number) == 0
    actual, reference = (pick_steps(read_records(tmp_path / out / "metrics.jsonl")) for out in ("out", "alone/out"))
    assert [record["step"] for record in actual] == [*range(steps)]
    check_same(actual, reference)


BATCHES = """
import json, sys
from types import SimpleNamespace
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from maxtext.input_pipeline import olmo_data, olmo_data_grain
from multimesh_maxtext.trainer.data import read_text
file, rows, first = sys.argv[1], 4, 2
config = SimpleNamespace(
    olmo_index_path=file, olmo_path_remap_from="", olmo_path_remap_to="", olmo_apply_ngram_filter=False,
    max_target_length=8,
)
layout = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
ours = read_text(config, layout, 3, rows, first=first)
theirs = iter(olmo_data_grain.make_olmo_grain_data_loader(
    olmo_data.load_index(file), seed=3, batch_size=rows, shard_index=0, shard_count=1, apply_ngram_filter=False,
    initial_step=first * rows,
))
def plain(batch):
    return {name: np.asarray(x).tolist() for name, x in batch.items()}
found = [[plain(next(ours)), plain(next(theirs))] for _ in range(9)]
ours.reset()
print(json.dumps([found, plain(next(ours))]))
"""


@pytest.mark.longer
def test_our_batches_of_text_are_those_of_maxtext_in_one_process(maxtext: Path, tmp_path: Path):
    """Also after a resumption, and where the text is used up and starts over in another order."""
    index = write_corpus(["".join(chr(n) * 8 for n in range(18))[:-1]], tmp_path, sequence_length=8)
    line = [sys.executable, "-P", "-c", BATCHES, str(index)]
    search = ":".join(map(str, (maxtext, ROOT / "maxtext/src", ROOT / "multimesh/src")))
    process = subprocess.run(line, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    pairs, repeat = json.loads(process.stdout.splitlines()[-1])
    for actual, expected in pairs:
        assert actual == expected
    assert repeat == pairs[0][0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("fit", [False, pytest.param(True, marks=pytest.mark.full)])
def test_processes_train_if_they_pass_the_check(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, fit: bool
):
    words = ["--spawn", "--nodes=2", "--cpus=1", "--pp=2", "--num-layers=2", "--check", f"--output={tmp_path / 'out'}"]
    if not fit:
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_shard_autotuning=true")
    code = main([*words, *STEP, "--json"], root=root)
    out, err = capfd.readouterr()
    assert json.loads(out)["exit_code"] == code == (0 if fit else UnfitError.exit_code)
    assert err.count("ok: these processes can run pipelines") == fit
    assert ("FAILED: versions: XLA_FLAGS has --xla_gpu_shard_autotuning=true" in err) != fit
    assert err.count("error: --check: these processes cannot run pipelines; the table above says why") == (not fit)
    assert (tmp_path / "out/maxtext.log").exists() == fit
    assert not (fit and (tmp_path / "out/unfit-nodes").exists())


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("pp", "nodes"), [(2, 2), (4, 4), (2, 4)])
def test_losses_are_those_of_one_process(root: Path, tmp_path: Path, pp: int, nodes: int):
    """Also where a stage spans processes (pp 2 on 4 processes, dp 2). One writes the plan, and what all measured."""
    job = ["--backend", "multimesh", "--pp", str(pp), "--dp", str(nodes // pp), *STEP]
    assert main([*job, "--cpus", str(nodes), "--output", str(tmp_path / "one")], root=root) == 0
    spawn = ["--spawn", "--nodes", str(nodes), "--cpus", "1", "--profile", "--output", str(tmp_path / "several")]
    spawn += ["--dump", str(tmp_path / "dump")]
    assert main([*job, *spawn], root=root) == 0
    reference = pick_steps(read_records(tmp_path / "one/metrics.jsonl"))
    assert len(reference) == 3
    for folder in ("several", "several/process-1"):
        check_same(pick_steps(read_records(tmp_path / folder / "metrics.jsonl")), reference)
    assert {"plan.txt", "plan.json", "plan.svg", "plan.html", "plan.perfetto.json"} <= {*os.listdir(tmp_path / "dump")}
    assert [path.parent for path in tmp_path.rglob("timelines")] == [tmp_path / "several"]
    assert f"of {nodes} processes" in (tmp_path / "several/timelines/measured.svg").read_text()
