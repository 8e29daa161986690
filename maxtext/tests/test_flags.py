"""Flags, and the one line that answers those that are wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import grid
import original
import pytest

from multimesh import schedules
from multimesh_maxtext.command import buckets, checks
from multimesh_maxtext.command.checks import MULTIMESH_ONLY, Job, check_machine
from multimesh_maxtext.command.model import find_maxtext
from multimesh_maxtext.command.options import parse, parser
from multimesh_maxtext.command.translate import notes
from multimesh_maxtext.errors import (
    CheckpointError,
    DisagreementError,
    DoesNotFitError,
    LauncherError,
    LossNotFallingError,
    LossNotFiniteError,
    MissingPartError,
    ProcessLostError,
    Several,
    StoppedEarlyError,
    TrainerFailedError,
    UnsupportedError,
    UsageError,
)

OURS = [
    "--text",
    "--metrics-file",
    "--seed",
    "--spawn",
    "--max-restarts",
    "--fallback",
    "--show-grids",
    "--start-timeout",
    "--silence-timeout",
    "--compile-timeout",
    "--transfer-timeout",
    "--stall-timeout",
    "--forecast",
    "--suggest",
    "--budget",
    "--precision",
    "--picture",
    "--confirm",
    "--dry-run",
    "--json",
    "--device-memory",
    "--output",
    "--overwrite",
    "--checkpoint",
    "--checkpoint-every",
    "--resume",
    "--eval-every",
    "--eval-steps",
]


def test_every_flag_is_declared_with_help():
    helps = {flag: action.help for action in parser()._actions for flag in action.option_strings}
    assert [flag for flag in [*original.FLAGS, *OURS] if not helps.get(flag)] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--seed -1", r"--seed: '-1' is not a whole number of at least 0"),
        ("--overwrite", r"--overwrite needs --output; add it"),
        ("--check --hlo x", r"--check is for processes that train, --hlo does not; leave out one"),
        ("--overwrite --output o --resume --checkpoint c", r"--overwrite removes the run that --resume goes on with"),
        ("--pp 2 --only-fuse-loop-tasks --no-fuse-tasks", r"remove it or --no-fuse-tasks"),
        ("--hlo /none", r"--hlo /none: no such file; write its path"),
        ("--attention cudnn_flash_te", r"--attention cudnn_flash_te is a GPU kernel; on CPU"),
        ("--attention-type bananas", r"attention_type=bananas: MaxText has no such attention_type; it is one of"),
        ("--text README.md --dataset-name x", r"--dataset-name is for .* datasets; remove it: with --text every"),
        ("model_name=llama3-8b", r"follow from --model-name; use that"),
        ("opt_type=foo --cpus 2 --pp 2", r"opt_type=foo: MaxText has no such opt_type; it is one of [^;]*"),
        ("--microbatchsize 4", r"--microbatchsize: no such flag; did you mean --microbatch-size\?"),
        ("--frobnicate", r"--frobnicate: no such flag; .*--help lists every flag"),
        ("--pp two", r"--pp: 'two' is not a whole number of at least 1"),
        ("--dp 0", r"--dp: '0' is not a whole number of at least 1"),
        ("--schedule zbv", r"invalid choice: 'zbv' \(choose from .*\); did you mean zb-v\?"),
        ("--schedule 2f2b", r"--schedule: invalid choice: '2f2b' \(choose from .*1f1b"),
        ("learning_rate", r"'learning_rate' is neither a flag nor a KEY=VALUE"),
        (
            "--cpus 8 --dp 3",
            r"dp x fsdp x tp x cp x pp x ep = 3 x 1 x 1 x 1 x 1 x 1 = 3, but there are 8 devices; use --dp 8",
        ),
        ("--cpus 6 --tp 4", r"but there are 6 devices; use --cpus 4"),
        ("--gpus 6 --tp 4", r"but there are 6 devices; use --gpus 4"),
        ("--cpus 2 --pp 3", r"but there are 2 devices; use --cpus 3"),
        ("--spawn --nodes 3 --cpus 1 --pp 2", r"but there are 3 devices; use --nodes 2 --cpus 1"),
        ("--nodes 4 --gpus 8 --pp 6 --tp 3", r"but there are 32 devices; use --nodes 9 --gpus 2"),
        ("--dp 8 --batch-size 12", r"a batch of 12 is no multiple of .* = 8 x 1 x 1 x 1 = 8; use --batch-size 16"),
        ("--dp 2 --fsdp 2 --microbatch-size 3 --batch-size 8", r"2 x 2 x 1 x 3 = 12; use --batch-size 12"),
        ("--backend spmd --pp 2 --batch-size 3", r"needs a multiple of pp = 2 microbatches, not 3; use --batch-size 4"),
        (
            "--backend spmd --pp 2 --num-layers 3",
            r"3 layers cannot be dealt to pp x interleave = 2 x 1 = 2 pieces; use --num-layers 4",
        ),
        (
            "--pp 4 --num-layers 2",
            r"2 layers cannot be dealt to pp x interleave = 4 x 1 = 4 pieces; use --num-layers 4",
        ),
        (
            "--pp 2 --num-layers 3 --partition 2,2",
            r"2,2 has 2 pieces, 4 layers in all, but there are 3 and .*",
        ),
        ("--pp 2 --num-layers 4 --partition 2,1,1", r"2,1,1 has 3 pieces, 4 layers in all, but .* = 2 pieces"),
        ("--pp 2 --partition 2,x", r"--partition: '2,x' is neither auto nor numbers of layers; write e.g. 3,3,2"),
        ("--partition auto", r"--partition is about pipeline stages; add --pp"),
        ("--pp 2 --dp 2 --batch-size 5", r"a batch of 5 is no multiple of .* = 2 x 1 x 1 x 1 = 2; use --batch-size 4"),
        ("--verify", r"--verify is about pipeline stages; add --pp"),
        ("--schedule gpipe", r"--schedule is about pipeline stages; add --pp"),
        ("--pp 2 --interleave 3 --num-layers 4", r"= 2 x 3 = 6 pieces; use --num-layers 6"),
        ("--tp 3", r"--tp 3 does not divide the attention heads \(4\); change --tp or --num-heads"),
        ("--fsdp 3", r"--fsdp 3 does not divide the model dims \(256\); change --fsdp or --model-dims"),
        (
            "--cp 2 --sequence-length 30",
            r"--cp 2 cuts a sequence into 4 parts, and 30 tokens .*; use --sequence-length 32",
        ),
        (
            "--fsdp 2 --cp 3 --sequence-length 96",
            r"fsdp x cp = 6 does not divide the model dims \(256\); change --cp or",
        ),
        ("--pp 2 --zero 1", r"--zero 1 lays moments out over data parallelism; add --dp"),
        ("--pp 2 --gather-once", r"--gather-once is about parameters that --fsdp shards; add --fsdp"),
        ("--fsdp 2 --gather-once", r"--gather-once is about pipeline stages; add --pp"),
        ("--ep 2", r"--ep 2 does not divide the experts \(1\); change --ep or num_experts="),
        ("--tp 4 --model-name gemma4-26b", r"global layers \(2\); change --tp or global_num_kv_heads="),
        (
            "--model-name olmo3-7b --num-layers 6 --scan-layers",
            r"scan over 4 of them; use --num-layers 8 or --no-scan-layers",
        ),
        ("vocab_size=0", r"vocab_size=0: it is a size, a whole number of at least 1"),
        ("--pp 2 base_num_kv_heads=-4", r"base_num_kv_heads=-4: it is a size"),
        ("head_dim=0", r"head_dim=0: it is a size"),
        ("--tp 4 vocab_size=254", r"--tp 4 does not divide the vocabulary \(254\); change --tp or --vocab-size"),
        (
            "--tp 2 --sequence-parallel --sequence-length 127",
            r"does not divide the sequence \(127\); .*--sequence-length",
        ),
        (
            "--num-kv-heads 3",
            r"3 key/value heads do not divide 4 attention heads; change --num-kv-heads or --num-heads",
        ),
        ("--head-dim 32 head_dim=16", r"head_dim= is decided by the flags .*; use --head-dim, or leave it out"),
        ("--vocab-size 512 vocab_size=256", r"vocab_size= is decided by the flags .*; use --vocab-size"),
        ("--num-kv-heads 2 base_num_kv_heads=1", r"base_num_kv_heads= is decided by the flags .*; use --num-kv-heads"),
        ("--num-heads 3", r"3 heads do not divide 256 model dims; change --num-heads or --model-dims"),
        ("--interleave 2", r"--interleave 2 cuts pipeline stages into pieces; add --pp"),
        ("--sequence-parallel", r"--sequence-parallel .*; add --tp"),
        ("--backend spmd --pp 2 --no-scan-layers", r"remove --no-scan-layers or --pp"),
        ("--attention flash", r"--attention flash is a GPU kernel; on CPU devices use --attention dot_product"),
        ("--backend cuda", r"--backend cuda needs GPUs; add --gpus N"),
        ("--backend cpu --gpus 2", r"--backend cpu trains on CPU devices; remove --gpus 2"),
        ("--dump-hlo", r"--dump-hlo says how to dump; add --dump DIR"),
        ("--dump-all-passes", r"--dump-all-passes says how to dump; add --dump DIR"),
        ("--pp 2 --dump-mpmd-passes", r"--dump-mpmd-passes says how to dump; add --dump DIR"),
        ("--pp 2 --device-memory much", r"--device-memory: 'much' is no size; write e.g. 80GiB or 24GB"),
        ("--pp 2 --dump-only", r"--dump-only says how to dump; add --dump DIR"),
        ("--dataset-name c4", r"--dataset-name is for TensorFlow datasets; add --use-tfds-dataset, or remove it"),
        ("--use-tfds-dataset", r"add --dataset-path and --dataset-name"),
        ("--text nowhere.txt", r"--text nowhere.txt: no such file"),
        ("--model-name lama3-8b", r"MaxText has no such model; near it are llama3-8b"),
        ("--maxtext-config nowhere.yml", r"--maxtext-config nowhere.yml: cannot be read as a MaxText configuration"),
    ],
)
def test_a_wrong_command_line_is_answered_with_a_remedy(job: Callable[[Sequence[str]], Job], argv: str, message: str):
    with pytest.raises(LauncherError, match=message) as raised:
        job(argv.split())
    assert raised.value.exit_code == 2


def test_everything_wrong_is_said_at_once_but_not_what_may_follow_from_it(job: Callable[[Sequence[str]], Job]):
    def lines(argv: str) -> list[str]:
        with pytest.raises((UsageError, Several)) as raised:
            job(argv.split())
        return [line.split(" ")[0] for line in str(raised.value).splitlines()]

    assert lines("--cpus 8 --dp two --microbatchsize 4 -tp 2 lr learning_rat=3 dtype=f32 steps=3 --interleave 2") == [
        *("--dp:", "--microbatchsize:", "-tp:", "'lr'", "--interleave", "learning_rat=3:", "dtype=f32:", "steps="),
    ]
    # Nothing is known of --pp, so nothing is said of what depends on it.
    assert lines("--ppp 2 --schedule gpipe --verify --interleave 2") == ["--ppp:"]
    assert lines("--pp --schedule gpipe --batch-size 7 --dp 2 --cpus 2") == ["--pp:", "a"]


def test_processes_read_equal_shares_of_real_data(job: Callable[[Sequence[str]], Job], root: Path):
    grid = ["--tp", "4", "--num-heads", "4", "--microbatch-size", "2", "--batch-size", "6"]
    read = ["dataset_type=grain", "grain_train_files=x", "--tokenizer-path", "p"]
    assert job(["--cpus", "4", *grid, *read]).microbatches == 3  # one process has all rows
    four = ("--nodes", "4", "--cpus", "1", *grid)
    assert job([*four, "--text", str(root / "LICENSE")]).microbatches == 3  # each process has all rows
    with pytest.raises(UsageError, match=r"4 processes read data in equal shares, and do not divide a batch of 6; use"):
        job([*four, *read])
    assert job([*four, *read, "--batch-size", "8"]).microbatches == 4
    uneven = ("--nodes", "3", "--cpus", "2", "--pp", "2", "--dp", "3", "--batch-size", "6", "--microbatch-size", "1")
    with pytest.raises(UsageError, match=r"the 3 devices of a stage lie on them in unequal numbers; use --nodes 1"):
        job([*uneven, *read])


@pytest.mark.parametrize(
    "argv",
    [
        "--schedule 1f1b",
        "--verify",
        "--custom-schedule-path table.json",
        "--forecast",
        "--device-memory 80GiB",
        "--dump x --dump-only",
    ],
)
def test_spmd_refuses_what_only_multimesh_can_do(job: Callable[[Sequence[str]], Job], argv: str):
    with pytest.raises(UnsupportedError, match=r"--backend spmd has no use for --.*; leave it out") as raised:
        job(["--backend", "spmd", "--pp", "2", *argv.split()])
    assert raised.value.exit_code == 3


def test_every_flag_that_spmd_refuses_is_a_flag():
    assert MULTIMESH_ONLY.keys() <= vars(parse([])).keys()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "enable_diloco=true",
            r"with enable_diloco=True yet: its state has another shape; use enable_diloco=False or --backend spmd",
        ),
        ("decoder_block=deepseek4", r"=deepseek4 yet: its layers read the tokens.*; use --backend spmd with --fsdp or"),
        ("--model-name gemma4-e2b", r"=gemma4_small yet: its last layers read keys and values .*; use --backend spmd"),
        ("--model-name gemma4-31b use_multimodal=true", r"with use_multimodal=True yet: the vision encoder has no"),
        ("--scan-layers --model-name gemma3-4b", r"--scan-layers: .* decoder_block=gemma3 .*; use --no-scan-layers$"),
        ("--scan-layers inhomogeneous_layer_cycle_interval=2", r"--scan-layers: .* are not alike"),
        ("--model-name mixtral-8x7b --ep 2", r"--ep 2: .* add use_ring_of_experts=true, .*, or sparse_matmul=false"),
        (
            "--model-name mixtral-8x7b --ep 2 use_ring_of_experts=true megablox=false",
            r"--ep 2: MaxText's ring of experts .* megablox=false",
        ),
        (
            "--cp 2 context_parallel_strategy=ring",
            r"ring: MaxText has it in TransformerEngine's attention alone; use all_",
        ),
        ("--cp 2 context_parallel_strategy=usp", r"usp: MaxText has it for TPUs only; use all_gather, or ring on GPUs"),
        (
            "--gpus 4 --cp 2 --attention cudnn_flash_jax",
            r"cudnn_flash_jax attends within the part of a sequence that a",
        ),
        ("mtp_num_layers=1", r"with mtp_num_layers=1 yet"),
        (
            'lora={"enable_lora":true}',
            r"lora: MaxText makes adapters in .*train_sft alone.* would train nothing; leave",
        ),
    ],
)
def test_what_comes_later_is_refused(job: Callable[[Sequence[str]], Job], argv: str, message: str):
    with pytest.raises(UnsupportedError, match=message) as raised:
        job(["--pp", "2", *argv.split()])
    assert "\n" not in str(raised.value)


def test_tensorboard_needs_its_package(job: Callable[[Sequence[str]], Job], monkeypatch: pytest.MonkeyPatch):
    assert job(["--pp", "2", "enable_tensorboard=true"])
    monkeypatch.setattr(checks, "has_package", lambda name: False)
    with pytest.raises(MissingPartError, match=r"enable_tensorboard=true needs tensorboardX; run ./bootstrap.sh"):
        job(["--pp", "2", "enable_tensorboard=true"])


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
    monkeypatch.setattr(buckets, "has_package", lambda name: False)
    with pytest.raises(kind, match=message):
        job(argv.split())
    monkeypatch.setattr(buckets, "has_package", lambda name: True)
    if kind is MissingPartError:
        assert job(argv.split())


@pytest.mark.parametrize("argv", ["", "--backend spmd", "--pp 2", "--backend spmd --model-name gemma4-31b"])
def test_all_forms_draw_the_same_parameters_from_a_seed(job: Callable[[Sequence[str]], Job], argv: str):
    """A scan draws others. MaxText's own pipeline can only scan."""
    assert not job(argv.split()).scans_layers
    assert job([*argv.split(), "--scan-layers"]).scans_layers
    assert job(["--backend", "spmd", "--pp", "2"]).scans_layers


@pytest.mark.parametrize(
    "argv", ["dropout_rate=0.1", "--model-name gemma3-4b", "--scan-layers", "--backend spmd --pp 2 dropout_rate=0.1"]
)
def test_what_is_no_pipeline_of_multimesh_is_left_to_maxtext(job: Callable[[Sequence[str]], Job], argv: str):
    job(argv.split())


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
        *grid.UNLIKE.values(),
        *grid.NEWEST,
    ],
)
def test_what_can_be_placed_is_accepted(job: Callable[[Sequence[str]], Job], argv: str):
    assert job(["--pp", "2", *argv.split()]).options.staged


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
        with pytest.raises(UsageError, match=message) as raised:
            job(argv)
        assert str(file) in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--schedule zb-h1 --interleave 2", r"--interleave 2, .* zb-h1 has one stage a submesh, .*; use interleaved"),
        ("--schedule zb-v", r"--schedule zb-v is for stages of several pieces; add --interleave 2"),
        ("--schedule zb-v --interleave 3", r"zb-v has two stages a submesh, but the loop has 3"),
        ("--schedule interleaved", r"for stages of several pieces; add --interleave 2 or use 1f1b"),
        ("--schedule custom", r"needs a table; add --custom-schedule-path FILE"),
        ("--schedule custom --custom-schedule-path none.json", r"none.json: No such file"),
        ("--custom-schedule-path t.json", r"is for --schedule custom; add that or leave it out"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(job: Callable[[Sequence[str]], Job], argv: str, message: str):
    with pytest.raises(UsageError, match=message) as raised:
        job(["--pp", "2", *argv.split()])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "visible", "message"),
    [
        ("--gpus 2", None, r"--gpus 2, but no GPU can be seen here; check nvidia-smi, or use --cpus"),
        ("--gpus 2", [80_000], r"--gpus 2, but 1 GPUs can be seen here"),
        ("--gpus 2 --nodes 2 --spawn", [80_000] * 3, r"--gpus 2 for each of 2 processes, but 3 GPUs can be seen here"),
        ("--gpus 2", [80_000] * 2, r"--gpus 2: JAX has no CUDA plugin here; ./bootstrap.sh --group cuda12"),
    ],
)
def test_what_the_machine_lacks_is_named(argv: str, visible: list[int] | None, message: str):
    with pytest.raises(MissingPartError, match=message) as raised:
        check_machine(parse(argv.split()), gpu_memory=visible, has_plugin=False)
    assert raised.value.exit_code == 4


def test_missing_sources_name_the_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "maxtext").mkdir()  # the folder of scripts, not the trainer
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingPartError, match=r"MaxText is not here .*; run ./bootstrap.sh --group run"):
        find_maxtext(tmp_path)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--zcmem 4 --sysmem 4 --network ucx", "--zcmem, --sysmem, --network (for the Realm runtime)"),
        ("--eager-fbmem 10 --eager-x=3 learning_rate=1", "--eager-fbmem, --eager-x (for the Realm runtime)"),
        ("-ll:gpu 1 -level gpu=2 -lg:prof 4 dtype=float32", "-ll:gpu, -level, -lg:prof (for the Realm runtime)"),
        ("--fbmem 70 --gpus 1", "--fbmem (for a GPU, and none can be seen here)"),
        ("--fbmem 70", "--fbmem (for GPUs)"),
        ("--xla-ar-threshold 0 --debug-nccl", "--xla-ar-threshold, --debug-nccl (for GPUs)"),
        ("--gpus 1 --hoist-loop-convert", "--hoist-loop-convert (for the original's compiler)"),
        (
            "--autoshard --only-fuse-loop-tasks",
            "--autoshard, --only-fuse-loop-tasks (for pipelines of MultiMesh)",
        ),
        (
            "--host-offload-min-reuse-distance 2",
            "--host-offload-min-reuse-distance (for the original's compiler; --remat minimal_offloaded offloads)",
        ),
    ],
)
def test_flags_without_effect_are_named_in_one_line(argv: str, named: str):
    assert notes(parse(argv.split()), gpu_memory=None) == [f"without effect here: {named}"]


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--network none --no-profile --no-autoshard --host-offload-min-reuse-distance 0",
        "--gpus 1 --debug-nccl --xla-pipelining --xla-ag-threshold 9",
        "--pp 2 --autoshard --fuse-tasks --replicate-small-params",
    ],
)
def test_flags_with_an_effect_are_not_warned_of(argv: str):
    assert notes(parse(argv.split()), gpu_memory=80_000) == []


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
    done = subprocess.run(line, capture_output=True, text=True, env={"PYTHONPATH": source}, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1 if code else 0), done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LauncherError, 1),
        (UsageError, 2),
        (UnsupportedError, 3),
        (MissingPartError, 4),
        (TrainerFailedError, 10),
        (StoppedEarlyError, 11),
        (LossNotFiniteError, 12),
        (LossNotFallingError, 13),
        (DisagreementError, 14),
        (CheckpointError, 15),
        (DoesNotFitError, 16),
        (ProcessLostError, 17),
    ],
)
def test_exit_codes_are_stable_and_in_the_help(error: type[LauncherError], code: int):
    assert error.exit_code == code
    assert re.search(rf"^ +{code}  \w", parser().format_help(), re.MULTILINE)


def test_the_door_names_the_bootstrap_where_there_is_no_environment(tmp_path: Path, root: Path):
    door = tmp_path / "maxtext" / "run.py"
    door.parent.mkdir()
    door.write_text((root / "maxtext/run.py").read_text())
    done = subprocess.run([sys.executable, "-S", "-E", str(door)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"multimesh_maxtext is not installed here; run: {tmp_path / 'bootstrap.sh'} --group run\n"


def test_the_door_is_short(root: Path):
    assert len((root / "maxtext/run.py").read_text().splitlines()) <= 20
