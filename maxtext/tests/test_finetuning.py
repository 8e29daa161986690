"""Supervised fine-tuning as a pipeline: conversations whose prompts are masked, as MaxText has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpora
import pytest

pytest.importorskip("datasets", reason="./bootstrap.sh --group data installs it")

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
FLAGS = (
    "--cpus 2 --pp 2 --num-layers 2 --model-dims 32 --mlp-dims 32 --sequence-length 64 --attention dot_product "
    "--batch-size 4 --num-steps 4 vocab_size=320 dtype=float32 learning_rate=1e-2 tokenizer_type=huggingface "
    "dataset_type=hf hf_path=json use_sft=true packing=false train_data_columns=['messages']"
)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_only_answers_count_in_the_loss_of_a_pipeline(run: Callable[..., Any], tmp_path: Path):
    texts = corpora.documents()
    tokenizer = corpora.huggingface(tmp_path, texts)
    described = tokenizer / "tokenizer_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "chat_template": TEMPLATE}))
    lines = [
        {"messages": [{"role": "user", "content": ask[:8]}, {"role": "assistant", "content": answer[:24]}]}
        for ask, answer in zip(texts[::2], texts[1::2], strict=False)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    weights = {}
    for only in ("true", "false"):
        given = ("--tokenizer-path", tokenizer, f"hf_train_files={tmp_path / 'chat.jsonl'}", "--json", "--verify")
        output = tmp_path / only
        done = run(*FLAGS.split(), *given, f"sft_train_on_completion_only={only}", "--output", output)
        assert done.code == 0, done.stderr
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        weights[only] = [record["learning/total_weights"] for record in records]
    assert all(0 < answers < every for answers, every in zip(weights["true"], weights["false"], strict=True))
