"""Everything that can be wrong with a command line, found before a process starts. Each message ends with a remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multimesh.errors import MissingPartError, UnsupportedError, UsageError
from multimesh_maxtext.memory import parse_size
from multimesh_maxtext.model import Model
from multimesh_maxtext.options import Options
from multimesh_maxtext.ordering import check_schedule
from multimesh_maxtext.placeable import check_placeable
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

    @property
    def stacks(self) -> frozenset[str]:
        """Names of the stacks of scanned layers in the train state: one of all layers, or one of each piece."""
        if not self.options.staged:
            return frozenset({"layers"})
        size = self.model.layers // (self.options.pp * self.options.interleave)
        return frozenset(f"layers_{first}_{first + size - 1}" for first in range(0, self.model.layers, size))


def check_backend(options: Options) -> None:
    """Raise for what the chosen backend cannot do at all."""
    for name, reason in MULTIMESH_ONLY.items():
        if not options.has(name):
            continue
        flag = "--" + name.replace("_", "-")
        if options.backend != "multimesh":
            raise UnsupportedError(f"--backend {options.backend} has no use for {flag}: {reason}; leave it out")
        _refuse(options.pp == 1, f"{flag} is about pipeline stages; add --pp")
    if options.nodes > 1 and options.staged:
        raise UnsupportedError(
            f"a pipeline of --backend multimesh is one process for now; use --backend spmd, or --nodes 1 with "
            f"{'--gpus' if options.gpus else '--cpus'} {options.parallelism} in place of --nodes {options.nodes}"
        )


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
    if o.device_memory:
        parse_size(o.device_memory)
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


def check_machine(options: Options, *, visible_gpus: int | None, has_tfds: bool) -> None:
    """Raise for what this machine lacks.

    Parameters
    ----------
    visible_gpus
        How many GPUs the driver shows, ``None`` if there is no driver.
    has_tfds
        Whether tensorflow-datasets is installed.
    """
    if options.gpus > (visible_gpus or 0):
        there = "no GPU" if not visible_gpus else f"{visible_gpus} GPUs"
        raise MissingPartError(f"--gpus {options.gpus}, but {there} can be seen here; check nvidia-smi, or use --cpus")
    if options.use_tfds_dataset and not has_tfds:
        raise MissingPartError("--use-tfds-dataset needs a package: pip install tensorflow-datasets, or use --text")


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise UsageError(message)
