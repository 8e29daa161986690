"""Real MaxText, trained through the door that a user has: what succeeds, and every way to fail."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import children, records

pytestmark = pytest.mark.longer

Run = Callable[..., Any]
TINY = ("--num-layers", "1", "--model-dims", "64", "--mlp-dims", "64", "--sequence-length", "32")


@pytest.mark.full
def test_validate_cpu(run: Run, tmp_path: Path):
    metrics = tmp_path / "m/metrics.jsonl"
    result = run("--output", tmp_path / "out put", "--metrics-file", metrics, script="validate-cpu.sh")
    assert result.code == 0, result.stderr
    losses = [record["learning/loss"] for record in records(metrics.parent)]
    reference = [record["learning/loss"] for record in records(tmp_path / "out put/spmd")]
    assert len(losses) == len(reference) == 3
    assert losses[0] > losses[1] > losses[2]
    lines = result.stdout.splitlines()
    grid = "8 cpu devices: dp 2 tp 2 pp 2; 2 layers; batch 8 = 2 microbatches in the pipeline"
    assert re.fullmatch(r"Python 3\.\d+\.\d+ \(of .+: /.+\), jax \d.+", lines[0])
    assert lines[1] == f"MaxText, backend multimesh, {grid}"
    assert "MaxText, backend spmd, 4 cpu devices: dp 2 tp 2; 2 layers; batch 8 = 2 microbatches accumulated" in lines
    assert [line for line in lines if line.startswith(f"step 2 of 3  loss {losses[2]:.4f}")]
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["step", "loss"])
    rows = [line.split() for line in lines[header + 1 : header + 4]]
    assert [row[1] for row in rows] == [f"{loss:.6f}" for loss in losses]
    assert [row[2] for row in rows] == [f"{loss:.6f}" for loss in reference]
    largest = max(float(row[5]) for row in rows)
    assert largest <= 1e-5
    assert f"largest difference {largest:.1e}, at most 1e-05 allowed" in lines


@pytest.mark.full
def test_tensorboard_has_the_losses_of_the_metrics_file(run: Run, tmp_path: Path):
    from tensorboardX.proto import event_pb2

    pipeline = ("--pp", 2, "--cpus", 2, "--num-layers", 2, *TINY[2:], "--num-steps", 3)
    result = run(*pipeline, "--output", tmp_path, "enable_tensorboard=true")
    assert result.code == 0, result.stderr
    (file,) = (tmp_path / "train/tensorboard").rglob("events.out.tfevents.*")
    data, losses = file.read_bytes(), {}
    while data:  # records of TensorFlow: a length of 8 bytes, its checksum of 4, the record, its checksum
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        values = {value.tag: value.simple_value for value in event.summary.value}
        losses |= {event.step: values["learning/loss"]} if "learning/loss" in values else {}
        data = data[16 + size :]
    assert losses == {int(r["step"]): pytest.approx(r["learning/loss"]) for r in records(tmp_path)}


def test_text_on_tensor_parallel_devices(run: Run, root: Path, tmp_path: Path):
    """A batch of 4 on 8 tensor-parallel devices, sequence-parallel, on this repository's licence."""
    # A proxy that does not exist: whatever tried to download would fail.
    environment = {**os.environ, "https_proxy": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1"}
    arguments = ("--cpus", 8, "--tp", 8, "--num-heads", 8, "--batch-size", 4, "--microbatch-size", 2, "--num-steps", 6)
    place = ("--output", tmp_path, "--text", root / "LICENSE")
    result = run(*arguments, "--sequence-parallel", *TINY, "learning_rate=0.01", "--json", *place, env=environment)
    assert result.code == 0, result.stderr
    document = result.json
    assert (document["exit_code"], document["error"], len(document["steps"])) == (0, None, 6)
    # A few steps cannot learn the licence by heart, but they find that most bytes never occur in it.
    assert document["steps"][-1]["loss"] < math.log(256) < document["steps"][0]["loss"]
    # Every sequence of 32 has 31 next tokens to predict.
    assert {step["tokens"] for step in document["steps"]} == {4 * 31.0}
    index = json.loads((tmp_path / "text" / "index.json").read_text())
    assert index["total_tokens"] == (root / "LICENSE").stat().st_size + 1


@pytest.mark.full
def test_the_seed_decides_parameters_and_data(run: Run, root: Path, tmp_path: Path):
    def losses(seed: int) -> list[float]:
        place = ("--overwrite", "--output", tmp_path, "--text", root / "LICENSE")
        result = run("--seed", seed, "--num-steps", 2, *TINY, "--json", *place)
        return [step["loss"] for step in result.json["steps"]]

    first = losses(1)
    assert len(first) == 2
    assert first == losses(1)
    assert first[0] != losses(2)[0]


@pytest.mark.telling("raises", "nan")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("mlp_activations=[nonsense]",), 10, " after 0 of 4 steps; see "),
        (("learning_rate=1e38", "gradient_clipping_threshold=0"), 12, "is nan; lower learning_rate="),
        (("eval_interval=1", "eval_steps=1", "target_eval_loss=100"), 11, "after 1 of 4 steps"),
        (("learning_rate=0",), 13, "train longer with --num-steps or change learning_rate="),
    ],
    ids=["raises", "nan", "stops-early", "learns-nothing"],
)
def test_a_bad_trainer_fails_the_script(run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str):
    result = run("--num-steps", 4, *TINY, "--output", tmp_path, *arguments)
    assert result.code == code, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.telling("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process(root: Path, tmp_path: Path, maxtext: Path, number: signal.Signals):
    line = [sys.executable, str(root / "maxtext/run.py"), "--num-steps", "100000", *TINY, "--output", str(tmp_path)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("step 0 of "):
            break
    (trainer,) = children(process.pid)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 130
    state = "no checkpoint was written: --checkpoint DIR keeps the state"
    message = rf"error: {number.name} ended the run after \d+ of 100000 steps; {state}"
    assert re.fullmatch(message, errors.splitlines()[-1])
    assert not Path(f"/proc/{trainer}").exists()


NVIDIA_SMI = '#!/bin/sh\nfor gpu in 0 1 2 3; do [ "$1" = --list-gpus ] && echo "GPU $gpu: H" || echo 81559; done\n'


@pytest.mark.stand_in("an nvidia-smi of our own, or a PATH without one")
@pytest.mark.parametrize(("visible", "tp"), [(None, 4), ("0,2", 2), ("3", 1), ("", 0)])
def test_validate_gpu_uses_the_visible_gpus_and_refuses_without(run: Run, tmp_path: Path, visible: str | None, tp: int):
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}" if tp else "/usr/bin:/bin"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    result = run("--dry-run", "--json", script="validate-gpu.sh", env=environment)
    if not tp:
        refusal = "error: no GPU can be seen here (nvidia-smi lists none); use maxtext/validate-cpu.sh\n"
        assert (result.code, result.stdout, result.stderr) == (4, "", refusal)
        return
    assert result.code == 0, result.stderr
    settings = result.json["configuration"]
    assert settings["ici_tensor_parallelism"] * settings["ici_tensor_sequence_parallelism"] == tp
    assert (settings["hardware"], settings["steps"], settings["max_target_length"]) == ("gpu", 20, 256)
