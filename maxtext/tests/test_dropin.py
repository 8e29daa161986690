"""What the original's launcher takes, this one takes; settings that MaxText would refuse never reach it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import original
import pytest
import yaml
from pydantic import TypeAdapter

from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.command.options import parse, parser
from multimesh_maxtext.command.settings import find_idle_settings, find_types, find_wrong_settings
from multimesh_maxtext.errors import UnsupportedError, UsageError


@pytest.mark.telling("validate-cpu", "validate-cpu of its last release", "gpt3-175b-64gpus")
@pytest.mark.parametrize("script", original.SCRIPTS)
def test_scripts_of_the_original_pass_a_dry_run(run: Callable[..., Any], script: str):
    line = original.SCRIPTS[script].split()
    done = run("--dry-run", "--json", *line)
    assert done.code == 0, done.stderr
    settings, flags = done.json["configuration"], done.json["environment"].get("XLA_FLAGS", "")
    given = dict(pairwise(line))
    assert settings["base_num_decoder_layers"] == int(given["--num-layers"])
    rows = int(given["--microbatch-size"]) * int(given["--dp"])
    assert settings["gradient_accumulation_steps"] * rows == int(given["--batch-size"])
    if "--model-dims" in given:
        assert settings["base_mlp_dim"] == 4 * int(given["--model-dims"])
    if given["--gpus"] != "0":
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
    with pytest.raises(UsageError, match=r"mixtral-smal: MaxText has no such model; near it are mixtral-small"):
        job(["--model-name", "mixtral-smal"])


def test_flags_of_the_original_keep_their_form(job: Callable[[Sequence[str]], Job]):
    for action in parser()._actions:
        for flag in action.option_strings:
            if flag in original.DEFAULTS and original.DEFAULTS[flag] in ("on", "off"):
                assert parse([f"--no-{flag[2:]}"]).has(action.dest) is False
    argv = "--backend legate --collective-matmul 512 --hlo x.hlo --compile-topology-num-slices 2"
    o = parse(argv.split())
    assert (o.backend, o.collective_matmul, str(o.hlo), o.compile_topology_num_slices) == ("multimesh", 512, "x.hlo", 2)
    assert job(["--remat", "minimal_flash"]).options.remat == "minimal_flash"


@pytest.mark.longer
def test_a_module_of_hlo_is_compiled_instead_of_training(run: Callable[..., Any], tmp_path: Path):
    file = tmp_path / "sum.hlo"
    file.write_text(
        "HloModule sum, entry_computation_layout={(f32[8]{0})->f32[8]{0}}\n\nENTRY main {\n"
        "  x = f32[8]{0} parameter(0), sharding={devices=[2]<=[2]}\n  ROOT y = f32[8]{0} add(x, x)\n}\n"
    )
    done = run("--hlo", file, "--cpus", 2, "--dp", 2, "--json")
    assert done.code == 0, done.stderr
    assert done.json["bytes"]["argument"] == 16  # half of it on each device
    file.write_text("HloModule nothing")
    done = run("--hlo", file)
    assert (done.code, done.stdout, done.stderr.count("\n")) == (10, "", 1)
    assert "sum.hlo: " in done.stderr


@pytest.mark.parametrize("document", original.MADE, ids=lambda document: document.stem)
def test_the_tables_of_defaults_are_those_of_the_code(document: Path):
    assert document.read_text(encoding="utf-8") == original.renewed(document), "run maxtext/tests/original.py --write"


def test_kernels_that_need_transformer_engine_have_a_substitute(job: Callable[[Sequence[str]], Job]):
    argv = ["--gpus", "1", "--attention", "cudnn_flash_te"]
    assert job(argv).options.attention == "cudnn_flash_jax"
    with pytest.raises(UnsupportedError, match=r"attends to all earlier tokens, and this model has windows; use"):
        job([*argv, "--model-name", "gemma2-2b"])
    with pytest.raises(UnsupportedError, match=r"attends across documents that are packed .*; add packing=false"):
        job([*argv, "--use-tfds-dataset", "--dataset-path", "d", "--dataset-name", "c"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learning_rat=1", r"no setting learning_rat; did you mean learning_rate"),
        ("zzqx=1", r"no setting zzqx; its settings are in .*base.yml"),
        ("dtype=float33", r"no such dtype; it is one of bfloat16, float32, float16"),
        ("decoder_block=llama", r"no such decoder_block; near it are llama"),
        ("dtype=", r"no such dtype; it is one of bfloat16"),
        ("dtype=none", r"no such dtype; it is one of bfloat16"),
        ("attention_sink=maybe", r"attention_sink=maybe: MaxText refuses it: input should be a valid boolean"),
        ("attention_sink=yes", None),
        ("vocab_size=abc", r"refuses it: input should be a valid integer, unable to parse"),
        ("num_experts=", r"input should be a valid integer"),
        ("base_emb_dim=4.5", r"input should be a valid integer, got a number with a fractional part"),
        ("base_emb_dim=4.0", None),
        ("learning_rate=[", r"the value is no YAML"),
        ("learning_rate=3e-4", None),
        ("learning_rate=fast", r"input should be a valid number"),
        ("steps=-3", r"input should be greater than or equal to -1"),
        ("run_name=5", r"input should be a valid string"),
        ("run_name=", None),
        ("run_name=2026-11-23", None),
        ("run_name=2026-13-45", None),
        ("learning_rate=1e2.", r"input should be a valid number"),
        ("steps=1e3", None),
        ("run_name=1e3", r"input should be a valid string"),
        ("train_data_columns=text", None),
        ("constant_bound_config=", None),
        ("dump_hlo_local_dir=here", None),
        ("opt_type=sgd", None),
        ("dpo_beta=0.1", r"no setting dpo_beta"),
        ("profiler=", r"no such profiler; it is one of xplane, nsys"),
        ("quantization=", None),
        ("remat_policy_for_vit=minimal", None),
    ],
)
def test_settings_are_checked_as_maxtext_does(maxtext: Path, setting: str, message: str | None):
    found = [str(error) for _, error in find_wrong_settings([setting], maxtext / "maxtext")]
    assert len(found) == (message is not None)
    assert all(re.search(message or "", line) for line in found)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("monitor_goodput=true", "monitor_goodput=True would do nothing here: it is for Google Cloud"),
        ("report_heartbeat_metric_for_gcp_monitoring=true", "see --metrics-file and --metrics-hook; leave it out"),
        ("jax_distributed_initialization_timeout=900", "run.py starts the processes; use --start-timeout"),
        ("elastic_enabled=true", "it is for Pathways; see --max-restarts and --fallback"),
        ("monitor_goodput=false", None),
        ("log_period=10", None),
    ],
)
def test_settings_that_would_do_nothing_are_refused(setting: str, message: str | None):
    found = [str(error) for error in find_idle_settings([setting])]
    assert len(found) == (message is not None)
    assert all(str(message) in line for line in found)


def test_the_files_of_maxtext_pass_the_check_of_settings(maxtext: Path):
    package = maxtext / "maxtext"
    for file in (package / "configs/base.yml", *(package / "configs/models").glob("*.yml")):
        loaded = yaml.safe_load(file.read_text())
        settings = [f"{key}={json.dumps(value)}" for key, value in loaded.items()]
        assert [str(error) for _, error in find_wrong_settings(settings, package)] == []


_SCHEMAS = """
import json
from typing import Annotated
from pydantic import TypeAdapter
from maxtext.configs.types import MaxTextConfig

fields = MaxTextConfig.model_fields.items()
print(json.dumps({name: TypeAdapter(Annotated[field.annotation, field]).json_schema() for name, field in fields}))
"""


@pytest.mark.longer  # imports MaxText
def test_the_types_of_settings_are_those_of_maxtext(maxtext: Path):
    env = {**os.environ, "PYTHONPATH": str(maxtext)}
    done = subprocess.run([sys.executable, "-c", _SCHEMAS], capture_output=True, text=True, env=env, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = find_types(maxtext / "maxtext")
    unknown = set()
    for name, schema in theirs.items():
        try:
            found = TypeAdapter(ours[name]()).json_schema()
        except NameError:
            unknown.add(name)
        else:
            assert found == schema, name
    assert ours.keys() == theirs.keys()
    assert unknown == {"dpo", "lora", "dump_hlo_local_dir", "dump_jaxpr_local_dir"}


def test_a_configuration_without_sizes_is_answered_in_one_line(job: Callable[[Sequence[str]], Job], tmp_path: Path):
    file = tmp_path / "mine.yml"
    file.write_text("base_emb_dim: 64\n")
    with pytest.raises(UsageError, match=r"mine.yml: it has no base_num_decoder_layers, .*vocab_size; begin it with"):
        job(["--maxtext-config", str(file)])
