"""Checks a command line before a process starts, and finds all that is wrong at once. Each message has a remedy.

The needs of one flag, and the flags that it excludes, stand where it is declared; the rest is here.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import multimesh
from multimesh_maxtext.command.command_line import CommandLine
from multimesh_maxtext.command.dataset import UNTOKENIZED, find_missing_settings
from multimesh_maxtext.command.environment import PLUGINS
from multimesh_maxtext.command.flags import FLAGS, Flags
from multimesh_maxtext.command.job import (
    BYTE_TOKENS,
    BYTE_VOCABULARY,
    EXACT,
    UNLIKE,
    Job,
    describe_model,
    has_package,
    make_job,
)
from multimesh_maxtext.command.translate import find_fixed_settings, quantizing_devices
from multimesh_maxtext.errors import FileError, FlagError, LauncherError, MissingPartError, UnsupportedError, raise_all
from multimesh_maxtext.handoff import find_schedule
from multimesh_planner import targets

SUBSTITUTE = "cudnn_flash_jax"
"""Kernel of attention in place of TransformerEngine's."""

_ABLE: dict[str, tuple[Any, ...]] = {
    "decoder_block": (
        *("llama2", "default", "mistral", "gpt3", "mixtral"),
        *("gemma", "gemma2", "qwen2", "qwen3", "qwen3_moe", "qwen3_custom_moe"),
        *UNLIKE,
    ),
    **dict.fromkeys(("enable_diloco", "enable_emergency_checkpoint", "enable_multi_tier_checkpointing"), (False,)),
    **dict.fromkeys(("use_multimodal", "use_dpo", "use_grpo", "te_moe_block", "use_batch_split_schedule"), (False,)),
    **dict.fromkeys(("parameter_memory_host_offload", "optimizer_memory_host_offload"), (False,)),
    **dict.fromkeys(("shard_optimizer_over_data", "warmup_programs_in_init"), (False,)),
    **dict.fromkeys(("global_parameter_scale", "mhc_expansion_rate", "num_vocab_tiling"), (1,)),
    **dict.fromkeys(("compile_xla_flags", "compiled_trainstep_file"), ("",)),
    "engram_layers": ([], None),
    "mtp_num_layers": (0,),
    "training_objective": ("causal_lm",),
    "moe_dropless_fallback": ("None", None),
    "opt_type": ("adamw", "adam_pax", "sgd", "muon"),
    "muon_type": ("optax_muon", "optax"),
}
"""Settings of MaxText: the values that stages can run with."""

_REASONS = {
    "gemma4_small": "its last layers read keys and values of earlier ones",
    "deepseek4": "its layers read the tokens, and hand on several streams",
    "engram_layers": "they read tokens inside of layers",
    "mtp_num_layers": "they come after the last stage",
    "use_multimodal": "the vision encoder has no stage",
    "num_vocab_tiling": "its loop crosses the last stage",
    "shard_optimizer_over_data": "--zero does that for stages",
    "use_batch_split_schedule": "its attention is Splash, a kernel for TPUs",
}
"""Why stages cannot run with other values, or with a block; else no pipeline was compared with one program there."""

QWIX = ("int8", "int4", "fp4", "fp8_e4m3", "fp8_e5m2", "fp8_nanoo", "fp8_full")
"""Kinds of quantization by Qwix, ``use_qwix_quantization=true``, that pipelines were compared with."""

AQT = ("int8",)
"""Kinds of quantization by AQT that pipelines were compared with, without experts."""

_OF_CLOUD = (
    *("enable_goodput_recording", "monitor_goodput", "enable_pathways_goodput", "goodput_job_name"),
    *("report_heartbeat_metric_for_gcp_monitoring", "report_performance_metric_for_gcp_monitoring"),
    *("use_vertex_tensorboard", "enable_checkpoint_cloud_logger", "managed_mldiagnostics"),
)
_OF_PATHWAYS = ("elastic_enabled", "enable_single_controller", "subslice_shape")
_IDLE = {
    **dict.fromkeys(_OF_CLOUD, "it is for Google Cloud; see --metrics-file and --metrics-hook"),
    **dict.fromkeys(_OF_PATHWAYS, "it is for Pathways; a run with --resume goes on on another grid"),
    "jax_distributed_initialization_timeout": "run.py starts the processes; use MULTIMESH_START_TIMEOUT",
}
"""Settings of MaxText that would be accepted and do nothing in a run, and why. Switched off they are no error."""

_BUCKETS = {"gs": ("gcsfs", "google-cloud-storage"), "s3": ("s3fs", "s3fs")}
"""Of each kind of bucket: the module by which paths in it are read, and what to install beside it."""


def check_job(parsed: CommandLine, package: Path) -> Job:
    """Return the job of a command line. ``package``: MaxText's package folder; its ``configs`` are read.

    Raises ``LauncherError`` with all errors, but for those that may only follow from a flag that could not be read.
    """
    flags, errors = parsed.flags, [*find_wrong_flags(parsed.flags)]
    errors += find_wrong_settings(flags, package)
    if flags.attention == "cudnn_flash_te" and flags.cp == 1 and not has_package("transformer_engine"):
        flags = replace(flags, attention=SUBSTITUTE)  # which has the same results
    try:
        job = make_job(flags, describe_model(flags, package))
        errors += [*find_wrong_sizes(job), *find_missing_settings(job), *_find_overrides(job)]
    except LauncherError as error:
        errors.append(error)
    # an error that names a flag which could not be read, as such or as an axis, may follow from that
    doubtful = {flag.lstrip("-") for flag in parsed.doubtful}
    words = ({word.strip(",.;:()").removeprefix("--") for word in str(error).split()} for error in errors)
    raise_all([*parsed.wrong, *(error for error, said in zip(errors, words, strict=True) if not said & doubtful)])
    return job


def find_job_notes(parsed: CommandLine, job: Job) -> Iterator[str]:
    """Yield a line for each flag or setting of a job that became something else, or has a price."""
    if parsed.flags.attention != job.flags.attention:
        yield f"--attention {parsed.flags.attention} runs as {SUBSTITUTE}, the same kernels, without TransformerEngine"
    if job.flags.verify and "dtype" not in job.flags.values:
        yield f"--verify trains in dtype={EXACT}, in which the two programs can agree"
    if job.flags.checkpoint and (kind := job.flags.dataset) in ("hf", "tfds", "c4_mlperf"):
        yield (
            f"dataset_type={kind} has no position in checkpoints: a run that resumes reads from the beginning; "
            "dataset_type=grain and --text go on where they stopped"
        )
    if job.flags.gpus and job.model.product == "megablox":
        yield (
            "experts are multiplied by MaxText's kernel for TPUs (megablox), which Pallas interprets on GPUs, tile by "
            "tile; leave out megablox=true and use_ring_of_experts=true"
        )
    elif "megablox" in job.model.settings:
        yield (
            "experts are multiplied by lax.ragged_dot: MaxText's own kernel (megablox) is for TPUs. XLA multiplies all "
            f"tokens by each of the {job.model.experts // job.flags.ep} experts of a device: sparse_matmul=false "
            "capacity_factor=1.25 needs less but drops tokens, a larger --ep drops none"
        )


def _find_overrides(job: Job) -> Iterator[LauncherError]:
    """Yield errors of settings that flags decide."""
    fixed = {"model_name": "", **find_fixed_settings(job)}
    for setting in job.flags.settings:
        key = setting.split("=")[0]
        if key in fixed:
            names = " or ".join(flag.option for flag in FLAGS.values() if key in (flag.setting, *flag.decides))
            remedy = f"use {names}, or leave it out" if names else "leave it out"
            yield FlagError(f"{key}= is decided by the flags ({key}={fixed[key]}); {remedy}")


def find_wrong_flags(o: Flags) -> Iterator[LauncherError]:
    """Yield the errors of flags that do not depend on the model: first those that their declarations tell."""
    for name in o.used:
        flag = FLAGS[name]
        if flag.pipeline and o.backend != "multimesh" and not o.compile:  # that compiles a pipeline too
            yield UnsupportedError(f"--backend {o.backend} has no use for {flag.option}: {flag.pipeline}; leave it out")
        elif flag.pipeline and o.pp == 1 and not (name == "forecast" and o.compile):
            yield FlagError(f"{flag.option} is about pipeline stages; add --pp")
        if flag.needs and not {*flag.needs} & {*o.used}:
            yield FlagError(f"{flag.option} needs {' or '.join(FLAGS[other].option for other in flag.needs)}; add it")
        for other in flag.excludes.keys() & {*o.used}:
            yield FlagError(f"{flag.option} and {FLAGS[other].option}: {flag.excludes[other]}; leave out one of them")
    saves = o.checkpoint or o.values.get("enable_checkpointing")
    for wrong, text in (
        (o.backend == "cuda" and not o.gpus, "--backend cuda needs GPUs; add --gpus N or use --backend spmd"),
        (o.backend == "cpu" and o.gpus, f"--backend cpu trains on CPU devices; remove --gpus {o.gpus}"),
        (o.zero > 1 and not o.staged, "--zero 2 is for pipelines; MaxText alone has --zero 1, or add --pp"),
        (
            o.zero and o.fsdp > 1 and not o.staged,
            "--zero 1 and --fsdp exclude each other in MaxText alone; --fsdp shards the moments already",
        ),
        (
            o.scan_layers is False and o.pp > 1 and not o.staged,
            "MaxText's own pipeline scans over layers; remove --no-scan-layers or --pp",
        ),
        (
            o.platform == "cpu" and "flash" in o.attention,
            f"--attention {o.attention} is a GPU kernel; on CPU devices use --attention dot_product",
        ),
        ("checkpoint_period" in o.values and not saves, "checkpoint_period= needs --checkpoint; add it"),
        ("eval_steps" in o.values and "eval_interval" not in o.values, "eval_steps= needs eval_interval=; add it"),
        (
            o.compile and not (o.gpus and o.device in targets()),
            f"--compile needs --gpus and a --device that can be compiled for: {', '.join(targets())}",
        ),
    ):
        if wrong:
            yield FlagError(text)
    if o.verify and o.gpus and o.nodes > 1 and o.staged and not o.forecast:
        yield UnsupportedError(
            "--verify is for one process so far on GPUs: the reference trains on all GPUs of a stage; leave it out, or "
            f"use --nodes 1 --gpus {o.nodes * o.gpus} where one machine has them"
        )
    if o.compile and not any(map(has_package, PLUGINS)):
        yield MissingPartError("--compile needs JAX's compiler for GPUs; run ./bootstrap.sh --group compile-gpu")
    if o.prometheus and not o.prometheus.absolute().parent.is_dir():
        yield FileError(f"--prometheus {o.prometheus}: there is no such folder; make it, or choose another")
    files = (("--metrics-file", o.metrics_file), ("--prometheus", o.prometheus))
    yield from (FileError(f"{flag} {file}: a folder; name a file") for flag, file in files if file and file.is_dir())
    yield from (FileError(f"--text {file}: no such file") for file in o.text if not file.is_file())


@functools.cache
def setting_names(package: Path) -> frozenset[str]:
    """Return the names of MaxText's settings, by the source of its classes, as to import them imports JAX."""
    text = (package / "configs/types.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^  (\w+): \S", text, re.MULTILINE))


def find_wrong_settings(flags: Flags, package: Path) -> Iterator[LauncherError]:
    """Yield errors of settings: unknown names, what would do nothing, and buckets that cannot be used."""
    for setting in flags.settings:
        try:
            yaml.compose(setting.partition("=")[2])
        except yaml.YAMLError:
            yield FlagError(f"{setting}: the value is no YAML; put strings with special characters in quotes")
    for key, value in flags.values.items():
        if key not in (names := setting_names(package)):
            near = " or ".join(difflib.get_close_matches(key, names, n=3, cutoff=0.75))
            hint = f"did you mean {near}?" if near else f"its settings are in {package / 'configs/base.yml'}"
            yield FlagError(f"{key}={value}: MaxText has no setting {key}; {hint}")
        elif key in _IDLE and value:
            yield FlagError(f"{key}={value} would do nothing here: {_IDLE[key]}; leave it out")
    for name in flags.used:
        paths = getattr(flags, name)
        for path in paths if isinstance(paths, tuple) else (paths,):
            if isinstance(path, Path) and path.parts and path.parts[0].removesuffix(":") in _BUCKETS:
                yield UnsupportedError(
                    f"{FLAGS[name].option} {path.parts[0]}//{'/'.join(path.parts[1:])}: this must be on a file "
                    "system; mount the bucket, for example with gcsfuse or mountpoint-s3, and give the path there"
                )
    for key, kind in flags.buckets.items():
        if not has_package(_BUCKETS[kind][0]):
            packages = " ".join(dict.fromkeys(_BUCKETS[kind]))
            yield MissingPartError(f"{key}={kind}://...: a package is missing; pip install {packages}")


def find_wrong_sizes(job: Job) -> Iterator[LauncherError]:
    """Yield products and divisions that do not come out, with a value that would, and settings that stages lack."""
    o, rows = job.flags, job.flags.domains * job.flags.microbatch_size
    counted = o.batch_size or job.devices == o.parallelism  # the batch is known, or follows from the devices
    yield from _wrong_devices(o, job.devices)
    yield from _wrong_model(job)
    yield from _wrong_attention(o, job.model.resolved)
    if job.batch % rows and counted:
        near = max(rows, round(job.batch / rows) * rows)
        yield FlagError(
            f"a batch of {job.batch} is no multiple of dp x fsdp x ep x microbatch size = {o.dp} x {o.fsdp} x {o.ep} x "
            f"{o.microbatch_size} = {rows}; use --batch-size {near}"
        )
    if o.staged:
        yield from _not_placeable(job)
        yield from _wrong_schedule(job)
    elif o.pp > 1 and counted and job.microbatches % o.pp:
        near = max(1, round(job.microbatches / o.pp)) * o.pp
        yield FlagError(
            f"MaxText's own pipeline needs a multiple of pp = {o.pp} microbatches, not {job.microbatches}; "
            f"use --batch-size {near * rows}"
        )
    if job.batch % rows == 0:
        yield from _wrong_shares(job)


def _wrong_schedule(job: Job) -> Iterator[LauncherError]:
    """Yield the reasons why a schedule cannot order these stages: the flag to change, or the cell of the table."""
    name, path, pp, interleave = job.schedule, job.flags.custom_schedule_path, job.flags.pp, job.flags.interleave
    if name == "custom" and path is None:
        yield FlagError("--schedule custom needs a table; add --custom-schedule-path FILE")
    elif path and name != "custom":
        yield FlagError(f"--custom-schedule-path {path} is for --schedule custom; add that or leave it out")
    elif name != multimesh.schedules.Auto.name:  # which some order there always is for
        where = f"--custom-schedule-path {path}" if path else f"--schedule {name}"
        shape = pp, interleave, job.microbatches
        try:
            schedule = find_schedule(name, path)
            if schedule.usual > interleave == 1:
                yield FlagError(f"--schedule {name} is for stages of several pieces; add --interleave 2 or use 1f1b")
                return
            placement = schedule.placement(pp)
            multimesh.schedules.validate(schedule.table(*shape, backward=True), *shape, placement=placement)
        except multimesh.UsageError as error:
            yield FlagError(f"{where}, --pp {pp}, --interleave {interleave}, {job.microbatches} microbatches: {error}")


def _not_placeable(job: Job) -> Iterator[LauncherError]:
    """Yield the settings of a pipeline that the backend cannot run yet, why, and what to use."""
    resolved = job.model.resolved
    yield from _wrong_quantization(job)
    for key, values in _ABLE.items():
        value = resolved.get(key, values[0])
        if value not in values:
            is_block = key == "decoder_block"  # another one would be another model
            reason = _REASONS.get(value if is_block else key, "no pipeline was compared with one program there")
            yield UnsupportedError(
                f"--backend multimesh cannot train with {key}={value} yet: {reason}; use "
                f"{'' if is_block else f'{key}={values[0]} or '}--backend spmd with --fsdp or --tp in place of --pp"
            )
    if job.scans_layers and not job.uniform:
        yield UnsupportedError(
            f"--scan-layers: layers of decoder_block={resolved.get('decoder_block')} are not alike, and a pipeline "
            "cannot scan over groups of them yet; use --no-scan-layers"
        )


def _wrong_shares(job: Job) -> Iterator[LauncherError]:
    """Yield an error if the processes that read real data cannot take equal shares of a batch."""
    o, readers = job.flags, job.readers
    if o.dataset in UNTOKENIZED:
        return  # every process has every row
    if job.mesh_devices % readers or job.batch % readers:
        number, remedy = f"the {job.mesh_devices} devices of a stage", f"--nodes {math.gcd(o.nodes, o.pp)}"
        if job.mesh_devices % readers == 0:
            unit = math.lcm(job.batch // job.microbatches * (o.pp if o.pp > 1 and not o.staged else 1), readers)
            number, remedy = f"a batch of {job.batch}", f"--batch-size {-(-job.batch // unit) * unit}"
        yield FlagError(f"{readers} processes read data in equal shares, and do not divide {number}; use {remedy}")


def _wrong_devices(o: Flags, devices: int) -> Iterator[LauncherError]:
    if o.parallelism == devices:
        return
    product = f"{o.dp} x {o.fsdp} x {o.tp} x {o.cp} x {o.pp} x {o.ep} = {o.parallelism}"
    flag, others = "--gpus" if o.gpus else "--cpus", o.parallelism // o.dp
    nodes = o.nodes if o.parallelism % o.nodes == 0 else o.parallelism // math.gcd(o.parallelism, devices // o.nodes)
    remedy = f"--nodes {nodes} {flag} {o.parallelism // nodes}".removeprefix(f"--nodes {o.nodes} ")
    if devices % others == 0:
        remedy = f"--dp {devices // others}"
    yield FlagError(f"dp x fsdp x tp x cp x pp x ep = {product}, but there are {devices} devices; use {remedy}")


def _wrong_model(job: Job) -> Iterator[LauncherError]:
    """Yield sizes of the model that the grid does not divide, and settings that it cannot have."""
    o, model, settings = job.flags, job.model, job.model.resolved
    pieces = o.pp * o.interleave
    near = max(1, round(model.layers / pieces)) * pieces
    if isinstance(o.partition, tuple) and (len(o.partition), sum(o.partition)) != (pieces, model.layers):
        yield FlagError(
            f"--partition {','.join(map(str, o.partition))} has {len(o.partition)} pieces, {sum(o.partition)} layers "
            f"in all, but there are {model.layers} and pp x interleave = {o.pp} x {o.interleave} = {pieces} pieces; "
            "change one of them, or use --partition auto"
        )
    elif model.layers < pieces or (model.layers % pieces and not o.staged):
        yield FlagError(
            f"{model.layers} layers cannot be dealt to pp x interleave = {o.pp} x {o.interleave} = {pieces} pieces; "
            f"use --num-layers {near} or another --pp or --interleave"
        )
    of_global, group = settings.get("global_num_kv_heads") or 0, "inhomogeneous_layer_cycle_interval"
    grouped = job.scans_layers and o.pp == 1  # else MaxText scans over as many layers as it can group
    halves = 2 if settings.get("context_parallel_load_balance", True) and o.cp > 1 else 1
    for name, size, flag, parts, remedy in (
        ("attention heads", model.query_heads, "--tp", o.tp, "--num-heads"),
        ("key/value heads", model.kv_heads, "--tp", o.tp, "base_num_kv_heads="),
        ("key/value heads of global layers", of_global, "--tp", o.tp, "global_num_kv_heads="),
        ("mlp dims", model.mlp, "--tp", o.tp, "--mlp-dims"),
        ("vocabulary", model.vocabulary, "--tp", o.tp, "vocab_size="),
        ("model dims", model.embedding, "--fsdp x --cp" if o.cp > 1 else "--fsdp", o.fsdp * o.cp, "--model-dims"),
        ("attention heads", model.query_heads, "base_num_kv_heads", model.kv_heads, "--num-heads"),
        ("experts", model.experts, "--ep", o.ep, "num_experts="),
        ("sequence", o.sequence_length, "--tp", o.tp * o.cp if o.sequence_parallel else 1, "--sequence-length"),
        ("sequence", o.sequence_length, f"{halves} x --cp", halves * o.cp, "--sequence-length"),
        ("layers", model.layers, group, (grouped and settings.get(group)) or 1, "--num-layers or --no-scan-layers"),
    ):
        if size % parts:
            yield FlagError(f"{flag} {parts} does not divide the {name} ({size}); change {flag} or {remedy}")
    exchanges, ring = o.ep > 1 and settings.get("sparse_matmul"), settings.get("use_ring_of_experts")
    if exchanges and ring and model.product == "ragged_dot":
        yield UnsupportedError(
            f"--ep {o.ep}: MaxText's ring of experts multiplies by all groups, which lax.ragged_dot refuses for the "
            "experts of one device; leave out megablox=false"
        )
    if exchanges and o.platform == "cpu" and not ring:
        yield UnsupportedError(
            f"--ep {o.ep}: with sparse_matmul=True experts exchange tokens by an operation that XLA lacks on CPU "
            "devices; add use_ring_of_experts=true, which gathers them, or sparse_matmul=false"
        )
    lora = settings.get("lora")
    if isinstance(lora, dict) and lora.get("enable_lora"):  # the optimizer would find nothing to train, and say nothing
        yield UnsupportedError("lora: MaxText has adapters in its train_sft alone, which needs tunix; leave lora= out")
    if o.text and model.vocabulary < BYTE_TOKENS:
        yield FlagError(
            f"--text needs {BYTE_TOKENS} tokens (bytes and the end of a document), the model has {model.vocabulary}; "
            f"use vocab_size={BYTE_VOCABULARY}"
        )


def _wrong_attention(o: Flags, settings: Mapping[str, Any]) -> Iterator[LauncherError]:
    """Yield the settings that a kernel of attention cannot honour, and on which MaxText is silent."""
    engine = "cudnn_flash_te"  # TransformerEngine's
    if o.attention == SUBSTITUTE:
        if (settings.get("sliding_window_size") or 0) > 0 or settings.get("attention_type", "global") != "global":
            yield UnsupportedError(
                f"--attention {SUBSTITUTE} attends to all earlier tokens, and this model has windows; use --attention "
                f"dot_product, or install TransformerEngine for {engine}"
            )
        if o.dataset not in UNTOKENIZED and settings.get("packing", True):
            yield UnsupportedError(
                f"--attention {SUBSTITUTE} attends across documents that are packed into one sequence; add "
                f"packing=false, or install TransformerEngine for {engine}"
            )
    if o.cp == 1 or not o.gpus or o.forecast:
        return
    if o.attention not in (engine, "dot_product"):
        yield UnsupportedError(
            f"--attention {o.attention} attends within the part of a sequence that a device has; with --cp {o.cp} use "
            f"--attention {engine} or dot_product"
        )
    elif not has_package("transformer_engine") and (
        o.attention == engine or settings.get("context_parallel_load_balance", True)
    ):
        yield MissingPartError(
            f"--cp {o.cp} on GPUs needs TransformerEngine, which orders the parts of sequences; install it, or use "
            "--attention dot_product context_parallel_load_balance=false"
        )


def _wrong_quantization(job: Job) -> Iterator[LauncherError]:
    """Yield the reason why a pipeline cannot train with a quantization, and those with which it can."""
    o, settings = job.flags, job.model.resolved
    kind, by_qwix = str(settings.get("quantization") or ""), bool(settings.get("use_qwix_quantization"))
    by_aqt = kind in AQT and not by_qwix
    rows, parts = o.domains * o.microbatch_size, quantizing_devices(job)
    if by_aqt and rows % parts:
        yield FlagError(
            f"quantization={kind}: AQT cuts the rows of a microbatch, {rows}, by {parts} devices; use "
            f"--microbatch-size {math.lcm(rows, parts) // o.domains} or use_qwix_quantization=true"
        )
    if kind and not (kind in QWIX and by_qwix) and not (by_aqt and job.model.experts == 1):
        remedy = "add" if kind in QWIX else "use quantization=fp8_full, fp8_e4m3 or int8 with"
        yield UnsupportedError(
            f"--backend multimesh cannot train with quantization={kind} yet: no pipeline was compared with one program "
            f"there; {remedy} use_qwix_quantization=true"
        )
