"""Flags, and the one line that answers those that are wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import grid
import pytest

from multimesh import schedules
from multimesh_maxtext.command import check_flags, environment
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.environment import find_gpus
from multimesh_maxtext.command.job import Job, find_maxtext
from multimesh_maxtext.errors import FlagError, LauncherError, MissingPartError, UnsupportedError


def rows(table: str) -> list[tuple[str, str]]:
    """Command lines, and a part of the message that answers each."""
    return [(argv.strip(), part.strip()) for argv, part in (row.split(" | ") for row in table.strip().splitlines())]


WRONG = """
--seed -1 | --seed: '-1' is not a whole number of at least 0
--overwrite | --overwrite needs --output; add it
--check --export e --checkpoint c | --check and --export: that trains nothing; leave out one of them
--overwrite --output o --resume --checkpoint c | --overwrite and --resume:
--pp 2 --verify --checkpoint c | --verify and --checkpoint:
--pp 2 --schedule zb-h1 --interleave 2 | zb-h1 has one stage a submesh
--pp 2 --schedule zb-v | --schedule zb-v is for stages of several pieces; add --interleave 2
--pp 2 --schedule zb-v --interleave 3 | zb-v has two stages a submesh, but the loop has 3
--pp 2 --schedule interleaved | for stages of several pieces; add --interleave 2 or use 1f1b
--pp 2 --schedule custom | needs a table; add --custom-schedule-path FILE
--pp 2 --schedule custom --custom-schedule-path none.json | none.json: No such file
--pp 2 --custom-schedule-path t.json | is for --schedule custom; add that or leave it out
checkpoint_period=3 | checkpoint_period= needs --checkpoint; add it
--tokenizer-path | --tokenizer-path: expected one argument
--device h100 | --device needs --forecast or --suggest; add it
--pp 2 --gpus 2 --compile --device h100 | --compile needs --forecast; add it
--pp 2 --cpus 2 --compile --forecast --device h100 | --compile needs --gpus and a --device
--pp 2 --gpus 2 --compile --forecast --device tpu-v5p | h100, h200, b200, a100
--pp 2 --gpus 2 --compile --forecast | --compile needs --gpus and a --device that can be compiled for
--attention cudnn_flash_te | use --attention dot_product
--text README.md --dataset-name x | dataset_name= is for data of dataset_type=, not for olmo_grain
--dataset-name c4 | dataset_name= is for data of dataset_type=, not for synthetic
model_name=llama3-8b | model_name= is decided by the flags (model_name=); use --model-name
--microbatchsize 4 | --microbatchsize: no such flag; did you mean --microbatch-size?
--frobnicate | --frobnicate: no such flag; maxtext/run.py --help lists every flag
--dp 0 | --dp: '0' is not a whole number of at least 1
--pp | --pp: expected one argument
--text | --text: expected at least one argument
--spawn=3 | --spawn: ignored explicit argument '3'
--zero 3 | --zero: invalid choice: '3' (choose from 0, 1, 2)
--schedule zbv | ; did you mean zb-v?
learning_rate | 'learning_rate' is neither a flag nor a KEY=VALUE
--cpus 8 --dp 3 | 3 x 1 x 1 x 1 x 1 x 1 = 3, but there are 8 devices; use --dp 8
--cpus 6 --tp 4 | but there are 6 devices; use --cpus 4
--gpus 6 --tp 4 | but there are 6 devices; use --gpus 4
--spawn --nodes 3 --cpus 1 --pp 2 | but there are 3 devices; use --nodes 2 --cpus 1
--nodes 4 --gpus 8 --pp 6 --tp 3 | but there are 32 devices; use --nodes 9 --gpus 2
--dp 8 --batch-size 12 | = 8 x 1 x 1 x 1 = 8; use --batch-size 16
--dp 2 --fsdp 2 --microbatch-size 3 --batch-size 8 | 2 x 2 x 1 x 3 = 12; use --batch-size 12
--pp 2 --dp 2 --batch-size 5 | = 2 x 1 x 1 x 1 = 2; use --batch-size 4
--backend spmd --pp 2 --batch-size 3 | a multiple of pp = 2 microbatches, not 3; use --batch-size 4
--backend spmd --pp 2 --num-layers 3 | pp x interleave = 2 x 1 = 2 pieces; use --num-layers 4
--pp 4 --num-layers 2 | pp x interleave = 4 x 1 = 4 pieces; use --num-layers 4
--pp 2 --interleave 3 --num-layers 4 | = 2 x 3 = 6 pieces; use --num-layers 6
--pp 2 --num-layers 3 --partition 2,2 | 2,2 has 2 pieces, 4 layers in all, but there are 3 and
--pp 2 --num-layers 4 --partition 2,1,1 | 2,1,1 has 3 pieces, 4 layers in all, but
--pp 2 --partition 2,x | --partition: '2,x' is neither auto nor numbers of layers; write e.g. 3,3,2
--verify | --verify is about pipeline stages; add --pp
--tp 3 | --tp 3 does not divide the attention heads (4); change --tp or --num-heads
--fsdp 3 | --fsdp 3 does not divide the model dims (256); change --fsdp or --model-dims
--fsdp 2 --cp 3 --sequence-length 96 | --fsdp x --cp 6 does not divide the model dims (256)
--cp 2 --sequence-length 30 | 2 x --cp 4 does not divide the sequence (30); change 2 x --cp or --sequence-length
--ep 2 | --ep 2 does not divide the experts (1); change --ep or num_experts=
--tp 4 --model-name gemma4-26b | global layers (2); change --tp or global_num_kv_heads=
--tp 4 vocab_size=254 | --tp 4 does not divide the vocabulary (254); change --tp or vocab_size=
--tp 2 --sequence-parallel --sequence-length 127 | does not divide the sequence (127)
base_num_kv_heads=3 | base_num_kv_heads 3 does not divide the attention heads (4)
--dp 2 --tp 2 --pp 2 quantization=int8 | 2, by 4 devices; use --microbatch-size 2 or use_qwix_quantization=true
--num-heads 3 | 3 heads do not divide 256 model dims; change --num-heads or --model-dims
--model-name olmo3-7b --num-layers 6 --scan-layers | or --num-layers or --no-scan-layers
vocab_size=0 | vocab_size=0: it is a size, a whole number of at least 1
head_dim=x | head_dim=x: it is a size
--pp 2 --zero 1 | --zero needs --dp; add it
steps=3 | steps= is decided by the flags (steps=10); use --num-steps, or leave it out
--checkpoint ck run_name=mine | run_name= is decided by the flags
hardware=gpu | hardware= is decided by the flags (hardware=cpu); use --gpus or --cpus, or leave it out
dataset_type=hf --text README.md | (dataset_type=olmo_grain); use --text, or leave it out
--backend spmd --pp 2 --no-scan-layers | remove --no-scan-layers or --pp
--backend cuda | --backend cuda needs GPUs; add --gpus N
--backend cpu --gpus 2 | --backend cpu trains on CPU devices; remove --gpus 2
--pp 2 --device-memory 1e9 | --device-memory: '1e9' is no size; write e.g. 80GiB or 24GB
--text nowhere.txt | --text nowhere.txt: no such file
--metrics-file . | --metrics-file .: a folder; name a file
--model-name lama3-8b | MaxText has no such model; near it are llama3-8b
--maxtext-config nowhere.yml | --maxtext-config nowhere.yml: cannot be read
"""


@pytest.mark.parametrize(("argv", "part"), rows(WRONG))
def test_a_wrong_command_line_is_answered_with_a_remedy(job: Callable[[Sequence[str]], Job], argv: str, part: str):
    with pytest.raises(LauncherError) as error:
        job(argv.split())
    assert part in str(error.value)
    assert error.value.exit_code == 2


def test_everything_wrong_is_said_at_once_but_not_what_may_follow_from_it(job: Callable[[Sequence[str]], Job]):
    def lines(argv: str) -> list[str]:
        with pytest.raises(LauncherError) as error:
            job(argv.split())
        return [line.split(" ")[0] for line in str(error.value).splitlines()]

    assert lines("--cpus 8 --dp two --microbatchsize 4 -tp 2 lr learning_rat=3 steps=3 --interleave 2") == [
        *("--dp:", "--microbatchsize:", "-tp:", "'lr'", "--interleave", "learning_rat=3:", "steps=")
    ]
    # Nothing is known of --pp, so nothing is said of what depends on it.
    assert lines("--ppp 2 --schedule gpipe --verify --interleave 2") == ["--ppp:"]
    assert lines("--pp --schedule gpipe --batch-size 7 --dp 2 --cpus 2") == ["--pp:", "a"]


def test_processes_read_equal_shares_of_real_data(job: Callable[[Sequence[str]], Job], root: Path):
    grid = ["--tp", "4", "--num-heads", "4", "--microbatch-size", "2", "--batch-size", "6"]
    data = ["dataset_type=grain", "grain_train_files=x", "--tokenizer-path", "p"]
    assert job(["--cpus", "4", *grid, *data]).microbatches == 3  # one process has all rows
    four = ("--nodes", "4", "--cpus", "1", *grid)
    assert job([*four, "--text", str(root / "LICENSE")]).microbatches == 3  # each process has all rows
    with pytest.raises(FlagError, match=r"4 processes read data in equal shares, and do not divide a batch of 6; use"):
        job([*four, *data])
    assert job([*four, *data, "--batch-size", "8"]).microbatches == 4
    uneven = ("--nodes", "3", "--cpus", "2", "--pp", "2", "--dp", "3", "--batch-size", "6", "--microbatch-size", "1")
    with pytest.raises(FlagError, match=r"do not divide the 3 devices of a stage; use --nodes 1"):
        job([*uneven, *data])


UNSUPPORTED = """
--backend spmd --schedule 1f1b | has no use for --schedule: it runs MaxText's own circular pipeline; leave it out
--nodes 2 --gpus 1 --verify | --verify is for one process so far on GPUs
--backend spmd --forecast | --backend spmd has no use for --forecast: no plan, but with --compile; leave it out
--backend spmd --device-memory 80GiB | has no use for --device-memory: it has no plan to forecast from; leave
dataset_type=grain grain_use_elastic_iterator=true | run.py decides which processes read, and ends all where
quantization=int4 | add use_qwix_quantization=true
quantization=int8 --model-name mixtral-8x7b | add use_qwix_quantization=true
quantization=intmp use_qwix_quantization=true quant_cfg_path=x | use quantization=fp8_full
quantization=fp8 | use quantization=fp8_full
quantization=te_mxfp8 | use quantization=fp8_full
enable_diloco=true | use enable_diloco=False or --backend spmd
decoder_block=deepseek4 | its layers read the tokens
--model-name gemma4-e2b | =gemma4_small yet: its last layers read keys and values
--model-name gemma4-31b use_multimodal=true | the vision encoder has no stage
--scan-layers --model-name gemma3-4b | decoder_block=gemma3 are not alike
--scan-layers inhomogeneous_layer_cycle_interval=2 | use --no-scan-layers
--model-name mixtral-8x7b --ep 2 | add use_ring_of_experts=true
--model-name mixtral-8x7b --ep 2 use_ring_of_experts=true megablox=false | leave out megablox=false
--gpus 4 --cp 2 --attention cudnn_flash_jax | use --attention cudnn_flash_te or dot_product
mtp_num_layers=1 | mtp_num_layers=1 yet
use_dpo=true | use_dpo=True yet
use_grpo=true | use_grpo=True yet
enable_multi_tier_checkpointing=true | enable_multi_tier_checkpointing=True yet
enable_emergency_checkpoint=true | enable_emergency_checkpoint=True yet
lora={"enable_lora":true} | leave lora= out
"""


@pytest.mark.parametrize(("argv", "part"), rows(UNSUPPORTED))
def test_what_comes_later_is_refused(job: Callable[[Sequence[str]], Job], argv: str, part: str):
    with pytest.raises(UnsupportedError) as error:
        job(["--pp", "2", *argv.split()])
    assert part in str(error.value)
    assert (error.value.exit_code, str(error.value).count("\n")) == (3, 0)


@pytest.mark.parametrize(
    ("argv", "kind", "message"),
    [
        ("--checkpoint gs://b/ck", UnsupportedError, r"--checkpoint gs://b/ck: this must be on a file system; mount"),
        ("--output s3://b/out", UnsupportedError, r"--output s3://b/out: this must be on a file system"),
        ("load_parameters_path=gs://b/ck/0/items", MissingPartError, r"pip install gcsfs google-cloud-storage$"),
        ("load_parameters_path=s3://b/ck", MissingPartError, r"s3://...: a package is missing; pip install s3fs$"),
    ],
)
def test_a_path_in_a_bucket_is_refused_before_a_run(
    job: Callable[[Sequence[str]], Job], monkeypatch: pytest.MonkeyPatch, argv: str, kind: type, message: str
):
    monkeypatch.setattr(check_flags, "has_package", lambda name: False)
    with pytest.raises(kind, match=message):
        job(argv.split())
    monkeypatch.setattr(check_flags, "has_package", lambda name: True)
    if kind is MissingPartError:
        assert job(argv.split())


@pytest.mark.parametrize("argv", ["", "--backend spmd", "--pp 2", "--backend spmd --model-name gemma4-31b"])
def test_all_forms_draw_the_same_parameters_from_a_seed(job: Callable[[Sequence[str]], Job], argv: str):
    """A scan draws others. MaxText's own pipeline can only scan."""
    assert not job(argv.split()).scans_layers
    assert job([*argv.split(), "--scan-layers"]).scans_layers
    assert job(["--backend", "spmd", "--pp", "2"]).scans_layers


@pytest.mark.parametrize(
    "argv",
    [
        *(f"--schedule {name}" for name in schedules.names() if schedules.get(name).usual == 1),
        *("--schedule auto", "--schedule auto --interleave 2"),
        *(f"--schedule {name} --interleave 2" for name in schedules.names() if schedules.get(name).chunks != 1),
        *("--num-layers 3", "--num-layers 7 --interleave 2", "--num-layers 3 --partition 1,2"),
        "logits_via_embedding=true",
        "--batch-size 3",
        "--scan-layers --interleave 2",
        "dropout_rate=0.1",
        "--model-name llama3-8b opt_type=muon",
        "--model-name gpt3-6b",
        "--model-name mixtral-8x7b",
        "--model-name mixtral-8x7b --ep 2 sparse_matmul=false",
        *(f"quantization={kind} use_qwix_quantization=true" for kind in check_flags.QWIX),
        *(f"quantization={kind}" for kind in check_flags.AQT),
        "--tp 2 --microbatch-size 2 quantization=int8",
        "--tp 2 quantization=int8 use_qwix_quantization=true",
        *grid.UNLIKE.values(),
        *grid.NEWEST,
    ],
)
def test_what_can_be_placed_is_accepted(job: Callable[[Sequence[str]], Job], argv: str):
    assert job(["--pp", "2", *argv.split()]).flags.staged


def test_a_table_of_ones_own_is_accepted_where_it_runs_every_cell(job: Callable[[Sequence[str]], Job], tmp_path: Path):
    file = tmp_path / "table.json"
    file.write_text('[["F0", "F0", "B0", "B0"], ["F1", "B1", "F1", "B1"]]')
    argv = ["--pp", "2", "--batch-size", "2", "--schedule", "custom", "--custom-schedule-path", str(file)]
    assert job(argv).microbatches == 2
    for table, message in (
        ('[["F0", "F0", "B0", "B0"], ["F1", "B1", "F1"]]', r"B1 of microbatch 1 is missing; it belongs in the row of"),
        ('[["F0", "B0", "F0", "B0"], ["F1", "F1", "B1", "B1"]]', r"deadlock: .* waits for"),
        ('[["F0", "F1"], []]', r"stage 1 runs on submesh 1; move it there"),
        ('{"F0": 1}', r"'F'|not a cell|expected a list"),
        ("[[", r"not JSON"),
    ):
        file.write_text(table)
        with pytest.raises(FlagError, match=message) as error:
            job(argv)
        assert str(file) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "visible", "message"),
    [
        ("--gpus 2", None, r"--gpus 2, but no GPU can be seen here; check nvidia-smi, or use --cpus"),
        ("--gpus 2", [80_000], r"--gpus 2, but 1 GPUs can be seen here"),
        ("--gpus 2 --nodes 2 --spawn", [80_000] * 3, r"--gpus 2 for each of 2 processes, but 3 GPUs can be seen here"),
        ("--gpus 2", [80_000] * 2, r"--gpus 2: JAX has no CUDA plugin here; ./bootstrap.sh --group cuda12"),
    ],
)
def test_what_the_machine_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, argv: str, visible: list[int] | None, message: str
):
    monkeypatch.setattr(environment, "visible_gpu_memory", lambda: visible)
    monkeypatch.setattr(environment, "has_package", lambda name: False)
    with pytest.raises(MissingPartError, match=message) as error:
        find_gpus(read(argv.split()).flags)
    assert error.value.exit_code == 4


def test_missing_sources_name_the_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "maxtext").mkdir()  # the folder of scripts, not the trainer
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingPartError, match=r"MaxText is not here .*; run ./bootstrap.sh --group run"):
        find_maxtext(tmp_path)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ("--dp 3 --cpus 8", 2),
        ("--pp 2 --schedule custom", 2),
        ("--pp 2 enable_diloco=true", 3),
        ("--pp 2 --dry-run", 0),
    ],
)
def test_jax_is_not_imported(maxtext: Path, root: Path, argv: str, code: int):
    program = (
        "import sys; from multimesh_maxtext.command.cli import main; from pathlib import Path;"
        f"code = main(sys.argv[1:], root=Path({str(root)!r}));"
        "loaded = {'jax', 'jaxlib', 'flax'} & sys.modules.keys(); sys.exit(f'imported {loaded}' if loaded else code)"
    )
    source = f"{root / 'maxtext/src'}:{root / 'multimesh/src'}"
    line = [sys.executable, "-c", program, *argv.split()]
    process = subprocess.run(line, capture_output=True, text=True, env={"PYTHONPATH": source}, check=False)
    assert (process.returncode, process.stderr.count("\n")) == (code, 1 if code else 0), process.stderr
