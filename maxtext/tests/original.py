"""Facts about the launcher of the original MultiMesh: what its scripts give to ``run.py``, and its defaults.

``python maxtext/tests/original.py --write`` renews the tables of defaults in docs/migrating.md and
docs/maxtext-flags.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPTS = {
    "validate-cpu": (
        "--cpus 8 --gpus 0 --fbmem 0 --sysmem 25 --nodes 1 --dp 2 --tp 2 --pp 2 --fsdp 1 --num-layers 2 --interleave 1 "
        "--batch-size 8 --microbatch-size 2 --sequence-length 128 --attention dot_product "
        "--model-dims 256 --num-steps 3 --use-iota-embed --xla-rs-threshold=51200 --remat minimal "
        "--replicate-small-params --use-nccl-comm-split --dump dump --autoshard --backend multimesh --debug info"
    ),
    "validate-cpu of its last release": (
        "--cpus 8 --gpus 0 --fbmem 0 --sysmem 5 --nodes 1 --dp 2 --tp 2 --ep 1 --pp 2 --fsdp 1 --num-layers 2 "
        "--interleave 1 --batch-size 8 --microbatch-size 2 --sequence-length 128 --attention dot_product "
        "--model-dims 256 --num-steps 3 --use-iota-embed --model-name mixtral-small --xla-rs-threshold=51200 "
        "--remat minimal --replicate-small-params --use-nccl-comm-split --load-balance-decoder-norm --dump dump "
        "--autoshard --backend multimesh --debug info"
    ),
    "validate-gpu": (
        "--cpus 2 --gpus 2 --fbmem 20 --sysmem 20 --nodes 1 --dp 1 --tp 2 --pp 1 --fsdp 1 --num-layers 4 "
        "--batch-size 4 --microbatch-size 2 --sequence-length 256 --num-steps 20 "
        "--use-iota-embed --xla-rs-threshold=51200 --attention cudnn_flash_te --remat minimal "
        "--replicate-small-params --use-nccl-comm-split --sequence-parallel --dump dump "
        "--dump-mpmd-passes --autoshard --backend multimesh --debug info"
    ),
    "gpt3-175b-64gpus": (
        "--cpus 1 --gpus 1 --fbmem 77 --nodes 64 --pp 8 --tp 8 --dp 1 --fsdp 1 --num-layers 96 --interleave 12 "
        "--model-name gpt3-175b --model-dims 12288 --num-heads 96 --xla-rs-threshold=51200 --attention=cudnn_flash_te "
        "--remat minimal --sequence-length=2048 --batch-size 128 --microbatch-size 4 --network ucx --profile "
        "--replicate-small-params --schedule wavefront --load-balance-embeddings --no-sequence-parallel --autoshard "
        "--num-steps 8 --backend legate --debug info"
    ),
    "llama3-70b-64gpus": (
        "--fbmem 78 --cpus 1 --gpus 1 --nodes 64 --dp 1 --fsdp 1 --tp 4 --pp 16 --interleave 5 --model-name llama3-70b "
        "--num-layers 80 --sequence-length=4096 --batch-size 128 --microbatch-size 2 --remat minimal "
        "--attention=cudnn_flash_te --xla-rs-threshold=51200 --use-nccl-comm-split --only-fuse-loop-tasks "
        "--replicate-small-params --hoist-loop-convert --network ucx --schedule prefetch-wavefront --autoshard "
        "--num-steps 10 --debug info --backend multimesh -logfile jax_%.log"
    ),
    "llama3-8b-16gpus": (
        "--fbmem 78 --cpus 1 --gpus 1 --nodes 16 --dp 2 --fsdp 1 --tp 4 --pp 2 --interleave 8 --model-name llama3-8b "
        "--num-layers 32 --sequence-length=4096 --batch-size 32 --microbatch-size 2 --remat minimal "
        "--attention=cudnn_flash_te --xla-rs-threshold=51200 --use-nccl-comm-split --only-fuse-loop-tasks "
        "--replicate-small-params --hoist-loop-convert --network ucx --schedule prefetch-wavefront --autoshard "
        "--num-steps 10 --backend multimesh --debug info -logfile jax_%.log"
    ),
}
"""The flags of its scripts."""

LIMITS = {"gpt3-175b-64gpus": (73e9, 9.65), "llama3-70b-64gpus": (72e9, 8.9)}
"""Bytes of a GPU and seconds of a step that its test suite allows these jobs on H100."""

FLAGS = [
    *("--nodes", "--gpus", "--cpus", "--dp", "--fsdp", "--tp", "--pp", "--ep", "--interleave"),
    *("--sequence-parallel", "--batch-size", "--microbatch-size", "--schedule"),
    *("--custom-schedule-path", "--backend", "--maxtext-config", "--model-name", "--num-layers"),
    *("--model-dims", "--mlp-dims", "--num-heads", "--sequence-length", "--num-steps", "--attention"),
    *("--attention-type", "--remat", "--scan-layers", "--use-iota-embed", "--logits-dot-in-fp32"),
    *("--load-balance-decoder-norm", "--load-balance-embeddings"),
    *("--compile-topology-num-slices", "--use-tfds-dataset", "--dataset-path", "--dataset-name"),
    *("--tokenizer-path", "--fbmem", "--zcmem", "--sysmem", "--eager-*", "--network", "--profile"),
    *("--collective-matmul", "--latency-hiding-scheduler", "--xla-pipelining"),
    *("--xla-loop-buffering", "--xla-ar-threshold", "--xla-ag-threshold", "--xla-rs-threshold"),
    *("--hoist-loop-convert", "--use-nccl-comm-split", "--debug-nccl", "--dump", "--dump-only"),
    *("--dump-mpmd-passes", "--dump-all-passes", "--hlo", "--autoshard"),
    *("--replicate-small-params", "--fuse-tasks", "--only-fuse-loop-tasks"),
    *("--host-offload-min-reuse-distance", "--debug"),
]
"""Every flag that one of its releases had."""

DEFAULTS = {
    "--gpus": "8",
    "--cpus": "4",
    "--fbmem": "70",
    "--profile": "on",
    "--use-nccl-comm-split": "on",
    "--collective-matmul": "do not",
    "--latency-hiding-scheduler": "on",
    "--xla-pipelining": "on",
    "--xla-loop-buffering": "on",
    "--xla-ar-threshold": "4294967296",
    "--xla-ag-threshold": "4294967296",
    "--xla-rs-threshold": "33554432",
    "--autoshard": "on",
    "--fuse-tasks": "on",
    "--only-fuse-loop-tasks": "off",
    "--replicate-small-params": "on",
    "--debug": "none",
    "--dp": "1",
    "--fsdp": "1",
    "--tp": "1",
    "--pp": "1",
    "--interleave": "1",
    "--sequence-parallel": "off",
    "--schedule": "the library's",
    "--microbatch-size": "the whole batch",
    "--batch-size": "2 x devices",
    "--num-steps": "MaxText's",
    "--num-layers": "MaxText's, an error with --pp",
    "--model-dims": "MaxText's",
    "--mlp-dims": "4 x --model-dims, else MaxText's",
    "--num-heads": "MaxText's",
    "--sequence-length": "MaxText's, an error with --replicate-small-params",
    "--attention": "MaxText's",
    "--attention-type": "the model's",
    "--remat": "MaxText's",
    "--scan-layers": "unroll; a scan is an error",
    "--use-iota-embed": "the model's",
    "--logits-dot-in-fp32": "the model's",
    "--nodes": "1",
}
"""What its flags are where they are not given."""

BESIDE = {
    "output folder": ("`logs` in the working folder", "a fresh temporary folder, or `--output`"),
    "TensorBoard": ("on", "off; with `enable_tensorboard=true` on"),
    "gradient clipping": ("none (`gradient_clipping_threshold=0.0`)", "MaxText's: to a norm of 1.0"),
    "`--dump-only`": ("one CPU device, without parallelism", "all devices of the job, compiled but not run"),
    "`--dump`": ("XLA's programs", "the plan of a pipeline, and its program after every pass; else XLA's programs"),
    "`XLA_FLAGS` in the environment": ("win over all flags", "win over defaults; flags that are given win over them"),
}
"""What no flag's default says: in the original, and here."""

NUMERICS = {
    "scan_layers": "`false`; a scan is an error",
    "gradient_clipping_threshold": "`0.0`",
    **dict.fromkeys(
        (
            *("dtype", "weight_dtype", "grad_dtype", "mu_dtype", "matmul_precision", "cast_logits_to_fp32"),
            *("logits_dot_in_fp32", "float32_logits", "float32_qk_product"),
        ),
        "MaxText's",
    ),
}
"""Settings that change numbers, with what the original gives MaxText where nobody says."""

FORMS = {"a pipeline": ("--pp", "2"), "no pipeline": (), "MaxText's own pipeline": ("--backend", "spmd", "--pp", "2")}
"""Command lines of each way to train."""

ROOT = Path(__file__).resolve().parents[2]


def table() -> str:
    """Return the defaults that differ, as Markdown."""
    from multimesh_maxtext.command.flags import FLAGS

    helps = {flag.option: flag.help for flag in FLAGS.values()}
    lines = ["| | original | here |", "|---|---|---|"]
    for flag, default in DEFAULTS.items():
        if flag not in helps:  # a setting of MaxText, or without effect
            continue
        match = re.search(r"\(default:? ((?:[^();]|\([^)]*\))*)", helps[flag])
        assert match, f"the help of {flag} names no default"
        if match[1].strip() != default:
            lines.append(f"| `{flag}` | {default} | {match[1].strip()} |")
    lines += [f"| {name} | {original} | {launcher} |" for name, (original, launcher) in BESIDE.items()]
    return "\n".join(lines)


def numerics() -> str:
    """Return scan, clipping and precision where nobody says, in each way to train, as Markdown."""
    from multimesh_maxtext.command.check_flags import check_job
    from multimesh_maxtext.command.command_line import read
    from multimesh_maxtext.command.job import Paths, find_maxtext
    from multimesh_maxtext.command.translate import configuration

    maxtext = find_maxtext(ROOT)
    paths = Paths(python="", maxtext=maxtext, output=Path(), metrics=Path())
    jobs = [check_job(read(argv), maxtext / "maxtext") for argv in FORMS.values()]
    configs = [{**job.model.resolved, **configuration(job, paths)} for job in jobs]
    lines = [f"| setting | original | {' | '.join(FORMS)} |", "|---" * (2 + len(FORMS)) + "|"]
    for name, default in NUMERICS.items():
        values = (json.dumps(config[name]) if config[name] != "" else "as `weight_dtype`" for config in configs)
        cells = (value if value.startswith("as ") else f"`{value}`".replace('"', "") for value in values)
        lines.append(f"| `{name}` | {default} | {' | '.join(cells)} |")
    return "\n".join(lines)


MADE: dict[Path, tuple[str, str, Callable[[], str]]] = {
    ROOT / "docs/migrating.md": (
        "<!-- defaults: maxtext/tests/original.py --write -->", "<!-- end of defaults -->", table
    ),
    ROOT / "docs/maxtext-flags.md": (
        "<!-- numerics: maxtext/tests/original.py --write -->", "<!-- end of numerics -->", numerics
    ),
}  # fmt: skip
"""Each document, where its table begins and ends, and what makes it."""


def renew(document: Path) -> str:
    """Return a document with its table as the code makes it."""
    begin, end, make = MADE[document]
    before, _, tail = document.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}\n{make()}\n{end}{tail.partition(end)[2]}"


if __name__ == "__main__" and "--write" in sys.argv:
    for page in MADE:
        page.write_text(renew(page), encoding="utf-8")
