"""Translates a checked job to MaxText's configuration, and to the process that trains or forecasts: pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multimesh import planner
from multimesh_maxtext.command.command_line import argument
from multimesh_maxtext.command.dataset import INDEX, UNTOKENIZED
from multimesh_maxtext.command.environment import CACHE_SWITCH, environment, memory_limit, xla_flags
from multimesh_maxtext.command.flags import FLAGS, Flags
from multimesh_maxtext.command.job import RUN_NAME, Job, Paths
from multimesh_maxtext.command.member import SINGLE, Member
from multimesh_maxtext.handoff import TrainerConfig

DEFAULTS = {
    *("run_name", "jax_cache_dir", "enable_checkpointing", "enable_tensorboard", "grain_worker_count"),
    *("learning_rate", "vocab_size", "head_dim", "base_num_kv_heads", "olmo_apply_ngram_filter"),
    *("checkpoint_period", "max_num_checkpoints_to_keep", "eval_interval", "eval_steps", "dtype"),
}
"""Settings that we choose without a flag: a KEY=VALUE argument replaces them."""

KEEP = "max_num_checkpoints_to_keep"
CHECKPOINTS = {"checkpoint_period": 100, KEEP: 5}
"""Settings of ``--checkpoint`` by default."""


def configuration(job: Job, paths: Paths) -> dict[str, Any]:
    """Return MaxText's settings for a job, by MaxText's names: those that flags name, and those that follow."""
    flags, model = job.flags, job.model
    circular = flags.pp > 1 and not flags.staged
    settings: dict[str, Any] = {
        **_values_of("setting", flags),
        "run_name": RUN_NAME,
        "base_output_directory": str(paths.output),
        "metrics_file": str(paths.metrics),
        "hardware": flags.platform,
        "skip_jax_distributed_system": True,
        "jax_cache_dir": "",
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "data_shuffle_seed": flags.seed,
        "remat_policy": "minimal_with_context" if flags.remat == "minimal_flash" else flags.remat,
        "scan_layers": job.scans_layers,
        **({"model_name": model.name, "override_model_config": True} if model.name else {}),
        **model.settings,
        "ici_tensor_parallelism": 1 if flags.sequence_parallel else flags.tp,
        "ici_tensor_sequence_parallelism": flags.tp if flags.sequence_parallel else 1,
        "ici_pipeline_parallelism": flags.pp if circular else 1,
        "gradient_accumulation_steps": 1 if circular else job.microbatches,
        "per_device_batch_size": per_device(job.rows, job.mesh_devices),
        "dataset_type": "synthetic",
    }
    if flags.nodes > 1:  # one mesh over all processes in the order of ranks: the innermost axes stay on a machine
        settings["num_slices"] = 1
    if circular:
        settings["num_pipeline_microbatches"] = job.microbatches
        settings["num_pipeline_repeats"] = flags.interleave
        settings["num_layers_per_pipeline_stage"] = model.layers // (flags.pp * flags.interleave)
    if flags.text:
        settings |= {"dataset_type": "olmo_grain", "olmo_index_path": str(paths.text.resolve() / INDEX)}
        settings |= {"olmo_apply_ngram_filter": False, "grain_worker_count": 0}
    if flags.staged and model.resolved.get("quantization"):
        # MaxText takes all devices of the process, among them those of other stages, and cuts a microbatch by them.
        settings["quantization_local_shard_count"] = quantizing_devices(job)
    if flags.checkpoint:
        # enable_autocheckpoint: also where a signal says that the job is about to end
        settings |= {"enable_checkpointing": True, "enable_autocheckpoint": True, **CHECKPOINTS}
    if isinstance(interval := flags.values.get("eval_interval"), int) and interval > 0:
        settings["eval_steps"] = 4
        if job.rows % job.readers and flags.dataset not in UNTOKENIZED:  # each reader evaluates on as many rows
            rows = math.lcm(job.rows, job.readers)
            settings["eval_per_device_batch_size"] = per_device(rows, job.mesh_devices)
    if flags.zero and not flags.staged:
        settings["shard_optimizer_over_data"] = True
    if flags.profile:
        settings |= {"profiler": "xplane", "skip_first_n_steps_for_profiler": min(1, flags.num_steps - 1)}
        settings["profiler_steps"] = max(1, min(5, flags.num_steps - 2))
    return settings


def _values_of(attribute: str, flags: Flags) -> dict[str, Any]:
    """Return the values of flags by what an attribute of their records names; but for those that are not given."""
    return {
        key: value
        for name, flag in FLAGS.items()
        if (key := getattr(flag, attribute)) and (value := getattr(flags, name)) is not None
    }


def find_fixed_settings(job: Job) -> dict[str, Any]:
    """Return the settings of MaxText that only flags decide."""
    free = DEFAULTS - ({"run_name", "enable_checkpointing"} if job.flags.checkpoint else set())
    free |= set() if job.flags.text else {"dataset_type"}
    settings = configuration(job, Paths(python="", maxtext=Path(), output=Path(), metrics=Path()))
    return {key: value for key, value in settings.items() if key not in free}


def quantizing_devices(job: Job) -> int:
    """Return the number of a stage's devices in a process: by these MaxText cuts a microbatch that it quantizes."""
    return max(1, job.mesh_devices // max(1, job.flags.nodes // job.flags.pp))


def per_device(rows: int, devices: int) -> float:
    """Return the share of a device. MaxText multiplies it by the devices and truncates: that gives ``rows`` again."""
    share = rows / devices
    while int(devices * share) < rows:
        share = math.nextafter(share, math.inf)
    return share


_OF_DATA = ("dataset_type", "dataset_path", "dataset_name", "tokenizer_path")


@dataclass(frozen=True)
class Launch:
    """A process to start: its command, its additions to the environment, and MaxText's configuration."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    configuration: Mapping[str, Any]


def launch(
    job: Job,
    paths: Paths,
    *,
    inherited: Mapping[str, str],
    gpu_memory: int | None,
    this: Member = SINGLE,
    **handed: Any,
) -> Launch:
    """Return the process that trains a job. ``handed``: fields of `TrainerConfig`.

    ``inherited``: the environment of this process; XLA_FLAGS and PYTHONPATH in it are extended, not replaced.
    ``this``: which of several processes it is; its rank on this machine says which GPUs are its own.
    """
    flags = job.flags
    extra = dict(setting.split("=", 1) for setting in flags.settings)
    settings = {key: value for key, value in configuration(job, paths).items() if key not in extra}
    base = flags.maxtext_config or paths.package / "configs/base.yml"
    arguments = [argument(key, value) for key, value in settings.items()]
    # -P keeps the working folder off the module path: a folder of the user's must not shadow the trainer's modules.
    module = ("-P", "-m", "multimesh_maxtext", "train")
    command = (paths.python, *module, str(base.resolve()), *arguments, *flags.settings)
    config = replace(_trainer_config(job, paths, _common_memory(flags, gpu_memory), this), **handed)
    variables = {**environment(job, paths, inherited=inherited, gpu_memory=gpu_memory), **config.variables()}
    if flags.nodes > 1 and flags.gpus:
        visible = [part for part in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        # A launcher may show each process its own GPUs only, or all of a machine to each.
        first = 0 if len(visible) == flags.gpus else this.local * flags.gpus
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + flags.gpus)))
    return Launch(command, variables, {**settings, **extra})


def forecasting(job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None) -> Launch:
    """Return the process that forecasts a job: one, on CPU devices; it allocates nothing and reads no data.

    For MaxText's own program of a job it is one that compiles that for GPUs.
    """
    flags = job.flags
    settings = tuple(setting for setting in flags.settings if setting.split("=")[0] not in _OF_DATA)
    without: dict[str, Any] = dict.fromkeys(("checkpoint", "profile", "dump", "dump_only"))
    single = replace(job, flags=replace(flags, settings=settings, nodes=1, gpus=0, cpus=job.devices, **without))
    target = _target(job) if flags.compile else None
    request: dict[str, Any] = {"forecast": str(paths.forecast), "limit": _common_memory(flags, gpu_memory)}
    request |= {"platform": flags.platform, "processes": flags.nodes, "target": target}
    start = launch(single, paths, inherited=inherited, gpu_memory=gpu_memory, **request)
    if flags.platform != "gpu":
        return start
    # with the flags of the run; the cache takes nothing that no device can load
    xla = [start.environment["XLA_FLAGS"], *xla_flags(flags, devices=flags.gpus, users=inherited.get("XLA_FLAGS", ""))]
    cache = {CACHE_SWITCH: "0"} if target else {}
    return replace(start, environment={**start.environment, "XLA_FLAGS": " ".join(xla), **cache})


def _target(job: Job) -> dict[str, Any]:
    """Return the GPUs to compile for: with a process each, as many to a node as its fast link connects."""
    flags, device = job.flags, job.flags.device or ""
    several = flags.gpus > 1
    gpus = flags.gpus if several else math.gcd(job.devices, planner.device(device).domain)
    nodes = job.devices // gpus
    return {"device": device, "nodes": nodes, "gpus": gpus, "process_per": "node" if several else "gpu"}


def _common_memory(flags: Flags, gpu_memory: int | None) -> int:
    """Return the memory of a device where all processes of a job know it, else 0: they must choose one schedule."""
    return memory_limit(flags, gpu_memory if flags.nodes == 1 else None) or 0


def _trainer_config(job: Job, paths: Paths, limit: int, this: Member) -> TrainerConfig:
    flags = job.flags
    process = TrainerConfig(outcome=str(paths.outcome), rank=this.rank, count=flags.nodes)
    if not flags.staged:
        return process
    return replace(
        process,
        **_values_of("trainer", flags),
        schedule=job.schedule,
        table=str(flags.custom_schedule_path.resolve()) if flags.custom_schedule_path else None,
        sizes=job.pieces,
        route=job.route,
        chosen=str(paths.schedule) if job.schedule == "auto" else "",
        limit=limit,
        placement=str(paths.placement),
        dump=str(flags.dump.resolve()) if flags.dump else "",
        profile=str(paths.timelines) if flags.profile else "",
        replicate_below=job.batch * flags.sequence_length if flags.replicate_small_params else 0,
    )
