"""Every model of MaxText is run as a pipeline, or refused in one line; the page says which."""

from __future__ import annotations

import json
from pathlib import Path

import model_table
import pytest

from multimesh_maxtext.command.cli import main
from multimesh_maxtext.errors import LossNotFallingError

RUN = (
    *("deepseek", "envy", "gemma", "gemma2", "gemma3", "gemma4", "gpt3", "gpt_oss", "llama2", "llama4"),
    *("mistral", "mixtral", "olmo3", "qwen2", "qwen3", "qwen3_5", "qwen3_custom_moe", "qwen3_moe"),
    "qwen3_next",
)
"""Decoder blocks of the models that a pipeline takes."""


def test_the_page_has_every_model_with_its_verdict(maxtext: Path):
    assert model_table.documented() == model_table.table(), "run maxtext/tests/model_table.py --write"
    verdicts = model_table.documented()
    assert all(name in verdicts for name in model_table.names(maxtext / "maxtext"))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", RUN)
def test_a_tiny_model_of_each_block_that_is_not_refused_trains(root: Path, maxtext: Path, tmp_path: Path, block: str):
    package = maxtext / "maxtext"
    name = model_table.group_all(package)[block, ""][0]
    flags = ["--num-steps", "2", "--batch-size", "4", "--sequence-length", "16", "--output", str(tmp_path)]
    assert main([*model_table.tiny(name, package), *flags], root=root) in (0, LossNotFallingError.exit_code)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records] == [0, 1]


def test_every_block_that_runs_is_trained(maxtext: Path):
    assert sorted(block for block, refusal in model_table.group_all(maxtext / "maxtext") if not refusal) == sorted(RUN)
