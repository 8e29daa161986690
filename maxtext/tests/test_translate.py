"""From flags to MaxText's configuration, environment and command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from test_flags import rows

from multimesh_maxtext.command.check_flags import check_job, find_job_notes
from multimesh_maxtext.command.command_line import argument, read
from multimesh_maxtext.command.dataset import read_texts, write_corpus
from multimesh_maxtext.command.environment import find_flag_notes
from multimesh_maxtext.command.flags import FLAGS
from multimesh_maxtext.command.job import END_OF_DOCUMENT, Job, Paths
from multimesh_maxtext.command.translate import launch, per_device
from multimesh_maxtext.errors import FileError, FlagError

Check = Callable[[Sequence[str]], Job]


def variables(
    job: Check, paths: Paths, argv: str, inherited: Mapping[str, str] | None = None, memory: int | None = None
):
    return launch(job(shlex.split(argv)), paths, inherited=inherited or {}, gpu_memory=memory).environment


# A batch of 1024 with dp 8 and microbatches of 4 is the source document's example; one of 4 is legal on 8 devices.
# Quantization cuts a microbatch by the devices of a stage in a process, not by all of the process. Of stages MaxText
# sees one, and accumulates what the pipeline will run.
SETTINGS = """
--dp 8 --batch-size 1024 --microbatch-size 4 | gradient_accumulation_steps: 32, per_device_batch_size: 4.0
--tp 8 --num-heads 8 --batch-size 4 --microbatch-size 2 | gradient_accumulation_steps: 2, per_device_batch_size: 0.25
--tp 8 --num-heads 8 --batch-size 4 --microbatch-size 2 | ici_tensor_parallelism: 8
--backend spmd --dp 2 --tp 2 SIZES --interleave 2 | ici_pipeline_parallelism: 2, num_pipeline_microbatches: 4
--backend spmd --dp 2 --tp 2 SIZES --interleave 2 | num_pipeline_repeats: 2, num_layers_per_pipeline_stage: 2
--backend spmd --dp 2 --tp 2 SIZES --interleave 2 | gradient_accumulation_steps: 1, per_device_batch_size: 2.0
--backend spmd --dp 2 --tp 2 SIZES --interleave 2 | scan_layers: true
--dp 2 --tp 2 SIZES | ici_pipeline_parallelism: 1, ici_data_parallelism: 2, ici_tensor_parallelism: 2
--dp 2 --tp 2 SIZES | num_pipeline_microbatches: null, gradient_accumulation_steps: 4, per_device_batch_size: 1.0
--dp 2 --tp 2 SIZES | scan_layers: false
--dp 2 --cp 2 --pp 2 FP8 | quantization_local_shard_count: 4, ici_context_parallelism: 2
--dp 2 --pp 2 --nodes 4 --cpus 1 FP8 | quantization_local_shard_count: 1
--tp 4 --sequence-parallel | ici_tensor_parallelism: 1, ici_tensor_sequence_parallelism: 4
--fsdp 2 --dp 2 | ici_fsdp_parallelism: 2, ici_data_parallelism: 2, gradient_accumulation_steps: 2
--seed 7 | init_weights_seed: 7, data_shuffle_seed: 7
--remat full --attention dot_product | remat_policy: full, attention: dot_product, hardware: cpu
--gpus 2 --tp 2 | hardware: gpu
--model-dims 128 | base_mlp_dim: 512
--model-dims 128 --mlp-dims 64 | base_mlp_dim: 64
--remat minimal_flash | remat_policy: minimal_with_context
--num-heads 8 --model-dims 128 | base_num_query_heads: 8, base_num_kv_heads: 8, head_dim: 16
--num-heads 8 base_num_kv_heads=2 | base_num_query_heads: 8, base_num_kv_heads: 2, head_dim: 32
head_dim=24 vocab_size=512 | base_num_query_heads: 4, head_dim: 24, vocab_size: 512
--num-heads 3 head_dim=24 | base_num_query_heads: 3, head_dim: 24
--model-name llama3-8b base_num_kv_heads=4 head_dim=64 | base_num_kv_heads: 4, head_dim: 64
--model-name llama3-8b | model_name: llama3-8b, override_model_config: true
--num-steps 9 --profile | steps: 9, profiler: xplane, profiler_steps: 5
--num-steps 2 --profile | profiler_steps: 1, skip_first_n_steps_for_profiler: 1
--checkpoint ck checkpoint_period=7 | enable_checkpointing: true, checkpoint_period: 7
--checkpoint ck | max_num_checkpoints_to_keep: 5, checkpoint_period: 100
--checkpoint ck max_num_checkpoints_to_keep=2 | max_num_checkpoints_to_keep: 2
eval_interval=5 | eval_interval: 5, eval_steps: 4
--no-scan-layers --use-iota-embed | scan_layers: false, use_iota_embed: true
--attention-type local_sliding | attention_type: local_sliding
--use-tfds-dataset --dataset-path /d --dataset-name c4 --tokenizer-path /t | dataset_type: tfds, dataset_path: /d
--use-tfds-dataset --dataset-path /d --dataset-name c4 --tokenizer-path /t | dataset_name: c4, tokenizer_path: /t
"""
WORDS = {
    "SIZES": "--pp 2 --num-layers 8 --batch-size 16 --microbatch-size 2",
    "FP8": "quantization=fp8_full use_qwix_quantization=true",
}


@pytest.mark.parametrize(("argv", "expected"), rows(SETTINGS))
def test_configuration(job: Check, paths: Paths, argv: str, expected: str):
    """Settings of KEY=VALUE come as words; MaxText makes numbers of them."""
    words = " ".join(WORDS.get(word, word) for word in argv.split())
    pairs = launch(job(words.split()), paths, inherited={}, gpu_memory=None).configuration.items()
    configuration = {key: yaml.safe_load(value) if isinstance(value, str) and value else value for key, value in pairs}
    settings = yaml.safe_load(f"{{{expected}}}")
    assert {key: configuration.get(key) for key in settings} == settings


@given(rows=st.integers(1, 10_000), devices=st.integers(1, 4096))
def test_maxtext_gets_back_the_rows_that_we_meant(rows: int, devices: int):
    assert int(devices * per_device(rows, devices)) == rows


def test_a_named_model_keeps_its_sizes_unless_flags_change_them(job: Check, paths: Paths):
    base = job(["--model-name", "llama3-8b"]).model
    assert (base.layers, base.embedding, base.query_heads, base.kv_heads) == (32, 4096, 32, 8)
    assert base.settings == {}
    assert job(["--model-name", "llama3-8b", "--num-layers", "4"]).model.settings == {"base_num_decoder_layers": 4}


def test_a_configuration_file_replaces_the_small_model(job: Check, paths: Paths, tmp_path: Path):
    file = tmp_path / "mine.yml"
    file.write_text("base_config: base.yml\nbase_num_decoder_layers: 6\n")
    start = launch(
        job(["--backend", "spmd", "--maxtext-config", str(file), "--pp", "3"]), paths, inherited={}, gpu_memory=None
    )
    assert start.command[5] == str(file)
    assert start.configuration["num_layers_per_pipeline_stage"] == 2
    assert "base_emb_dim" not in start.configuration


def test_key_value_arguments_come_last_and_replace_our_defaults(job: Check, paths: Paths):
    start = launch(job(["learning_rate=0.5", "dtype=float32"]), paths, inherited={}, gpu_memory=None)
    assert start.command[-2:] == ("learning_rate=0.5", "dtype=float32")
    assert [word for word in start.command if word.startswith("learning_rate=")] == ["learning_rate=0.5"]
    assert start.configuration["learning_rate"] == "0.5"


def test_cpu_environment(job: Check, paths: Paths):
    env = variables(
        job, paths, "--cpus 8 --dp 8", {"XLA_FLAGS": "--xla_mine=1", "PYTHONPATH": ":/mine:here", "HOME": "/h"}
    )
    assert env["XLA_FLAGS"] == "--xla_mine=1 --xla_force_host_platform_device_count=8"
    assert env["PYTHONPATH"].split(":")[:1] + env["PYTHONPATH"].split(":")[-1:] == [str(paths.maxtext), "/mine"]
    assert (env["NPROC"], env["OPENBLAS_NUM_THREADS"], env["JAX_PLATFORMS"]) == ("64", "1", "cpu")
    assert "HOME" not in env


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.xla])
def test_compiler_flags_reach_xla_on_gpus_only(job: Check, paths: Paths, name: str):
    flag = FLAGS[name]
    words, value = (f"{flag.option} 5", "5") if flag.value else (flag.option, "true")
    for devices, present in (("--gpus 1", True), ("--cpus 1", False)):
        xla_flags = variables(job, paths, f"{devices} {words}")["XLA_FLAGS"].split()
        assert [f"{xla}={value}" in xla_flags for xla in flag.xla] == [present] * len(flag.xla)


def test_compiler_flags_for_gpus_are_on_unless_told_otherwise(job: Check, paths: Paths):
    xla_flags = variables(job, paths, "--gpus 1")["XLA_FLAGS"].split()
    assert "--xla_gpu_enable_while_loop_double_buffering=true" in xla_flags
    assert "--xla_gpu_all_gather_combine_threshold_bytes=4294967296" in xla_flags
    assert "windowed_einsum" not in " ".join(xla_flags)
    env = {"XLA_FLAGS": "--xla_gpu_all_reduce_combine_threshold_bytes=7 --xla_gpu_enable_nccl_comm_splitting=false"}
    xla_flags = variables(job, paths, "--gpus 1 --no-xla-loop-buffering", env)["XLA_FLAGS"].split()
    assert "--xla_gpu_enable_while_loop_double_buffering=false" in xla_flags
    assert [flag for flag in xla_flags if "all_reduce_combine" in flag or "comm_splitting" in flag] == env[
        "XLA_FLAGS"
    ].split()
    # What the command line says comes after it, so it wins.
    xla_flags = variables(job, paths, "--gpus 1 --xla-ar-threshold 9", env)["XLA_FLAGS"].split()
    assert [flag[-2:] for flag in xla_flags if "all_reduce_combine" in flag] == ["=7", "=9"]


def test_collectives_of_loops_are_pipelined_in_kernels_of_stages_alone(paths: Paths, job: Check):
    """One program with gradient accumulation would compute 87.8e12 operations in place of 52.7e12."""
    pipelined, one = (variables(job, paths, flags)["XLA_FLAGS"] for flags in ("--gpus 2 --pp 2", "--gpus 2 --dp 2"))
    assert "--xla_gpu_enable_pipelined_all_reduce=true" in pipelined.split()
    assert "pipelined" not in one
    (note,) = find_flag_notes(read(["--gpus", "2", "--dp", "2", "--xla-pipelining"]).flags, gpu_memory=None)
    assert note.startswith("--xla-pipelining: one program")


def test_framebuffer_memory_becomes_a_fraction(job: Check, paths: Paths):
    assert variables(job, paths, "--gpus 1 --fbmem 40000", memory=80_000)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert variables(job, paths, "--gpus 1 --fbmem 90000", memory=80_000)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "1.0"
    assert variables(job, paths, "--gpus 1 --fbmem 77", memory=81_559)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9441"
    assert find_flag_notes(read(["--gpus", "1", "--fbmem", "77"]).flags, gpu_memory=81_559) == [
        "--fbmem 77: JAX takes 0.9441 of each GPU's 81559 MiB"
    ]
    for value in ("2000", "0", "3"):
        with pytest.raises(
            FlagError, match=rf"--fbmem {value} is 0\.\d+ of .* less than 0.05; it counts GB below 1000"
        ):
            variables(job, paths, f"--gpus 1 --fbmem {value}", memory=80_000)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in variables(job, paths, "--gpus 1 --fbmem 90000")


def test_dumps_and_logging(job: Check, paths: Paths, tmp_path: Path):
    folder = tmp_path / "with space"
    env = variables(job, paths, f"--dump '{folder}' --debug debug")
    assert f'--xla_dump_to="{folder}" --xla_dump_hlo_as_text=true' in env["XLA_FLAGS"]
    assert env["JAX_LOGGING_LEVEL"] == "DEBUG"
    assert "xla_dump" not in variables(job, paths, "--pp 2 --dump x")["XLA_FLAGS"]  # a pipeline writes its plan
    assert variables(job, paths, "--gpus 1 --debug-nccl")["NCCL_DEBUG"] == "INFO"


@given(value=st.one_of(st.booleans(), st.integers(), st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))))
@example(value="=")  # YAML has a type of its own for it
def test_arguments_survive_the_reader_of_maxtext(value: Any):
    text = argument("key", value).removeprefix("key=")
    assert (yaml.safe_load(text) if text else "") == value


def test_dry_run_prints_what_would_be_started(run: Callable[..., Any]):
    argv = ("--dry-run", "--cpus", "2", "--dp", "2", "--output", "/tmp/some where")
    plan = run(*argv, "--json").json
    assert plan["configuration"]["base_output_directory"] == "/tmp/some where"
    assert "base_output_directory=/tmp/some where" in plan["command"]
    lines = run(*argv).stdout.splitlines()
    assert shlex.join(plan["command"]) in lines
    for key, value in plan["environment"].items():
        assert f"export {key}={shlex.quote(value)}" in lines
    assert not Path("/tmp/some where").exists()


def test_a_corpus_is_what_the_index_says_a_token_a_byte(tmp_path: Path):
    index = json.loads(write_corpus(["é", "abcdefg"], tmp_path / "text", sequence_length=3).read_text())
    (file,) = index["files"]
    assert (index["total_tokens"], index["total_instances"]) == (11, 3)
    tokens = np.fromfile(file["path"], index["dtype"]).tolist()
    assert tokens == [0xC3, 0xA9, END_OF_DOCUMENT, *b"abcdefg", END_OF_DOCUMENT]


def test_text_that_cannot_be_used_is_named(tmp_path: Path, job: Check):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(FlagError, match=r"latin.txt: not UTF-8 at byte 3; convert it"):
        read_texts([latin])
    with pytest.raises(FileError, match=r"--text .*nowhere: No such file or directory; name readable files"):
        read_texts([tmp_path / "nowhere"])
    with pytest.raises(FlagError, match=r"holds 4 tokens, less than one sequence of 128; use --sequence-length 2"):
        write_corpus(["abc"], tmp_path, sequence_length=128)
    short = tmp_path / "short.txt"
    short.write_text("x")
    with pytest.raises(FlagError, match=r"--text needs 257 tokens .*, the model has 256; use vocab_size=384"):
        job(["vocab_size=256", "--text", str(short)])


@pytest.mark.parametrize(
    ("argv", "kernel", "note"),
    [
        ("--gpus 8", False, "(megablox) is for TPUs. XLA multiplies all tokens by each of the 2 experts"),
        ("--gpus 8 megablox=true", True, "which Pallas interprets on GPUs, tile by tile; leave out megablox=true"),
        ("--gpus 8 use_ring_of_experts=true", True, "leave out megablox=true and use_ring_of_experts=true"),
        ("--gpus 8 use_tokamax_gmm=true", True, ""),
        ("--gpus 8 sparse_matmul=false", True, ""),
        ("--cpus 8 use_ring_of_experts=true", True, ""),
    ],
)
def test_experts_on_gpus_are_not_multiplied_by_a_kernel_for_tpus(maxtext: Path, argv: str, kernel: bool, note: str):
    """Pallas would interpret it: a loop of small products on the GPU."""
    parsed = read(["--model-name", "mixtral-8x7b", "--ep", "4", "--pp", "2", *argv.split()])
    job = check_job(parsed, maxtext / "maxtext")
    assert job.model.resolved["megablox"] == kernel
    assert [note in line for line in find_job_notes(parsed, job) if "megablox" in line] == [True] * bool(note)
