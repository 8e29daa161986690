"""The flags of ``maxtext/run.py``, group by group; the help is the reference."""

from __future__ import annotations

import argparse
from pathlib import Path

from multimesh_maxtext.command import compiler_flags
from multimesh_maxtext.command.compiler_flags import switch
from multimesh_maxtext.command.values import (
    ATTENTION,
    BACKENDS,
    DEVICES,
    REMAT,
    SCHEDULES,
    count,
    fallback,
    parse_size,
    partition,
    rate,
)

TIMEOUTS = {
    "start": "time in which all processes must have started (default 60; for --fallback in Kubernetes 300)",
    "silence": "silence after which a process is given up; a death on the same machine is seen at once (default 8)",
    "compile": "time that processes wait for each other to compile or to write a checkpoint (default 3600)",
    "transfer": "time in which the first transfer between two processes must arrive (default 300)",
    "stall": "end the job when a process holds up the others for so long (default: name it, and wait)",
}
"""Times that processes wait for each other, with the help of their flags."""


def _processes(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("processes and devices")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="multimesh",
        help=(
            "the way a pipeline runs: 'multimesh' gives every stage kernels of its own (default); 'spmd' is "
            "MaxText alone, its own pipeline in one program; 'cuda' and 'cpu' are spmd on that platform; 'legate' is "
            "an old name of 'multimesh'. Without --pp all are MaxText as it is"
        ),
    )
    group.add_argument(
        "--nodes",
        type=count(1),
        default=1,
        metavar="N",
        help="number of processes in all; one per GPU is usual on a cluster (default 1)",
    )
    group.add_argument(
        "--gpus", type=count(0), default=0, metavar="N", help="GPUs per process (default 0: train on CPU devices)"
    )
    group.add_argument(
        "--cpus",
        type=count(1),
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
    group.add_argument(
        "--max-restarts",
        type=count(0),
        metavar="K",
        help=(
            "start all processes again from the last checkpoint when one is lost, at most K times: with --spawn, in "
            "the batch scripts for Slurm beside run.py, or by Kubernetes (default 0)"
        ),
    )
    group.add_argument(
        "--fallback",
        type=fallback,
        metavar="GRID;GRID;...|auto",
        help=(
            "with --max-restarts, grids to go on with when a restart cannot have as many processes: the first that "
            "fits what is left, with the same global batch; axes that it does not name stay ('pp=4,dp=2; pp=4,dp=1'); "
            "auto: the planner chooses the best of the most processes"
        ),
    )
    group.add_argument(
        "--show-grids",
        action="store_true",
        help="print the grid and those of --fallback, each after its number of processes, and end; for batch scripts",
    )
    for name, text in TIMEOUTS.items():
        group.add_argument(f"--{name}-timeout", type=rate, metavar="SECONDS", help=text)


def _parallelism(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group(
        "parallelism", "dp x fsdp x tp x cp x pp x ep must equal the devices of all processes"
    )
    for flag, text in (
        ("--dp", "data parallelism: copies of the model, each with its own rows of the batch"),
        ("--fsdp", "data parallelism whose parameters and optimizer state are sharded, gathered when used"),
        ("--tp", "tensor parallelism: heads and feed-forward width split over devices"),
        (
            "--cp",
            "context parallelism: each sequence split over devices, attention gathers its keys and values, or passes "
            "them on in a ring with context_parallel_strategy=ring",
        ),
        ("--pp", "pipeline parallelism: layers split into this many stages"),
        ("--ep", "expert parallelism: experts of a mixture-of-experts model split over devices"),
        ("--interleave", "pieces of the model per stage: more pieces, a smaller bubble, more transfers"),
    ):
        group.add_argument(flag, type=count(1), default=1, metavar="N", help=f"{text} (default 1)")
    group.add_argument(
        "--partition",
        type=partition,
        metavar="auto|N,N,...",
        help=(
            "decoder layers of each piece, in the order of the model: auto cuts such that no piece holds up the "
            "others, with the embedding and the logits at the ends (default: equal pieces, or auto where pp x "
            "interleave does not divide the layers)"
        ),
    )
    switch(
        group,
        "--sequence-parallel",
        "shard activations between tensor-parallel blocks along the sequence (default off)",
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="1: moments of the optimizer are laid out over dp too, and each device updates its part of parameters; "
        "2: gradients as well, so that each device gets its part of their sum alone, in half the bytes (default 0)",
    )
    switch(
        group,
        "--gather-once",
        "gather the parameters that --fsdp shards once a step, and reduce their gradients once, not for each "
        "microbatch of a pipeline; both then lie whole on each device, the optimizer state stays sharded (default off)",
    )


def _loop(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("training loop", "microbatches = batch size / (dp x fsdp x ep x microbatch size)")
    group.add_argument("--num-steps", type=count(1), default=10, metavar="N", help="optimizer steps (default 10)")
    group.add_argument(
        "--batch-size",
        type=count(1),
        metavar="N",
        help="sequences in one step over all devices (default: 2 x devices)",
    )
    group.add_argument(
        "--microbatch-size",
        type=count(1),
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
        metavar="NAME",
        help=(
            "order of the microbatches in a pipeline of backend multimesh (default 1f1b, with --interleave "
            "interleaved; spmd has only MaxText's own); auto measures the kernels of a step before the first, "
            "searches for the shortest order in the memory of 1f1b, or up to --device-memory, and writes "
            f"schedule.json. Names: {', '.join(SCHEDULES)}"
        ),
    )
    group.add_argument(
        "--custom-schedule-path",
        type=Path,
        metavar="FILE",
        help=(
            "JSON table for --schedule custom: per stage a list of cells, F0 the forward of piece 0 for the next "
            "microbatch, B0 its backward; or the schedule.json of --schedule auto"
        ),
    )
    group.add_argument(
        "--seed",
        type=count(0),
        default=0,
        metavar="N",
        help="seed of the initial parameters and of the order of the data (default 0)",
    )


def _model(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("model", "without --model-name: a small llama that trains on a laptop")
    group.add_argument(
        "--model-name",
        metavar="NAME",
        help="a model that MaxText knows (llama3-8b, gpt3-175b, mixtral-8x7b, ...); the size flags below override it",
    )
    group.add_argument(
        "--maxtext-config",
        type=Path,
        metavar="FILE",
        help="MaxText configuration to start from in place of its base.yml",
    )
    for flag, text in (
        ("--num-layers", "decoder layers (default: the model's, or 2 x pp x interleave)"),
        ("--model-dims", "width of the residual stream (default: the model's, or 256)"),
        ("--mlp-dims", "width of the feed-forward blocks (default: 4 x --model-dims, else the model's, or 256)"),
        ("--num-heads", "attention heads, for queries as for keys and values (default: the model's, or 4)"),
        (
            "--num-kv-heads",
            "heads for keys and values, each for a group of heads (default: --num-heads, else the model's)",
        ),
        ("--head-dim", "width of a head (default: --model-dims / --num-heads where both are given, else the model's)"),
        ("--vocab-size", "tokens that the model knows (default: the model's, or 1024, with --text 384)"),
    ):
        group.add_argument(flag, type=count(1), metavar="N", help=text)
    group.add_argument(
        "--sequence-length", type=count(1), default=128, metavar="N", help="tokens in a sequence (default 128)"
    )
    group.add_argument(
        "--attention",
        choices=ATTENTION,
        default="autoselected",
        help=(
            "attention kernel; dot_product runs everywhere, cudnn_flash_te is cudnn_flash_jax where TransformerEngine "
            "is missing (default autoselected)"
        ),
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
        help=(
            f"what the backward pass recomputes rather than keeps: {', '.join(REMAT)} (default minimal; minimal_flash "
            "is an old name of minimal_with_context)"
        ),
    )
    switch(
        group,
        "--scan-layers",
        "compile one layer and scan over it, in a pipeline over the layers of a piece, or unroll the layers; either "
        "draws other parameters from a seed (default: unroll, but in MaxText's own pipeline, which can only scan)",
    )
    switch(group, "--use-iota-embed", "look embeddings up by a product with one-hot rows (default: the model's)")
    switch(group, "--logits-dot-in-fp32", "compute the logits in float32 (default: the model's)")


def _data(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group(
        "data", "without these or dataset_type=grain, hf, ...: one synthetic batch, the same at every step"
    )
    group.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="train on these UTF-8 files, one token a byte; nothing is downloaded",
    )
    switch(
        group,
        "--use-tfds-dataset",
        "read a TensorFlow dataset (needs tensorflow-datasets, --dataset-path and --dataset-name)",
    )
    group.add_argument("--dataset-path", metavar="DIR", help="where the TensorFlow datasets lie")
    group.add_argument("--dataset-name", metavar="NAME", help="which of them, e.g. c4/en:3.0.1")
    group.add_argument(
        "--tokenizer-path",
        metavar="PATH",
        help=(
            "tokenizer of --use-tfds-dataset or of dataset_type=grain, hf, ...: a file of SentencePiece; with "
            "tokenizer_type=tiktoken or huggingface a file or a folder of theirs"
        ),
    )


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
    group.add_argument("--overwrite", action="store_true", help="remove the run that --output holds, and begin anew")
    group.add_argument(
        "--metrics-file",
        type=Path,
        metavar="FILE",
        help="one JSON object a step: loss, gradient norms, times (default: metrics.jsonl in the output folder)",
    )
    group.add_argument(
        "--metrics-hook",
        metavar="MODULE:FUNCTION",
        help=(
            "call this function with the record of each step and evaluation, a dictionary, in the process that you "
            "start (of several the first): for wandb, MLflow, .... Its errors are told, and training goes on"
        ),
    )
    group.add_argument(
        "--prometheus",
        type=Path,
        metavar="FILE.prom",
        help="write loss, times, MFU, memory and goodput of the newest step there, for node_exporter (its textfiles)",
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
    switch(
        group,
        "--profile",
        "record a profile of some steps after the first (xplane, in the output folder); backend multimesh also "
        "measures every kernel and draws timelines of the step (default off)",
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
        "--checkpoint-every", type=count(1), metavar="N", help="... after steps 0, N, 2N, ... (default 100)"
    )
    group.add_argument(
        "--keep-checkpoints",
        type=count(1),
        default=5,
        metavar="N",
        help="keep the newest N checkpoints in --checkpoint, and remove older ones there (default 5)",
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
        "--export",
        type=Path,
        metavar="DIR",
        help=(
            "do not train: write the parameters of the newest checkpoint in --checkpoint to a new folder, as MaxText's "
            "to_huggingface and load_parameters_path= read them; with --no-scan-layers layer by layer"
        ),
    )
    group.add_argument(
        "--eval-every", type=count(1), metavar="N", help="evaluate after steps 0, N, 2N, ... (default: never)"
    )
    group.add_argument(
        "--eval-steps",
        type=count(1),
        metavar="N",
        help="batches in an evaluation, each as large as a microbatch over all domains (default 4)",
    )


def _runtime(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("memory and runtime")
    group.add_argument(
        "--forecast",
        action="store_true",
        help=(
            "print the memory that the devices of each stage will need, from shapes alone, and how long they wait for "
            "each other; train nothing. It needs none of the devices that the other flags ask for (multimesh)"
        ),
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help=(
            "with --forecast: compile the kernels of every stage for the GPUs of --device, none of which need be here, "
            "and take the memory that XLA gives them; refuse what does not fit. Equal stages are compiled once"
        ),
    )
    group.add_argument(
        "--suggest",
        action="store_true",
        help=(
            "find the fastest dp, fsdp, tp, pp, ep, interleave, schedule, microbatch size, remat and partition for "
            "--nodes x --gpus of --device, and print the command line of the best; what other flags say stays; train "
            "nothing"
        ),
    )
    group.add_argument(
        "--budget",
        type=rate,
        metavar="TOKENS",
        help="with --suggest: for the fewest nodes, up to --nodes, that reach so many tokens a second",
    )
    group.add_argument(
        "--precision",
        choices=("bf16", "fp8"),
        help="with --suggest: of products; fp8 adds quantization=fp8_full by Qwix to the command line (default: bf16)",
    )
    group.add_argument(
        "--picture", type=Path, metavar="FILE", help="with --suggest: draw memory against the time of a step, as SVG"
    )
    group.add_argument(
        "--confirm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --suggest: make the plans of the three best, and look whether their memory suffices (default on)",
    )
    group.add_argument(
        "--device-memory",
        type=parse_size,
        metavar="SIZE",
        help=(
            "forecast, and refuse a run that needs more on a device than this, e.g. 80GiB (multimesh; default: the "
            "part of a GPU's memory that JAX takes, where the GPU can be seen or is named by --device)"
        ),
    )
    group.add_argument(
        "--device",
        choices=DEVICES,
        help=(
            "with --forecast or --suggest: estimate tokens a second on these GPUs, and take the part of their memory "
            "that JAX takes (3/4, or --fbmem) as the limit"
        ),
    )
    group.add_argument(
        "--fbmem",
        type=count(0),
        metavar="N",
        help=(
            "GPU memory to reserve per device, in GB below 1000, in MB from there on: becomes JAX's memory fraction, "
            "which is printed (default: JAX's own)"
        ),
    )
    group.add_argument(
        "--debug",
        choices=("none", "info", "debug", "spew"),
        default="none",
        help="how much JAX and XLA log (default none)",
    )
    switch(group, "--debug-nccl", "let NCCL log what it does")


GROUPS = (
    _processes,
    _parallelism,
    _loop,
    _model,
    _data,
    _outputs,
    _checkpoints,
    _runtime,
    *compiler_flags.GROUPS,
)
"""Each adds its group to a parser, in the order of the help."""
