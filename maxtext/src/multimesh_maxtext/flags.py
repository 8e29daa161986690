"""The flags of ``maxtext/run.py``, group by group; the help is the reference."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from multimesh_maxtext.errors import UsageError

BACKENDS = ("multimesh", "spmd", "cuda", "cpu")

SCHEDULES = (
    "fill-drain",
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "zb-h1",
    "wavefront",
    "prefetch-wavefront",
    "custom",
)

ATTENTION = ("autoselected", "dot_product", "flash", "cudnn_flash_te")

REMAT = (  # MaxText also reads "none", and recomputes everything
    "full",
    "minimal",
    "minimal_with_context",
    "minimal_with_quantization",
    "minimal_with_context_and_quantization",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "custom",
)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def _count(minimum: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return value

    return whole_number


def parse_size(text: str) -> int:
    """Return bytes: ``80GiB``, ``24 GB``, ``1e9`` is none.

    Raises
    ------
    UsageError
        For anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise UsageError(f"--device-memory: {text!r} is no size; write e.g. 80GiB or 24GB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _processes(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("processes and devices")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="multimesh",
        help=(
            "what runs the pipeline: 'multimesh' gives every stage programs of its own (default); 'spmd' is "
            "MaxText alone, its own pipeline in one program; 'cuda' and 'cpu' are spmd on that platform. Without "
            "--pp all are MaxText as it is"
        ),
    )
    group.add_argument(
        "--nodes",
        type=_count(1),
        default=1,
        metavar="N",
        help="number of processes in all; one per GPU is usual on a cluster (default 1)",
    )
    group.add_argument(
        "--gpus", type=_count(0), default=0, metavar="N", help="GPUs per process (default 0: train on CPU devices)"
    )
    group.add_argument(
        "--cpus",
        type=_count(1),
        metavar="N",
        help=(
            "CPU devices per process, virtual ones on any number of cores; beside --gpus only the GPUs train"
            " (default: as many as the parallelism asks for)"
        ),
    )
    group.add_argument(
        "--spawn",
        action="store_true",
        help="start all --nodes processes here rather than one of them under srun or mpirun",
    )


def _parallelism(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("parallelism", "dp x fsdp x tp x pp x ep must equal the devices of all processes")
    for flag, text in (
        ("--dp", "data parallelism: copies of the model, each with its own rows of the batch"),
        ("--fsdp", "data parallelism whose parameters and optimizer state are sharded, gathered when used"),
        ("--tp", "tensor parallelism: heads and feed-forward width split over devices"),
        ("--pp", "pipeline parallelism: layers split into this many stages"),
        ("--ep", "expert parallelism: experts of a mixture-of-experts model split over devices"),
        ("--interleave", "pieces of the model per stage: more pieces, a smaller bubble, more transfers"),
    ):
        group.add_argument(flag, type=_count(1), default=1, metavar="N", help=f"{text} (default 1)")
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="shard activations between tensor-parallel blocks along the sequence",
    )


def _loop(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("training loop", "microbatches = batch size / (dp x fsdp x ep x microbatch size)")
    group.add_argument("--num-steps", type=_count(1), default=10, metavar="N", help="optimizer steps (default 10)")
    group.add_argument(
        "--batch-size",
        type=_count(1),
        metavar="N",
        help="sequences in one step over all devices (default: 2 x devices)",
    )
    group.add_argument(
        "--microbatch-size",
        type=_count(1),
        default=1,
        metavar="N",
        help=(
            "sequences that a tensor-parallel domain works on at once (default 1): batch 1024 with dp 8 and "
            "microbatch size 4 makes 32 microbatches. Without --pp they are gradient accumulation"
        ),
    )
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help=(
            "order of the microbatches in the pipeline (backend multimesh, default 1f1b, with --interleave "
            "interleaved; spmd has only MaxText's own)"
        ),
    )
    group.add_argument(
        "--custom-schedule-path",
        type=Path,
        metavar="FILE",
        help=(
            "JSON table for --schedule custom: per stage a list of cells, F0 the forward of piece 0 for the next "
            "microbatch, B0 its backward"
        ),
    )
    group.add_argument(
        "--seed",
        type=_count(0),
        default=0,
        metavar="N",
        help="seed of the initial parameters and of the order of the data (default 0)",
    )


def _model(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("model", "without --model-name: a small llama that trains on a laptop")
    group.add_argument(
        "--model-name",
        metavar="NAME",
        help=("a model that MaxText knows (llama3-8b, gpt3-175b, mixtral-8x7b, ...); the size flags below override it"),
    )
    group.add_argument(
        "--maxtext-config",
        type=Path,
        metavar="FILE",
        help="MaxText configuration to start from in place of its base.yml",
    )
    group.add_argument(
        "--num-layers",
        type=_count(1),
        metavar="N",
        help="decoder layers (default: the model's, or 2 x pp x interleave)",
    )
    group.add_argument(
        "--model-dims", type=_count(1), metavar="N", help="width of the residual stream (default: the model's, or 256)"
    )
    group.add_argument(
        "--mlp-dims",
        type=_count(1),
        metavar="N",
        help="width of the feed-forward blocks (default: the model's, or 256)",
    )
    group.add_argument(
        "--num-heads",
        type=_count(1),
        metavar="N",
        help="attention heads, for queries as for keys and values (default: the model's, or 4)",
    )
    group.add_argument(
        "--sequence-length", type=_count(1), default=128, metavar="N", help="tokens in a sequence (default 128)"
    )
    group.add_argument(
        "--attention",
        choices=ATTENTION,
        default="autoselected",
        help="attention kernel; dot_product runs everywhere (default autoselected)",
    )
    group.add_argument(
        "--attention-type",
        metavar="TYPE",
        help="global, local_sliding, chunk, ...: MaxText's attention_type (default: the model's)",
    )
    group.add_argument(
        "--remat",
        choices=REMAT,
        default="minimal",
        metavar="POLICY",
        help=f"what the backward pass recomputes rather than keeps: {', '.join(REMAT)} (default minimal)",
    )
    group.add_argument(
        "--scan-layers",
        action=argparse.BooleanOptionalAction,
        help=(
            "compile one layer and scan over it, or unroll the layers (default: scan, which MaxText's own "
            "pipeline needs; backend multimesh scans piece by piece, and unrolls by default)"
        ),
    )
    group.add_argument(
        "--use-iota-embed", action="store_true", help="look embeddings up by a product with one-hot rows"
    )
    group.add_argument("--logits-dot-in-fp32", action="store_true", help="compute the logits in float32")
    group.add_argument(
        "--load-balance-decoder-norm",
        action="store_true",
        help="count the final norm when layers are dealt to stages (backend multimesh)",
    )
    group.add_argument(
        "settings", nargs="*", default=[], metavar="KEY=VALUE", help="any setting of MaxText that no flag here decides"
    )


def _data(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("data", "without these: one synthetic batch, the same at every step")
    group.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="train on these UTF-8 files, one token a byte; nothing is downloaded",
    )
    group.add_argument(
        "--use-tfds-dataset",
        action="store_true",
        help="read a TensorFlow dataset (needs tensorflow-datasets, --dataset-path and --dataset-name)",
    )
    group.add_argument("--dataset-path", metavar="DIR", help="where the TensorFlow datasets lie")
    group.add_argument("--dataset-name", metavar="NAME", help="which of them, e.g. c4/en:3.0.1")
    group.add_argument("--tokenizer-path", metavar="FILE", help="tokenizer for the dataset (default: MaxText's)")


def _outputs(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("outputs")
    group.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=(
            "folder for metrics, log and everything MaxText writes (default: a fresh temporary one, whose "
            "path is printed)"
        ),
    )
    group.add_argument(
        "--metrics-file",
        type=Path,
        metavar="FILE",
        help=("one JSON object a step: loss, gradient norms, times (default: metrics.jsonl in the output folder)"),
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print the exact command, environment and configuration, start nothing"
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object for machines instead of progress and table"
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help=(
            "train once more without the pipeline (backend spmd, the devices of one stage, the same microbatches "
            "accumulated) and compare loss and gradient norm of every step; they must agree to 1e-5"
        ),
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help=(
            "record a profile of some steps after the first (xplane, in the output folder); backend multimesh also "
            "measures every program and draws timelines of the step"
        ),
    )


def _checkpoints(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group(
        "checkpoints and evaluation", "steps are counted from 0, as in the metrics file: checkpoint N is after step N"
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="write checkpoints here while training goes on (Orbax), the last one after the last step",
    )
    group.add_argument(
        "--checkpoint-every", type=_count(1), metavar="N", help="... after steps 0, N, 2N, ... (default 100)"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help=(
            "go on from the newest checkpoint in --checkpoint, with any --pp, --dp, --fsdp, --tp or --backend; from "
            "step 0 if there is none. --num-steps counts from step 0 also then"
        ),
    )
    group.add_argument(
        "--eval-every", type=_count(1), metavar="N", help="evaluate after steps 0, N, 2N, ... (default: never)"
    )
    group.add_argument(
        "--eval-steps",
        type=_count(1),
        metavar="N",
        help="batches in an evaluation, each as large as a microbatch over all domains (default 4)",
    )


def _runtime(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group(
        "memory and runtime", "flags of the Realm runtime are mapped to JAX's or named in a warning"
    )
    group.add_argument(
        "--forecast",
        action="store_true",
        help="print the memory that the devices of each stage will need, from shapes alone; train nothing (multimesh)",
    )
    group.add_argument(
        "--device-memory",
        type=parse_size,
        metavar="SIZE",
        help="forecast, and refuse a run that needs more per device, e.g. 80GiB (multimesh; default: what GPUs have)",
    )
    group.add_argument(
        "--fbmem", type=_count(1), metavar="MIB", help="GPU memory to reserve per device: becomes JAX's memory fraction"
    )
    group.add_argument("--zcmem", type=_count(0), metavar="MIB", help="pinned host memory (Realm only)")
    group.add_argument("--sysmem", type=_count(0), metavar="MIB", help="host memory (Realm only)")
    group.add_argument("--eager-*", dest="eager", metavar="VALUE", help="settings of eager allocation (Realm only)")
    group.add_argument(
        "--network", choices=("none", "gasnetex", "ucx"), help="network layer (Realm only; JAX finds its own)"
    )
    group.add_argument(
        "--debug",
        choices=("none", "info", "debug", "spew"),
        default="none",
        help="how much JAX and XLA log (default none)",
    )
    group.add_argument("--debug-nccl", action="store_true", help="let NCCL log what it does")


def _xla(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("XLA", "for GPUs; thresholds are bytes")
    for flag, text in (
        ("--collective-matmul", "overlap a matrix product with the gather or scatter of its operands"),
        ("--latency-hiding-scheduler", "move collectives so that computation hides them"),
        ("--xla-pipelining", "pipeline collectives of a loop over its iterations"),
        ("--xla-loop-buffering", "double-buffer loops"),
        ("--hoist-loop-convert", "hoist conversions out of loops"),
        ("--use-nccl-comm-split", "make communicators of subsets by splitting"),
    ):
        group.add_argument(flag, action="store_true", help=text)
    for flag, text in (("ar", "all-reduces"), ("ag", "all-gathers"), ("rs", "reduce-scatters")):
        group.add_argument(
            f"--xla-{flag}-threshold", type=_count(0), metavar="BYTES", help=f"combine {text} up to this size"
        )


def _dumps(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("dumps")
    group.add_argument(
        "--dump",
        type=Path,
        metavar="DIR",
        help="write the plan of the step here, as text, JSON, SVG and for Perfetto (multimesh); else XLA's programs",
    )
    group.add_argument("--hlo", action="store_true", help="with --dump: XLA's programs as HLO text")
    group.add_argument("--dump-all-passes", action="store_true", help="with --dump: after every pass of XLA (large)")
    group.add_argument(
        "--dump-mpmd-passes", action="store_true", help="with --dump: after every pass of MultiMesh (backend multimesh)"
    )
    group.add_argument(
        "--dump-only", action="store_true", help="with --dump: compile, dump, do not train (backend multimesh)"
    )


def _compiler(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("compiler options of --backend multimesh")
    for flag, text in (
        ("--autoshard", "derive shardings that the model leaves open"),
        ("--replicate-small-params", "replicate parameters too small to be worth sharding"),
        ("--fuse-tasks", "merge neighbouring tasks of a stage"),
        ("--only-fuse-loop-tasks", "... only inside the microbatch loop"),
    ):
        group.add_argument(flag, action="store_true", help=text)
    group.add_argument(
        "--host-offload-min-reuse-distance",
        type=_count(0),
        metavar="N",
        help="offload values that rest for this many tasks",
    )


GROUPS = (_processes, _parallelism, _loop, _model, _data, _outputs, _checkpoints, _runtime, _xla, _dumps, _compiler)
"""Each adds its group to a parser, in the order of the help."""
