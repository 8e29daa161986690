"""Everything that can be wrong with a command line, found before a process starts. Each message ends with a remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multimesh
from multimesh_maxtext.errors import MissingPartError, UnsupportedError, UsageError
from multimesh_maxtext.model import Model
from multimesh_maxtext.options import Options
from multimesh_maxtext.text import BYTE_TOKENS, BYTE_VOCABULARY

MULTIMESH_ONLY = {
    "schedule": "it runs MaxText's own circular pipeline",
    "custom_schedule_path": "it runs MaxText's own circular pipeline",
    "load_balance_decoder_norm": "MaxText deals whole layers",
    "forecast": "it has no plan to forecast from",
    "device_memory": "it has no plan to forecast from",
    "dump_mpmd_passes": "it has one program and no MultiMesh passes",
    "dump_only": "MaxText compiles when it trains; use --num-steps 1",
    "autoshard": "MaxText shards by its own rules",
    "replicate_small_params": "MaxText shards by its own rules",
    "fuse_tasks": "it has no tasks",
    "only_fuse_loop_tasks": "it has no tasks",
    "host_offload_min_reuse_distance": "it has no tasks",
    "verify": "it is what a pipeline is compared with",
}
"""Flags that only the multimesh backend can honour, and why spmd cannot."""

_LATER = (
    "load_balance_decoder_norm",
    *("autoshard", "replicate_small_params", "fuse_tasks", "only_fuse_loop_tasks"),
    *("host_offload_min_reuse_distance",),
)
"""Flags that the backend does not honour yet."""

_ABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "decoder_block": (
        (
            *("llama2", "default", "mistral", "gpt3", "mixtral"),
            *("gemma", "gemma2", "qwen2", "qwen3", "qwen3_moe"),
        ),
        "its layers are no plain sequence, or were never tried",
    ),
    "inhomogeneous_layer_cycle_interval": ((1,), "its layers come in groups"),
    "global_parameter_scale": ((1,), "it changes the number of layers"),
    "mhc_expansion_rate": ((1,), "its streams were never tried"),
    "pure_nnx": ((True,), "only NNX models have the hooks"),
    "pure_nnx_decoder": ((True,), "only NNX models have the hooks"),
    "engram_layers": (([], None), "they read tokens inside of layers"),
    "mtp_num_layers": ((0,), "they come after the last stage"),
    "use_multimodal": ((False,), "the vision encoder has no stage"),
    "enable_diloco": ((False,), "its state has another shape"),
    "quantization": (("", None), "its state is not placed"),
    "num_vocab_tiling": ((1,), "its loop crosses the last stage"),
    "parameter_memory_host_offload": ((False,), "host memory is not placed"),
    "optimizer_memory_host_offload": ((False,), "host memory is not placed"),
    "shard_optimizer_over_data": ((False,), "it moves the whole state to one mesh"),
    "shard_mode": (("auto",), "explicit shardings name one mesh"),
    "opt_type": (("adamw", "adam_pax", "sgd", "muon"), "its state was never placed"),
    "compile_xla_flags": (("",), "it is for one program"),
    "compiled_trainstep_file": (("",), "it holds one program"),
    "elastic_enabled": ((False,), "it changes the devices"),
}
"""MaxText's setting to the values that stages can run with, and why not others."""


@dataclass(frozen=True)
class Job:
    """A command line that fits together: the devices, the batch, and how it is cut."""

    options: Options
    model: Model
    devices: int
    batch: int
    microbatches: int

    @property
    def mesh_devices(self) -> int:
        """Devices of MaxText's mesh: those of one stage where stages are programs of their own."""
        return self.devices // self.options.pp if self.options.staged else self.devices

    @property
    def scans_layers(self) -> bool:
        """Whether MaxText scans over stacks of layers: of all layers, or of each piece of a stage."""
        given = self.options.scan_layers
        return not self.options.staged if given is None else given


def check_backend(options: Options) -> None:
    """Raise for what the chosen backend cannot do at all."""
    for name, reason in MULTIMESH_ONLY.items():
        if not options.has(name):
            continue
        flag = "--" + name.replace("_", "-")
        if options.backend != "multimesh":
            raise UnsupportedError(f"--backend {options.backend} has no use for {flag}: {reason}; leave it out")
        _refuse(options.pp == 1, f"{flag} is about pipeline stages; add --pp")


def check_flags(options: Options) -> None:
    """Raise for flags that do not fit together, whatever the model."""
    o = options
    _refuse(o.backend == "cuda" and not o.gpus, "--backend cuda needs GPUs; add --gpus N or use --backend spmd")
    _refuse(o.backend == "cpu" and o.gpus > 0, f"--backend cpu trains on CPU devices; remove --gpus {o.gpus}")
    _refuse(o.interleave > 1 and o.pp == 1, f"--interleave {o.interleave} cuts pipeline stages into pieces; add --pp")
    _refuse(o.sequence_parallel and o.tp == 1, "--sequence-parallel shards between tensor-parallel blocks; add --tp")
    _refuse(
        o.scan_layers is False and o.pp > 1 and not o.staged,
        "MaxText's own pipeline scans over layers; remove --no-scan-layers or --pp",
    )
    _refuse(
        o.platform == "cpu" and o.attention in ("flash", "cudnn_flash_te"),
        f"--attention {o.attention} is a GPU kernel; on CPU devices use --attention dot_product",
    )
    _refuse(bool(o.text) and o.use_tfds_dataset, "--text and --use-tfds-dataset are two sources; choose one")
    for flag, value in (
        ("--dataset-path", o.dataset_path),
        ("--dataset-name", o.dataset_name),
        ("--tokenizer-path", o.tokenizer_path),
    ):
        remedy = "with --text every byte is a token" if o.text else "add --use-tfds-dataset"
        _refuse(bool(value) and not o.use_tfds_dataset, f"{flag} is for TensorFlow datasets; {remedy}, or remove it")
    missing = not (o.dataset_path and o.dataset_name)
    _refuse(
        o.use_tfds_dataset and missing, "--use-tfds-dataset needs to know which; add --dataset-path and --dataset-name"
    )
    for name, needed in (
        *(("checkpoint_every", "checkpoint"), ("resume", "checkpoint"), ("eval_steps", "eval_every")),
    ):
        missing_one = o.has(name) and not o.has(needed)
        _refuse(missing_one, f"--{name.replace('_', '-')} needs --{needed.replace('_', '-')}; add it")
    _refuse(
        bool(o.checkpoint) and o.verify,
        "--verify trains twice from step 0 to compare; leave out --checkpoint or --verify",
    )
    dumps = ("hlo", "dump_all_passes", "dump_mpmd_passes", "dump_only")
    for flag, given in (("--" + name.replace("_", "-"), o.has(name)) for name in dumps):
        _refuse(given and not o.dump, f"{flag} says how to dump; add --dump DIR")
    for file in o.text or ():
        _refuse(not file.is_file(), f"--text {file}: no such file; KEY=VALUE and further flags go before --text")


def check_job(options: Options, model: Model) -> Job:
    """Return the job that the flags describe.

    Raises
    ------
    UsageError
        Where a product or a division does not come out; the message names a value that would.
    """
    o = options
    per_process = o.gpus or o.cpus or o.parallelism
    devices = o.nodes * per_process
    _check_devices(o, devices)
    _check_model(o, model)
    batch = o.batch_size or 2 * devices
    rows = o.domains * o.microbatch_size
    if batch % rows:
        near = max(rows, round(batch / rows) * rows)
        raise UsageError(
            f"a batch of {batch} is no multiple of dp x fsdp x ep x microbatch size = {o.dp} x {o.fsdp} x {o.ep} x "
            f"{o.microbatch_size} = {rows}; use --batch-size {near}"
        )
    microbatches = batch // rows
    if o.staged:
        check_placeable(o, model)
        check_schedule(o, microbatches)
    elif o.pp > 1 and microbatches % o.pp:
        near = max(1, round(microbatches / o.pp)) * o.pp
        raise UsageError(
            f"MaxText's own pipeline needs a multiple of pp = {o.pp} microbatches, not {microbatches}; "
            f"use --batch-size {near * rows}"
        )
    job = Job(options, model, devices, batch, microbatches)
    _check_shares(job, rows)
    return job


def find_schedule(name: str, table: Path | str | None) -> multimesh.schedules.Schedule:
    """Return a schedule by its name, or that of a user's table."""
    return multimesh.schedules.get(name) if table is None else multimesh.schedules.load(table)


def schedule_name(options: Options) -> str:
    """Return the name of the schedule: by default 1F1B, interleaved where stages have several pieces."""
    return options.schedule or ("interleaved" if options.interleave > 1 else "1f1b")


def check_schedule(options: Options, microbatches: int) -> None:
    """Raise for a schedule that cannot order these stages and microbatches.

    Raises
    ------
    UsageError
        Naming the flag to change, or the cell of the table that is wrong.
    """
    name, path = schedule_name(options), options.custom_schedule_path
    if (name == "custom") != (path is not None):
        raise UsageError(
            "--schedule custom needs a table; add --custom-schedule-path FILE"
            if path is None
            else f"--custom-schedule-path {path} is for --schedule custom; add that or leave it out"
        )
    if name == "interleaved" and options.interleave == 1:
        raise UsageError("--schedule interleaved is for stages of several pieces; add --interleave 2 or use 1f1b")
    try:
        schedule = find_schedule(name, path)
    except multimesh.UsageError as error:
        raise UsageError(str(error)) from None
    shape = options.pp, options.interleave, microbatches
    try:
        multimesh.schedules.validate(schedule.table(*shape, backward=True), *shape)
    except multimesh.UsageError as error:
        where = f"--custom-schedule-path {path}" if path else f"--schedule {name}"
        raise UsageError(
            f"{where}, --pp {shape[0]}, --interleave {shape[1]}, {shape[2]} microbatches: {error}"
        ) from None


def check_placeable(options: Options, model: Model) -> None:
    """Raise for a pipeline that the backend cannot run yet.

    Raises
    ------
    UnsupportedError
        Naming the flag or the setting, why, and what to use.
    """
    for name in _LATER:
        if options.has(name):
            raise UnsupportedError(f"--backend multimesh has no --{name.replace('_', '-')} yet; leave it out")
    for key, (values, reason) in _ABLE.items():
        value = model.resolved.get(key, values[0])
        if value not in values:
            raise UnsupportedError(
                f"--backend multimesh cannot train with {key}={value} yet: {reason}; "
                f"use {key}={values[0]} or --backend spmd"
            )


def _check_shares(job: Job, rows: int) -> None:
    """MaxText loads real data in equal shares per device of its mesh."""
    o, sharing = job.options, job.mesh_devices
    in_one_program = o.pp > 1 and not o.staged
    forward = job.batch if in_one_program else rows
    if (o.text or o.use_tfds_dataset) and forward > sharing and job.batch % sharing:
        raise UsageError(
            f"MaxText loads data in equal shares per device, and {sharing} devices do not divide a batch of "
            f"{job.batch}; use --batch-size {math.lcm(rows * (o.pp if in_one_program else 1), sharing)}"
        )


def _check_devices(o: Options, devices: int) -> None:
    if o.parallelism == devices:
        return
    product = f"{o.dp} x {o.fsdp} x {o.tp} x {o.pp} x {o.ep} = {o.parallelism}"
    if devices % (o.parallelism // o.dp) == 0:
        remedy = f"use --dp {devices // (o.parallelism // o.dp)}"
    else:
        remedy = f"use {'--gpus' if o.gpus else '--cpus'} {-(-o.parallelism // o.nodes)}"
    raise UsageError(f"dp x fsdp x tp x pp x ep = {product}, but there are {devices} devices; {remedy}")


def _check_model(o: Options, model: Model) -> None:
    pieces = o.pp * o.interleave
    if model.layers % pieces:
        near = max(1, round(model.layers / pieces)) * pieces
        raise UsageError(
            f"{model.layers} layers cannot be dealt to pp x interleave = {o.pp} x {o.interleave} = {pieces} pieces; "
            f"use --num-layers {near} or another --pp or --interleave"
        )
    for name, size, flag, parts, remedy in (
        ("attention heads", model.query_heads, "--tp", o.tp, "--num-heads"),
        ("key/value heads", model.kv_heads, "--tp", o.tp, "--num-heads"),
        ("mlp dims", model.mlp, "--tp", o.tp, "--mlp-dims"),
        ("vocabulary", model.vocabulary, "--tp", o.tp, "vocab_size="),
        ("model dims", model.embedding, "--fsdp", o.fsdp, "--model-dims"),
        ("experts", model.experts, "--ep", o.ep, "num_experts="),
        ("sequence", o.sequence_length, "--tp", o.tp if o.sequence_parallel else 1, "--sequence-length"),
    ):
        if size % parts:
            raise UsageError(f"{flag} {parts} does not divide the {name} ({size}); change {flag} or {remedy}")
    if o.platform == "cpu" and o.ep > 1 and model.resolved.get("sparse_matmul"):
        raise UnsupportedError(
            f"--ep {o.ep}: with sparse_matmul=True experts exchange tokens by an operation that XLA lacks on CPU "
            "devices; add sparse_matmul=false"
        )
    _refuse(
        bool(o.text) and model.vocabulary < BYTE_TOKENS,
        f"--text needs {BYTE_TOKENS} tokens (bytes and the end of a document), the model has {model.vocabulary}; "
        f"use vocab_size={BYTE_VOCABULARY}",
    )


def check_machine(options: Options, *, visible_gpus: int | None, has_plugin: bool, has_tfds: bool) -> None:
    """Raise for what this machine lacks.

    Parameters
    ----------
    visible_gpus
        How many GPUs the driver shows, ``None`` if there is no driver.
    has_plugin
        Whether JAX has its plugin for CUDA: without it JAX runs on the CPU, and only warns.
    has_tfds
        Whether tensorflow-datasets is installed.
    """
    if options.gpus > (visible_gpus or 0):
        there = "no GPU" if not visible_gpus else f"{visible_gpus} GPUs"
        raise MissingPartError(f"--gpus {options.gpus}, but {there} can be seen here; check nvidia-smi, or use --cpus")
    if options.gpus and not has_plugin:
        raise MissingPartError(f"--gpus {options.gpus}: JAX has no CUDA plugin here; ./bootstrap.sh --group cuda12")
    if options.use_tfds_dataset and not has_tfds:
        raise MissingPartError("--use-tfds-dataset needs a package: pip install tensorflow-datasets, or use --text")


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise UsageError(message)
