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
    add = root.add_argument_group("processes and devices").add_argument
    text = (
        "the way a pipeline runs: 'multimesh' gives every stage kernels of its own (default); 'spmd' is "
        "MaxText alone, its own pipeline in one program; 'cuda' and 'cpu' are spmd on that platform; 'legate' is "
        "an old name of 'multimesh'. Without --pp all are MaxText as it is"
    )
    add("--backend", choices=BACKENDS, default="multimesh", help=text)
    text = "number of processes in all; one per GPU is usual on a cluster (default 1)"
    add("--nodes", type=count(1), default=1, metavar="N", help=text)
    text = "GPUs per process (default 0: train on CPU devices)"
    add("--gpus", type=count(0), default=0, metavar="N", help=text)
    text = (
        "CPU devices per process, virtual ones on any number of cores; beside --gpus only the GPUs train"
        " (default: as many as the parallelism asks for)"
    )
    add("--cpus", type=count(1), metavar="N", help=text)
    text = "start all --nodes processes here rather than one of them under srun or mpirun"
    add("--spawn", action="store_true", help=text)
    text = (
        "start all processes again from the last checkpoint when one is lost, at most K times: with --spawn, in "
        "the batch scripts for Slurm beside run.py, or by Kubernetes (default 0)"
    )
    add("--max-restarts", type=count(0), metavar="K", help=text)
    text = (
        "with --max-restarts, grids to go on with when a restart cannot have as many processes: the first that "
        "fits what is left, with the same global batch; axes that it does not name stay ('pp=4,dp=2; pp=4,dp=1'); "
        "auto: the planner chooses the best of the most processes"
    )
    add("--fallback", type=fallback, metavar="GRID;GRID;...|auto", help=text)
    text = "print the grid and those of --fallback, each after its number of processes, and end; for batch scripts"
    add("--show-grids", action="store_true", help=text)
    for name, text in TIMEOUTS.items():
        add(f"--{name}-timeout", type=rate, metavar="SECONDS", help=text)


def _parallelism(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group(
        "parallelism", "dp x fsdp x tp x cp x pp x ep must equal the devices of all processes"
    )
    add = group.add_argument
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
        add(flag, type=count(1), default=1, metavar="N", help=f"{text} (default 1)")
    text = (
        "decoder layers of each piece, in the order of the model: auto cuts such that no piece holds up the "
        "others, with the embedding and the logits at the ends (default: equal pieces, or auto where pp x "
        "interleave does not divide the layers)"
    )
    add("--partition", type=partition, metavar="auto|N,N,...", help=text)
    text = "shard activations between tensor-parallel blocks along the sequence (default off)"
    switch(group, "--sequence-parallel", text)
    text = (
        "1: moments of the optimizer are laid out over dp too, and each device updates its part of parameters; "
        "2: gradients as well, so that each device gets its part of their sum alone, in half the bytes (default 0)"
    )
    add("--zero", type=int, choices=(0, 1, 2), default=0, help=text)
    text = (
        "gather the parameters that --fsdp shards once a step, and reduce their gradients once, not for each "
        "microbatch of a pipeline; both then lie whole on each device, the optimizer state stays sharded (default off)"
    )
    switch(group, "--gather-once", text)


def _loop(root: argparse.ArgumentParser) -> None:
    add = root.add_argument_group(
        "training loop", "microbatches = batch size / (dp x fsdp x ep x microbatch size)"
    ).add_argument
    add("--num-steps", type=count(1), default=10, metavar="N", help="optimizer steps (default 10)")
    text = "sequences in one step over all devices (default: 2 x devices)"
    add("--batch-size", type=count(1), metavar="N", help=text)
    text = (
        "sequences that a tensor-parallel domain works on at once (default 1): batch 1024 with dp 8 and "
        "microbatch size 4 makes 32 microbatches. Without --pp they are gradient accumulation"
    )
    add("--microbatch-size", type=count(1), default=1, metavar="N", help=text)
    text = (
        "order of the microbatches in a pipeline of backend multimesh (default 1f1b, with --interleave "
        "interleaved; spmd has only MaxText's own); auto measures the kernels of a step before the first, "
        "searches for the shortest order in the memory of 1f1b, or up to --device-memory, and writes "
        f"schedule.json. Names: {', '.join(SCHEDULES)}"
    )
    add("--schedule", choices=SCHEDULES, metavar="NAME", help=text)
    text = (
        "JSON table for --schedule custom: per stage a list of cells, F0 the forward of piece 0 for the next "
        "microbatch, B0 its backward; or the schedule.json of --schedule auto"
    )
    add("--custom-schedule-path", type=Path, metavar="FILE", help=text)
    text = "seed of the initial parameters and of the order of the data (default 0)"
    add("--seed", type=count(0), default=0, metavar="N", help=text)


def _model(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("model", "without --model-name: a small llama that trains on a laptop")
    add = group.add_argument
    text = "a model that MaxText knows (llama3-8b, gpt3-175b, mixtral-8x7b, ...); the size flags below override it"
    add("--model-name", metavar="NAME", help=text)
    text = "MaxText configuration to start from in place of its base.yml"
    add("--maxtext-config", type=Path, metavar="FILE", help=text)
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
        add(flag, type=count(1), metavar="N", help=text)
    text = "tokens in a sequence (default 128)"
    add("--sequence-length", type=count(1), default=128, metavar="N", help=text)
    text = (
        "attention kernel; dot_product runs everywhere, cudnn_flash_te is cudnn_flash_jax where TransformerEngine "
        "is missing (default autoselected)"
    )
    add("--attention", choices=ATTENTION, default="autoselected", help=text)
    text = "global, local_sliding, chunk, ...: MaxText's attention_type (default: the model's)"
    add("--attention-type", metavar="TYPE", help=text)
    text = (
        f"what the backward pass recomputes rather than keeps: {', '.join(REMAT)} (default minimal; minimal_flash "
        "is an old name of minimal_with_context)"
    )
    add("--remat", choices=REMAT, default="minimal", metavar="POLICY", help=text)
    text = (
        "compile one layer and scan over it, in a pipeline over the layers of a piece, or unroll the layers; either "
        "draws other parameters from a seed (default: unroll, but in MaxText's own pipeline, which can only scan)"
    )
    switch(group, "--scan-layers", text)
    switch(group, "--use-iota-embed", "look embeddings up by a product with one-hot rows (default: the model's)")
    switch(group, "--logits-dot-in-fp32", "compute the logits in float32 (default: the model's)")


def _data(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group(
        "data", "without these or dataset_type=grain, hf, ...: one synthetic batch, the same at every step"
    )
    add = group.add_argument
    text = "train on these UTF-8 files, one token a byte; nothing is downloaded"
    add("--text", type=Path, nargs="+", metavar="FILE", help=text)
    text = "read a TensorFlow dataset (needs tensorflow-datasets, --dataset-path and --dataset-name)"
    switch(group, "--use-tfds-dataset", text)
    add("--dataset-path", metavar="DIR", help="where the TensorFlow datasets lie")
    add("--dataset-name", metavar="NAME", help="which of them, e.g. c4/en:3.0.1")
    text = (
        "tokenizer of --use-tfds-dataset or of dataset_type=grain, hf, ...: a file of SentencePiece; with "
        "tokenizer_type=tiktoken or huggingface a file or a folder of theirs"
    )
    add("--tokenizer-path", metavar="PATH", help=text)


def _outputs(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("outputs")
    add = group.add_argument
    text = (
        "folder for metrics, log and everything MaxText writes (default: a fresh temporary one, whose path is printed)"
    )
    add("--output", type=Path, metavar="DIR", help=text)
    add("--overwrite", action="store_true", help="remove the run that --output holds, and begin anew")
    text = "one JSON object a step: loss, gradient norms, times (default: metrics.jsonl in the output folder)"
    add("--metrics-file", type=Path, metavar="FILE", help=text)
    text = (
        "call this function with the record of each step and evaluation, a dictionary, in the process that you "
        "start (of several the first): for wandb, MLflow, .... Its errors are told, and training goes on"
    )
    add("--metrics-hook", metavar="MODULE:FUNCTION", help=text)
    text = "write loss, times, MFU, memory and goodput of the newest step there, for node_exporter (its textfiles)"
    add("--prometheus", type=Path, metavar="FILE.prom", help=text)
    text = "print the exact command, environment and configuration, start nothing"
    add("--dry-run", action="store_true", help=text)
    text = "print one JSON object for machines instead of progress and table"
    add("--json", action="store_true", help=text)
    text = (
        "train once more without the pipeline (backend spmd, the devices of one stage, the same microbatches "
        "accumulated) and compare loss and gradient norm of every step; they must agree to 1e-5"
    )
    add("--verify", action="store_true", help=text)
    text = (
        "before training let all processes run `python -m multimesh check --quick`, and train only if it passes; its "
        "table goes to stderr, and nodes at fault to unfit-nodes in --output (default off)"
    )
    switch(group, "--check", text)
    text = (
        "record a profile of some steps after the first (xplane, in the output folder); backend multimesh also "
        "measures every kernel and draws timelines of the step (default off)"
    )
    switch(group, "--profile", text)


def _checkpoints(root: argparse.ArgumentParser) -> None:
    add = root.add_argument_group(
        "checkpoints and evaluation", "steps are counted from 0, as in the metrics file: checkpoint N is after step N"
    ).add_argument
    text = "write checkpoints here while training goes on (Orbax), the last one after the last step"
    add("--checkpoint", type=Path, metavar="DIR", help=text)
    text = "... after steps 0, N, 2N, ... (default 100)"
    add("--checkpoint-every", type=count(1), metavar="N", help=text)
    text = "keep the newest N checkpoints in --checkpoint, and remove older ones there (default 5)"
    add("--keep-checkpoints", type=count(1), default=5, metavar="N", help=text)
    text = (
        "go on from the newest checkpoint in --checkpoint, with any --pp, --dp, --fsdp, --tp or --backend; from "
        "step 0 if there is none. --num-steps counts from step 0 also then"
    )
    add("--resume", action="store_true", help=text)
    text = (
        "do not train: write the parameters of the newest checkpoint in --checkpoint to a new folder, as MaxText's "
        "to_huggingface and load_parameters_path= read them; with --no-scan-layers layer by layer"
    )
    add("--export", type=Path, metavar="DIR", help=text)
    text = "evaluate after steps 0, N, 2N, ... (default: never)"
    add("--eval-every", type=count(1), metavar="N", help=text)
    text = "batches in an evaluation, each as large as a microbatch over all domains (default 4)"
    add("--eval-steps", type=count(1), metavar="N", help=text)


def _runtime(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("memory and runtime")
    add = group.add_argument
    text = (
        "print the memory that the devices of each stage will need, from shapes alone, and how long they wait for "
        "each other; train nothing. It needs none of the devices that the other flags ask for (multimesh)"
    )
    add("--forecast", action="store_true", help=text)
    text = (
        "with --forecast: compile the kernels of every stage for the GPUs of --device, none of which need be here, "
        "and take the memory that XLA gives them; refuse what does not fit. Equal stages are compiled once"
    )
    add("--compile", action="store_true", help=text)
    text = (
        "compile the kernels of the step and write them to this new folder, for --precompiled; train nothing. With "
        "--gpus and --device for GPUs, none of which need be here; prints what --forecast --compile does (multimesh)"
    )
    add("--precompile", type=Path, metavar="FOLDER", help=text)
    text = "load the kernels of the step from this folder of --precompile, and compile none of them (multimesh)"
    add("--precompiled", type=Path, metavar="FOLDER", help=text)
    text = (
        "find the fastest dp, fsdp, tp, pp, ep, interleave, schedule, microbatch size, remat and partition for "
        "--nodes x --gpus of --device, and print the command line of the best; what other flags say stays; train "
        "nothing"
    )
    add("--suggest", action="store_true", help=text)
    text = "with --suggest: for the fewest nodes, up to --nodes, that reach so many tokens a second"
    add("--budget", type=rate, metavar="TOKENS", help=text)
    text = "with --suggest: of products; fp8 adds quantization=fp8_full by Qwix to the command line (default: bf16)"
    add("--precision", choices=("bf16", "fp8"), help=text)
    text = "with --suggest: draw memory against the time of a step, as SVG"
    add("--picture", type=Path, metavar="FILE", help=text)
    text = "with --suggest: make the plans of the three best, and look whether their memory suffices (default on)"
    add("--confirm", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = (
        "forecast, and refuse a run that needs more on a device than this, e.g. 80GiB (multimesh; default: the "
        "part of a GPU's memory that JAX takes, where the GPU can be seen or is named by --device)"
    )
    add("--device-memory", type=parse_size, metavar="SIZE", help=text)
    text = (
        "with --forecast or --suggest: estimate tokens a second on these GPUs, and take the part of their memory "
        f"that JAX takes (3/4, or --fbmem) as the limit: {', '.join(DEVICES)}"
    )
    add("--device", choices=DEVICES, metavar="NAME", help=text)
    text = (
        "GPU memory to reserve per device, in GB below 1000, in MB from there on: becomes JAX's memory fraction, "
        "which is printed (default: JAX's own)"
    )
    add("--fbmem", type=count(0), metavar="N", help=text)
    text = "how much JAX and XLA log (default none)"
    add("--debug", choices=("none", "info", "debug", "spew"), default="none", help=text)
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
