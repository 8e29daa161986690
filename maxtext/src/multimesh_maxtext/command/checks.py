"""Finds all that is wrong with a command line before a process starts. Each message ends with a remedy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import multimesh
from multimesh.planner import targets
from multimesh_maxtext.command import within_stage
from multimesh_maxtext.command.flags import TIMEOUTS
from multimesh_maxtext.command.model import Model, has_package
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.settings import read_dataset, read_values
from multimesh_maxtext.command.text import BYTE_TOKENS, BYTE_VOCABULARY
from multimesh_maxtext.errors import FileError, LauncherError, MissingPartError, UnsupportedError, UsageError
from multimesh_maxtext.handoff import find_schedule

MULTIMESH_ONLY = {
    "schedule": "it runs MaxText's own circular pipeline",
    "custom_schedule_path": "it runs MaxText's own circular pipeline",
    "partition": "its pieces have as many layers each",
    "gather_once": "it gathers parameters where XLA does",
    "forecast": "it has no plan to forecast from",
    "precompile": "it has no plan whose kernels could be written",
    "precompiled": "it has no plan whose kernels could be loaded",
    "device_memory": "it has no plan to forecast from",
    "dump_only": "MaxText compiles when it trains; use --num-steps 1",
    "verify": "it is what a pipeline is compared with",
}
"""Flags that only the multimesh backend can honour, and why spmd cannot."""

GPU_ATTENTION = ("flash", "cudnn_flash_te", "cudnn_flash_jax")
"""Kernels that CPU devices lack."""

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages with JAX's compiler for GPUs."""

UNTOKENIZED = ("synthetic", "olmo_grain")
"""Datasets of tokens: the synthetic one, and that of --text."""

UNLIKE = ("gemma3", "gemma4", "gpt_oss", "deepseek", "llama4", "olmo3", "qwen3_next", "qwen3_5", "envy")
"""Decoder blocks whose layers alternate in a fixed pattern, or begin with dense ones: stages of unlike structure."""

_READ_MORE = {
    "gemma4_small": "its last layers read keys and values of earlier ones",
    "deepseek4": "its layers read the tokens, and hand on several streams",
}
"""Decoder blocks whose layers read more than the result of the layer before. A stage gets no more than that."""

_ABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "decoder_block": (
        (
            *("llama2", "default", "mistral", "gpt3", "mixtral"),
            *("gemma", "gemma2", "qwen2", "qwen3", "qwen3_moe", "qwen3_custom_moe"),
            *UNLIKE,
        ),
        "its layers were never tried",
    ),
    "global_parameter_scale": ((1,), "it changes the number of layers"),
    "mhc_expansion_rate": ((1,), "its streams were never tried"),
    "engram_layers": (([], None), "they read tokens inside of layers"),
    "mtp_num_layers": ((0,), "they come after the last stage"),
    "use_multimodal": ((False,), "the vision encoder has no stage"),
    "enable_diloco": ((False,), "its state has another shape"),
    "training_objective": (("causal_lm",), "its losses were never tried"),
    "te_moe_block": ((False,), "its kernels were never tried"),
    "moe_dropless_fallback": (("None", None), "it has a second program"),
    "warmup_programs_in_init": ((False,), "it runs a step with another state"),
    "muon_type": (("optax_muon", "optax"), "its state was never placed"),
    "num_vocab_tiling": ((1,), "its loop crosses the last stage"),
    "parameter_memory_host_offload": ((False,), "host memory is not placed"),
    "optimizer_memory_host_offload": ((False,), "host memory is not placed"),
    "shard_optimizer_over_data": ((False,), "--zero does that for stages"),
    "use_batch_split_schedule": ((False,), "its attention is Splash, a kernel for TPUs"),
    "opt_type": (("adamw", "adam_pax", "sgd", "muon"), "its state was never placed"),
    "compile_xla_flags": (("",), "it is for one program"),
    "compiled_trainstep_file": (("",), "it holds one program"),
}
"""Settings of MaxText: the values that stages can run with, and why they cannot run with others."""


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
        """Devices of MaxText's mesh: those of one stage where each stage has kernels of its own."""
        if not self.options.staged:
            return self.devices
        return self.devices // self.options.pp or 1  # fewer devices than stages are refused elsewhere

    @property
    def readers(self) -> int:
        """Number of processes that read data: the first ones, which have the devices of MaxText's mesh."""
        return -(-self.mesh_devices * self.options.nodes // self.devices)

    @property
    def rows(self) -> int:
        """Sequences that go through the model at once: a microbatch, or what MaxText's own pipeline cuts itself."""
        return self.batch if self.options.pp > 1 and not self.options.staged else self.batch // self.microbatches

    @functools.cached_property
    def pieces(self) -> tuple[int, ...]:
        """Decoder layers of each piece of a stage: equal numbers, those of the user, or about equal costs."""
        o, layers, number = self.options, self.model.layers, self.options.pp * self.options.interleave
        if isinstance(o.partition, tuple):
            return o.partition
        if o.partition is None and layers % number == 0:
            return (layers // number,) * number
        costs = self.model.layer_costs(o.sequence_length, shards=o.tp * o.fsdp)
        shape: dict[str, Any] = {"microbatches": self.microbatches, "chunks": o.interleave}
        cut = multimesh.schedules.partition
        with contextlib.suppress(multimesh.UsageError):  # the forecast refuses it, with its numbers
            return cut(costs, o.pp, memory=o.device_memory, **shape).sizes
        return cut(costs, o.pp, **shape).sizes

    @functools.cached_property
    def route(self) -> tuple[int, ...]:
        """Stage of each piece under ``--schedule auto``; empty: the stages in turn.

        Two pieces a stage may go down the stages and back up. They do where that is estimated shorter, with no more
        activations than the best table of the stages in turn.
        """
        o = self.options
        if schedule_name(o) != multimesh.schedules.Auto.name or o.interleave != 2 or o.pp == 1:
            return ()
        layers = iter(self.model.layer_costs(o.sequence_length))
        times = [sum(layer.time for layer in itertools.islice(layers, size)) / 3 for size in self.pieces]
        costs = multimesh.schedules.StageCosts(
            tuple((time, time, time) for time in times), activations=tuple(map(float, self.pieces))
        )
        shape = o.pp, o.interleave, self.microbatches
        turned = multimesh.schedules.get("zb-v").placement(o.pp)
        plain = multimesh.schedules.Auto(costs, evaluations=0).choose(*shape).taken
        auto = multimesh.schedules.Auto(costs, memory=max(plain.peaks), route=turned, evaluations=0)
        with contextlib.suppress(multimesh.UsageError):  # no table of a V is within that memory
            return turned if auto.choose(*shape).taken.makespan < plain.makespan * (1 - 1e-9) else ()
        return ()

    @property
    def scans_layers(self) -> bool:
        """Whether MaxText scans over stacks of layers: of all layers, or of each piece of a stage."""
        o = self.options
        # The same seed gives other parameters to a scan, so all forms unroll but MaxText's own pipeline, which can't.
        return o.pp > 1 and not o.staged if o.scan_layers is None else o.scan_layers

    @property
    def alike(self) -> bool:
        """Whether all layers have one structure, so that a stack of them can be cut anywhere."""
        found = self.model.resolved
        return found.get("decoder_block") not in UNLIKE and found.get("inhomogeneous_layer_cycle_interval", 1) == 1


def find_wrong_flags(options: Options) -> Iterator[LauncherError]:
    """Yield the errors of flags that do not depend on the model."""
    o = options
    for name, reason in MULTIMESH_ONLY.items():
        if not o.has(name):
            continue
        flag = "--" + name.replace("_", "-")
        if o.backend != "multimesh":
            yield UnsupportedError(f"--backend {o.backend} has no use for {flag}: {reason}; leave it out")
        elif o.pp == 1:
            yield UsageError(f"{flag} is about pipeline stages; add --pp")
    for condition, error in _flags_apart(o):
        if condition:
            yield error


def _flags_apart(o: Options) -> Iterator[tuple[object, LauncherError]]:
    yield (
        o.backend == "cuda" and not o.gpus,
        UsageError("--backend cuda needs GPUs; add --gpus N or use --backend spmd"),
    )
    yield o.backend == "cpu" and o.gpus > 0, UsageError(f"--backend cpu trains on CPU devices; remove --gpus {o.gpus}")
    yield (
        o.interleave > 1 and o.pp == 1,
        UsageError(f"--interleave {o.interleave} cuts pipeline stages into pieces; add --pp"),
    )
    yield (
        o.sequence_parallel and o.tp == 1,
        UsageError("--sequence-parallel shards between tensor-parallel blocks; add --tp"),
    )
    yield o.zero and o.dp == 1, UsageError(f"--zero {o.zero} lays moments out over data parallelism; add --dp")
    yield o.zero > 1 and not o.staged, UsageError("--zero 2 is for pipelines; MaxText alone has --zero 1, or add --pp")
    yield (
        o.zero and o.fsdp > 1 and not o.staged,
        UsageError("--zero 1 and --fsdp exclude each other in MaxText alone; --fsdp shards the moments already"),
    )
    yield o.gather_once and o.fsdp == 1, UsageError("--gather-once is about parameters that --fsdp shards; add --fsdp")
    yield (
        o.scan_layers is False and o.pp > 1 and not o.staged,
        UsageError("MaxText's own pipeline scans over layers; remove --no-scan-layers or --pp"),
    )
    yield (
        o.platform == "cpu" and o.attention in GPU_ATTENTION,
        UsageError(f"--attention {o.attention} is a GPU kernel; on CPU devices use --attention dot_product"),
    )
    yield (
        read_values(o.settings).get("enable_tensorboard") is True and not has_package("tensorboardX"),
        MissingPartError("enable_tensorboard=true needs tensorboardX; run ./bootstrap.sh --group run, or leave it out"),
    )
    yield o.text and o.use_tfds_dataset, UsageError("--text and --use-tfds-dataset are two sources; choose one")
    for flag, value in (("--dataset-path", o.dataset_path), ("--dataset-name", o.dataset_name)):
        remedy = "remove it: with --text every byte is a token" if o.text else "add --use-tfds-dataset, or remove it"
        yield value and not o.use_tfds_dataset, UsageError(f"{flag} is for TensorFlow datasets; {remedy}")
    remedy = "remove it: with --text every byte is a token" if o.text else "add dataset_type=, or remove it"
    yield (
        o.tokenizer_path and read_dataset(o) in UNTOKENIZED,
        UsageError(f"--tokenizer-path is for datasets of text; {remedy}"),
    )
    yield (
        o.use_tfds_dataset and not (o.dataset_path and o.dataset_name),
        UsageError("--use-tfds-dataset needs to know which; add --dataset-path and --dataset-name"),
    )
    for name, needed in (
        *((name, "checkpoint") for name in ("checkpoint_every", "resume", "export", "max_restarts", "fallback")),
        *(("eval_steps", "eval_every"), ("fallback", "max_restarts"), ("device", "forecast"), ("overwrite", "output")),
        *(("budget", "suggest"), ("picture", "suggest"), ("precision", "suggest"), ("compile", "forecast")),
    ):
        yield (
            getattr(o, name) and not o.has(needed),
            UsageError(f"--{name.replace('_', '-')} needs --{needed.replace('_', '-')}; add it"),
        )
    yield (
        o.compile and not (o.gpus and o.device in targets()),
        UsageError(f"--compile needs --gpus and a --device that can be compiled for: {', '.join(targets())}"),
    )
    yield (
        o.compile and not any(map(has_package, PLUGINS)),
        MissingPartError("--compile needs JAX's compiler for GPUs; run ./bootstrap.sh --group compile-gpu"),
    )
    yield (
        o.overwrite and o.resume,
        UsageError("--overwrite removes the run that --resume goes on with; choose one"),
    )
    yield (
        o.only_fuse_loop_tasks and o.fuse_tasks is False,
        UsageError("--only-fuse-loop-tasks says which tasks to fuse; remove it or --no-fuse-tasks"),
    )
    yield (
        o.max_restarts and o.nodes == 1 and not o.fallback,
        UsageError("--max-restarts is about losing one of several processes; add --nodes, or leave it out"),
    )
    for name in TIMEOUTS:
        yield (
            o.has(f"{name}_timeout") and o.nodes == 1 and not o.fallback,
            UsageError(f"--{name}-timeout is about waiting for other processes; add --nodes, or leave it out"),
        )
    yield (
        o.max_restarts and not o.spawn and not o.output,
        UsageError("--max-restarts finds out why from the logs of all processes; add --output, a folder that all see"),
    )
    yield (
        o.checkpoint and o.verify,
        UsageError("--verify trains twice from step 0 to compare; leave out --checkpoint or --verify"),
    )
    for name in ("export", "hlo"):  # a folder's flags are forecast and dumped as they are
        yield (
            o.check and o.has(name),
            UsageError(f"--check is for processes that train, --{name.replace('_', '-')} does not; leave out one"),
        )
    for name in ("dump_hlo", "dump_all_passes", "dump_mpmd_passes", "dump_only"):
        yield o.has(name) and not o.dump, UsageError(f"--{name.replace('_', '-')} says how to dump; add --dump DIR")
    yield (
        o.prometheus and not o.prometheus.absolute().parent.is_dir(),
        FileError(f"--prometheus {o.prometheus}: there is no such folder; make it, or choose another"),
    )
    yield o.hlo and not o.hlo.is_file(), FileError(f"--hlo {o.hlo}: no such file; write its path")
    for file in o.text or ():
        yield (
            not file.is_file(),
            FileError(f"--text {file}: no such file; KEY=VALUE and further flags go before --text"),
        )


def make_job(options: Options, model: Model) -> Job:
    """Return the job that flags describe, whether or not it comes out."""
    o = options
    devices = o.nodes * (o.gpus or o.cpus or o.parallelism)
    batch = o.batch_size or 2 * devices
    return Job(o, model, devices, batch, max(1, batch // (o.domains * o.microbatch_size)))


def find_wrong_sizes(job: Job) -> Iterator[LauncherError]:
    """Yield products and divisions that do not come out, with a value that would, and settings that stages lack."""
    o, rows = job.options, job.options.domains * job.options.microbatch_size
    counted = o.batch_size or job.devices == o.parallelism  # the batch is known, or follows from the devices
    yield from _wrong_devices(o, job.devices)
    yield from _wrong_model(o, job.model)
    layers, group = job.model.layers, job.model.resolved.get("inhomogeneous_layer_cycle_interval") or 1
    if job.scans_layers and o.pp == 1 and layers % group:
        whole = layers // group * group
        yield UsageError(
            f"{layers} layers are no multiple of inhomogeneous_layer_cycle_interval={group}: MaxText would scan over "
            f"{whole} of them; use --num-layers {whole + group} or --no-scan-layers"
        )
    if job.batch % rows and counted:
        near = max(rows, round(job.batch / rows) * rows)
        yield UsageError(
            f"a batch of {job.batch} is no multiple of dp x fsdp x ep x microbatch size = {o.dp} x {o.fsdp} x {o.ep} x "
            f"{o.microbatch_size} = {rows}; use --batch-size {near}"
        )
    if o.staged:
        yield from within_stage.find_uneven_quantization(o, job.model, job.mesh_devices)
        yield from _not_placeable(job)
        yield from _wrong_schedule(o, job.microbatches)
    elif o.pp > 1 and counted and job.microbatches % o.pp:
        near = max(1, round(job.microbatches / o.pp)) * o.pp
        yield UsageError(
            f"MaxText's own pipeline needs a multiple of pp = {o.pp} microbatches, not {job.microbatches}; "
            f"use --batch-size {near * rows}"
        )
    if job.batch % rows == 0:
        yield from _wrong_shares(job)


def schedule_name(options: Options) -> str:
    """Return the name of the schedule: by default 1F1B, interleaved where stages have several pieces."""
    return options.schedule or ("interleaved" if options.interleave > 1 else "1f1b")


def _wrong_schedule(options: Options, microbatches: int) -> Iterator[LauncherError]:
    """Yield why a schedule cannot order these stages: the flag to change, or the cell of the table."""
    name, path = schedule_name(options), options.custom_schedule_path
    if (name == "custom") != (path is not None):
        yield UsageError(
            "--schedule custom needs a table; add --custom-schedule-path FILE"
            if path is None
            else f"--custom-schedule-path {path} is for --schedule custom; add that or leave it out"
        )
        return
    if name == multimesh.schedules.Auto.name:
        return  # some order there always is
    try:
        schedule = find_schedule(name, path)
    except multimesh.UsageError as error:
        yield UsageError(str(error))
        return
    if schedule.usual > options.interleave == 1:
        yield UsageError(f"--schedule {name} is for stages of several pieces; add --interleave 2 or use 1f1b")
        return
    shape = options.pp, options.interleave, microbatches
    try:
        placement = schedule.placement(options.pp)
        multimesh.schedules.validate(schedule.table(*shape, backward=True), *shape, placement=placement)
    except multimesh.UsageError as error:
        where = f"--custom-schedule-path {path}" if path else f"--schedule {name}"
        yield UsageError(f"{where}, --pp {shape[0]}, --interleave {shape[1]}, {shape[2]} microbatches: {error}")


def _not_placeable(job: Job) -> Iterator[LauncherError]:
    """Yield the settings of a pipeline that the backend cannot run yet, why, and what to use."""
    resolved = job.model.resolved
    yield from within_stage.find_wrong_quantization(job.model)
    for key, (values, reason) in _ABLE.items():
        value = resolved.get(key, values[0])
        if value not in values:
            other = f"{key}={values[0]} or "
            if key == "decoder_block":
                reason, other = _READ_MORE.get(value, reason), ""  # another block would be another model
            yield UnsupportedError(
                f"--backend multimesh cannot train with {key}={value} yet: {reason}; "
                f"use {other}--backend spmd with --fsdp or --tp in place of --pp"
            )
    if job.scans_layers and not job.alike:
        yield UnsupportedError(
            f"--scan-layers: layers of decoder_block={resolved.get('decoder_block')} are not alike, and a pipeline "
            "cannot scan over groups of them yet; use --no-scan-layers"
        )


def _wrong_shares(job: Job) -> Iterator[LauncherError]:
    """Yield an error if the processes that read real data cannot take equal shares of a batch."""
    o, readers = job.options, job.readers
    if read_dataset(o) in ("synthetic", "olmo_grain"):
        return  # every process has every row
    if job.mesh_devices % readers:
        yield UsageError(
            f"{readers} processes read data in equal shares, but the {job.mesh_devices} devices of a stage lie on them "
            f"in unequal numbers; use --nodes {math.gcd(o.nodes, o.pp)}"
        )
    elif job.batch % readers:
        whole = math.lcm(job.batch // job.microbatches * (o.pp if o.pp > 1 and not o.staged else 1), readers)
        yield UsageError(
            f"{readers} processes read data in equal shares, and do not divide a batch of {job.batch}; use "
            f"--batch-size {-(-job.batch // whole) * whole}"
        )


def _wrong_devices(o: Options, devices: int) -> Iterator[LauncherError]:
    if o.parallelism == devices:
        return
    product = f"{o.dp} x {o.fsdp} x {o.tp} x {o.cp} x {o.pp} x {o.ep} = {o.parallelism}"
    flag = "--gpus" if o.gpus else "--cpus"
    if devices % (o.parallelism // o.dp) == 0:
        remedy = f"use --dp {devices // (o.parallelism // o.dp)}"
    elif o.parallelism % o.nodes == 0:
        remedy = f"use {flag} {o.parallelism // o.nodes}"
    else:
        each = math.gcd(o.parallelism, devices // o.nodes)
        remedy = f"use --nodes {o.parallelism // each} {flag} {each}"
    yield UsageError(f"dp x fsdp x tp x cp x pp x ep = {product}, but there are {devices} devices; {remedy}")


def _wrong_model(o: Options, model: Model) -> Iterator[LauncherError]:
    pieces = o.pp * o.interleave
    near = max(1, round(model.layers / pieces)) * pieces
    if isinstance(o.partition, tuple) and (len(o.partition), sum(o.partition)) != (pieces, model.layers):
        yield UsageError(
            f"--partition {','.join(map(str, o.partition))} has {len(o.partition)} pieces, {sum(o.partition)} layers "
            f"in all, but there are {model.layers} and pp x interleave = {o.pp} x {o.interleave} = {pieces} pieces; "
            "change one of them, or use --partition auto"
        )
    elif model.layers < pieces or (model.layers % pieces and not o.staged):
        yield UsageError(
            f"{model.layers} layers cannot be dealt to pp x interleave = {o.pp} x {o.interleave} = {pieces} pieces; "
            f"use --num-layers {near} or another --pp or --interleave"
        )
    of_global = model.resolved.get("global_num_kv_heads") or 0  # gemma4's
    for name, size, flag, parts, remedy in (
        ("attention heads", model.query_heads, "--tp", o.tp, "--num-heads"),
        ("key/value heads", model.kv_heads, "--tp", o.tp, "--num-kv-heads"),
        ("key/value heads of global layers", of_global, "--tp", o.tp, "global_num_kv_heads="),
        ("mlp dims", model.mlp, "--tp", o.tp, "--mlp-dims"),
        ("vocabulary", model.vocabulary, "--tp", o.tp, "--vocab-size"),
        ("model dims", model.embedding, "--fsdp", o.fsdp, "--model-dims"),
        ("experts", model.experts, "--ep", o.ep, "num_experts="),
        ("sequence", o.sequence_length, "--tp", o.tp * o.cp if o.sequence_parallel else 1, "--sequence-length"),
    ):
        if size % parts:
            yield UsageError(f"{flag} {parts} does not divide the {name} ({size}); change {flag} or {remedy}")
    if model.query_heads % model.kv_heads:
        yield UsageError(
            f"{model.kv_heads} key/value heads do not divide {model.query_heads} attention heads; change "
            "--num-kv-heads or --num-heads"
        )
    yield from within_stage.find_wrong_context(o, model)
    yield from within_stage.find_wrong_experts(o, model)
    yield from within_stage.find_wrong_adapters(model)
    if o.text and model.vocabulary < BYTE_TOKENS:
        yield UsageError(
            f"--text needs {BYTE_TOKENS} tokens (bytes and the end of a document), the model has {model.vocabulary}; "
            f"use --vocab-size {BYTE_VOCABULARY}"
        )
    if o.attention == "cudnn_flash_jax":
        windows = model.resolved.get("sliding_window_size") or 0
        if windows > 0 or model.resolved.get("attention_type", "global") != "global":
            yield UnsupportedError(
                "--attention cudnn_flash_jax attends to all earlier tokens, and this model has windows; "
                "use --attention dot_product, or install TransformerEngine for cudnn_flash_te"
            )
        if read_dataset(o) not in UNTOKENIZED and model.resolved.get("packing", True):
            yield UnsupportedError(
                "--attention cudnn_flash_jax attends across documents that are packed into one sequence; add "
                "packing=false, or install TransformerEngine for cudnn_flash_te"
            )


def check_machine(options: Options, *, gpu_memory: Sequence[int] | None, has_plugin: bool) -> None:
    """Raise where this machine lacks something that the job needs.

    ``gpu_memory``: memory of every GPU that the driver shows, in MiB, ``None`` if there is no driver.
    ``has_plugin``: whether JAX has its plugin for CUDA: without it JAX runs on the CPU, and only warns.
    """
    visible = len(gpu_memory or ())
    processes = options.nodes if options.spawn else 1
    if options.gpus * processes > visible:
        there = f"{visible} GPUs" if visible else "no GPU"
        asked = (
            f"--gpus {options.gpus} for each of {processes} processes" if processes > 1 else f"--gpus {options.gpus}"
        )
        raise MissingPartError(f"{asked}, but {there} can be seen here; check nvidia-smi, or use --cpus")
    if options.gpus and not has_plugin:
        raise MissingPartError(f"--gpus {options.gpus}: JAX has no CUDA plugin here; ./bootstrap.sh --group cuda12")
