"""What the original's launcher takes, this one takes; settings that MaxText would refuse never reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import original
import pytest
import yaml

from multimesh_maxtext.command.check_flags import find_wrong_settings, setting_names
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.job import Job
from multimesh_maxtext.errors import FlagError, UnsupportedError


@pytest.mark.telling("validate-cpu", "validate-cpu of its last release", "gpt3-175b-64gpus")
@pytest.mark.parametrize("script", original.SCRIPTS)
def test_scripts_of_the_original_pass_a_dry_run(run: Callable[..., Any], script: str):
    line = original.SCRIPTS[script].split()
    result = run("--dry-run", "--json", *line)
    assert result.code == 0, result.stderr
    settings, flags = result.json["configuration"], result.json["environment"].get("XLA_FLAGS", "")
    values = dict(pairwise(line))
    assert settings["base_num_decoder_layers"] == int(values["--num-layers"])
    rows = int(values["--microbatch-size"]) * int(values["--dp"])
    assert settings["gradient_accumulation_steps"] * rows == int(values["--batch-size"])
    if "--model-dims" in values:
        assert settings["base_mlp_dim"] == 4 * int(values["--model-dims"])
    if values["--gpus"] != "0":
        assert "--xla_gpu_reduce_scatter_combine_threshold_bytes=51200" in flags.split()
        assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags.split()


def test_models_of_the_original_have_its_sizes(job: Callable[[Sequence[str]], Job]):
    small = job(["--model-name", "mixtral-small"]).model
    assert (small.name, small.layers, small.embedding, small.experts) == ("mixtral-8x7b", 8, 128, 4)
    assert (small.query_heads, small.kv_heads, small.resolved["head_dim"], small.vocabulary) == (16, 8, 32, 256)
    assert (small.mlp, small.settings["base_moe_mlp_dim"], small.resolved["num_experts_per_tok"]) == (512, 512, 2)
    wide = job(["--model-name", "mixtral-8x7b", "--model-dims", "256"]).model
    assert (wide.mlp, wide.settings["base_moe_mlp_dim"]) == (1024, 1024)
    assert "base_moe_mlp_dim" not in job(["--model-name", "deepseek2-16b", "--mlp-dims", "64"]).model.settings
    assert job(["--model-name", "gpt3-24layers"]).model.layers == 24
    with pytest.raises(FlagError, match=r"mixtral-smal: MaxText has no such model; near it are mixtral-small"):
        job(["--model-name", "mixtral-smal"])


def test_flags_of_the_original_keep_their_form(job: Callable[[Sequence[str]], Job]):
    for flag in original.FLAGS:
        switch = [flag, f"--no-{flag[2:]}"] if original.DEFAULTS.get(flag) in ("on", "off") else [flag]
        for name in switch:
            value = {"--schedule": "gpipe", "--attention": "flash", "--remat": "full", "--backend": "cpu"}
            value |= {"--network": "ucx", "--debug": "info", "--attention-type": "chunk"}
            errors = read([name, value.get(name, "1")]).wrong  # a switch is followed by a word too many
            assert not any(name in str(error) for error in errors), name
    flags = read(["--backend", "legate", "--collective-matmul", "512", "--compile-topology-num-slices", "2"]).flags
    assert (flags.backend, flags.collective_matmul, flags.ignored) == (
        "multimesh", 512, ("--compile-topology-num-slices",)
    )  # fmt: skip
    assert job(["--remat", "minimal_flash"]).flags.remat == "minimal_flash"


@pytest.mark.parametrize("document", original.MADE, ids=lambda document: document.stem)
def test_the_tables_of_defaults_are_those_of_the_code(document: Path):
    assert document.read_text(encoding="utf-8") == original.renew(document), "run maxtext/tests/original.py --write"


def test_kernels_that_need_transformer_engine_have_a_substitute(job: Callable[[Sequence[str]], Job]):
    argv = ["--gpus", "1", "--attention", "cudnn_flash_te"]
    assert job(argv).flags.attention == "cudnn_flash_jax"
    with pytest.raises(UnsupportedError, match=r"attends to all earlier tokens, and this model has windows; use"):
        job([*argv, "--model-name", "gemma2-2b"])
    with pytest.raises(UnsupportedError, match=r"attends across documents that are packed .*; add packing=false"):
        job([*argv, "--use-tfds-dataset", "--dataset-path", "d", "--dataset-name", "c"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learning_rat=1", "no setting learning_rat; did you mean learning_rate"),
        ("zzqx=1", "no setting zzqx; its settings are in "),
        ("learning_rate=[", "the value is no YAML"),
        ("monitor_goodput=true", "monitor_goodput=True would do nothing here: it is for Google Cloud"),
        ("jax_distributed_initialization_timeout=900", "use MULTIMESH_START_TIMEOUT"),
        ("elastic_enabled=true", "leave it out"),
        ("monitor_goodput=false", None),
        ("learning_rate=3e-4", None),
        ("run_name=2026-13-45", None),
        ("dump_hlo_local_dir=here", None),
    ],
)
def test_settings_are_known_to_maxtext_and_do_something(maxtext: Path, setting: str, message: str | None):
    errors = [str(error) for error in find_wrong_settings(read([setting]).flags, maxtext / "maxtext")]
    assert len(errors) == (message is not None)
    assert all(str(message) in line for line in errors)


def test_the_files_of_maxtext_have_names_of_settings(maxtext: Path):
    package = maxtext / "maxtext"
    for file in (package / "configs/base.yml", *(package / "configs/models").glob("*.yml")):
        assert yaml.safe_load(file.read_text()).keys() <= setting_names(package)


@pytest.mark.longer  # starts MaxText
def test_values_that_maxtext_refuses_end_a_run_as_wrong_flags_do(run: Callable[..., Any], tmp_path: Path):
    result = run("dtype=float33", "attention_sink=maybe", "--output", tmp_path)
    assert result.code == 2
    assert "error: MaxText refuses these settings: " in result.stderr
    assert all(name in result.stderr for name in ("dtype", "attention_sink"))


def test_a_configuration_without_sizes_is_answered_in_one_line(job: Callable[[Sequence[str]], Job], tmp_path: Path):
    file = tmp_path / "mine.yml"
    file.write_text("base_emb_dim: 64\n")
    with pytest.raises(FlagError, match=r"it has no base_num_decoder_layers; begin it with"):
        job(["--maxtext-config", str(file)])
