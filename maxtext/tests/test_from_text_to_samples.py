"""The whole way: real text, a tokenizer of its own, two processes, a kill, a resumption, Hugging Face form, samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpora
import huggingface
import pytest
from test_huggingface import script, torch_python  # noqa: F401 - a fixture

pytest.importorskip("pyarrow", reason="./bootstrap.sh --group data installs it")

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
    run: Callable[..., Any],
    maxtext: Path,
    root: Path,
    torch_python: str,  # noqa: F811
    tmp_path: Path,
):
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
    before = steps_of(metrics)
    assert 12 <= max(before) < 59

    done = run(*flags, "--json")
    assert done.code == 0, done.stderr
    after = steps_of(metrics)
    assert after == list(range(60))
    losses = [step["loss"] for step in done.json["steps"]]
    resumed = 60 - len(losses)
    print(f"killed after step {max(before)}, resumed at step {resumed}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    done = run("--checkpoint", tmp_path / "ck", "--export", tmp_path / "parameters", "--json")
    assert done.code == 0, done.stderr
    model = tmp_path / "hf-model"
    huggingface.to_huggingface(maxtext, tmp_path / "parameters/items", model, tokenizer)
    (tmp_path / "text").write_text(texts[0])
    made = json.loads(script(torch_python, None, "sample", model, tokenizer, tmp_path / "text").splitlines()[-1])
    print(f"transformers: loss {made['loss']:.3f} on a text of the corpus; sample {made['text']!r}")
    assert made["loss"] < losses[0]
    assert len(made["text"]) > len("A pipeline") + 20
