"""Weights of Hugging Face form train on as a pipeline, with the logits and losses of transformers; and the way back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpora
import huggingface
import numpy as np
import pytest

SCRIPT = Path(huggingface.__file__)
LINE = "The lazy dog sleeps in the sun.\n"  # as long as a sequence, so that all sequences are alike


@pytest.fixture(scope="module")
def torch_python() -> str:
    """A Python with torch and transformers: MaxText needs no torch, and on Linux it brings CUDA's libraries."""
    versions = [f"python3.{minor}" for minor in range(14, 10, -1)]
    for python in [sys.executable, *filter(None, map(shutil.which, ["python3", *versions]))]:
        words = [python, "-c", "import torch, transformers"]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(
        "no Python here has torch; put one onto PATH: a venv with `pip install torch transformers sentencepiece`"
    )


def script(python: str, maxtext: Path | None, *words: object) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "PYTHONPATH": str(maxtext or "")}
    line = [python, *([] if maxtext is None else ["-P"]), str(SCRIPT), *map(str, words)]
    process = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", huggingface.NAMES)
def test_weights_of_hugging_face_train_on_as_a_pipeline(
    run: Callable[..., Any], maxtext: Path, torch_python: str, tmp_path: Path, kind: str
):
    """MaxText 0.2.5 converts experts for unrolled layers alone."""
    assert len(LINE) == huggingface.LENGTH
    source, converted = tmp_path / "hf", tmp_path / "converted"
    source.mkdir()
    script(torch_python, None, "make", kind, source)
    script(sys.executable, maxtext, "convert", kind, source, converted, "false")
    parameters = converted / "0/items"
    script(sys.executable, maxtext, "logits", kind, source, parameters, "false")
    logits = np.load(source / "logits.npz")["logits"]
    np.testing.assert_allclose(np.load(source / "maxtext.npy"), logits, atol=2e-6 * np.abs(logits).max())

    text, rows = tmp_path / "text", tmp_path / "rows.npy"
    text.write_text(LINE * 400)
    np.save(rows, np.frombuffer(LINE.encode(), np.uint8)[None])
    flags = ["--model-name", huggingface.NAMES[kind], *huggingface.flags(huggingface.settings(kind)), "dtype=float32"]
    flags += ["--cpus", "2", "--pp", "2", "--sequence-length", str(huggingface.LENGTH), "--batch-size", "4"]
    flags += ["--attention", "dot_product", "--num-steps", "2", f"load_parameters_path={parameters}"]
    result = run(*flags, "--json", "--text", text)
    assert result.code == 0, result.stderr
    expected = float(script(torch_python, None, "loss", source, rows).split()[-1])
    assert result.json["steps"][0]["loss"] == pytest.approx(expected, rel=1e-5)


TRAINING = (
    "--spawn --nodes 2 --cpus 1 --pp 2 --model-name llama3.1-8b --sequence-length 64 --batch-size 8 "
    "--microbatch-size 2 --attention dot_product --num-steps 60 checkpoint_period=5 --resume dtype=float32 "
    "learning_rate=1e-2 dataset_type=grain grain_file_type=parquet grain_worker_count=0 num_epoch=50 "
    "tokenizer_type=huggingface"
)


def steps_of(metrics: Path) -> list[int]:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [int(json.loads(line)["step"]) for line in lines if line.endswith("}")]


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(2400)
def test_text_becomes_a_model_that_transformers_samples_from(
    run: Callable[..., Any], maxtext: Path, root: Path, torch_python: str, tmp_path: Path
):
    """Real text, a tokenizer of its own, two processes, a kill, a resumption, Hugging Face form, samples."""
    pytest.importorskip("pyarrow", reason="./bootstrap.sh --group data installs it")
    texts = corpora.documents()
    tokenizer = corpora.huggingface(tmp_path, texts)
    files = corpora.parquet(tmp_path, texts)
    sizes = huggingface.flags(huggingface.settings("llama"))
    flags = [*TRAINING.split(), *sizes, f"grain_train_files={files}", "--tokenizer-path", str(tokenizer)]
    flags += ["--checkpoint", str(tmp_path / "ck"), "--output", str(tmp_path / "out")]

    line = [sys.executable, str(root / "maxtext/run.py"), *flags]
    first = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = tmp_path / "out/metrics.jsonl", time.monotonic() + 900
    while max(steps_of(metrics), default=0) < 12 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert 12 <= max(steps_of(metrics)) < 59

    result = run(*flags, "--json")
    assert result.code == 0, result.stderr
    assert steps_of(metrics) == [*range(60)]
    first_loss = result.json["steps"][0]["loss"]

    result = run("--checkpoint", tmp_path / "ck", "--export", tmp_path / "parameters", "--json")
    assert result.code == 0, result.stderr
    model = tmp_path / "hf-model"
    huggingface.to_huggingface(maxtext, tmp_path / "parameters/items", model, tokenizer)
    (tmp_path / "text").write_text(texts[0])
    sample = json.loads(script(torch_python, None, "sample", model, tokenizer, tmp_path / "text").splitlines()[-1])
    assert sample["loss"] < first_loss
    assert len(sample["text"]) > len("A pipeline") + 20
