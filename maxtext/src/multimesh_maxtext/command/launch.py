"""The process that trains: its command and its environment, with the hand-over to the hooks."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multimesh import planner
from multimesh_maxtext.command import compile_cache, memory
from multimesh_maxtext.command.checks import Job, schedule_name
from multimesh_maxtext.command.member import ALONE, Member
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.translate import Paths, argument, configuration, environment, xla_flags
from multimesh_maxtext.handoff import RUN, TRAINER, Handoff

JOIN = ("multimesh_maxtext", "join")
"""The trainer as one of several processes: see `join`."""

FORESEE = ("multimesh_maxtext", "foresee")
"""The trainer that only forecasts: see `foresee`."""


_DEFAULTS = {
    *("run_name", "jax_cache_dir", "enable_checkpointing", "enable_tensorboard", "grain_worker_count"),
    *("learning_rate", "vocab_size", "head_dim", "base_num_kv_heads", "olmo_apply_ngram_filter"),
}
"""Settings that we choose without a flag: a KEY=VALUE argument replaces them."""

_CHECKPOINTED = {"run_name", "enable_checkpointing"}
"""With ``--checkpoint`` the flag decides these of them."""


@dataclass(frozen=True)
class Launch:
    """A process to start: its command, its additions to the environment, and MaxText's configuration."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    configuration: Mapping[str, Any]


def settings_of_flags(job: Job) -> dict[str, Any]:
    """Return the settings of MaxText that only flags decide."""
    free = _DEFAULTS - _CHECKPOINTED if job.options.checkpoint else _DEFAULTS
    settings = configuration(job, Paths(python="", maxtext=Path(), output=Path(), metrics=Path()))
    o = job.options
    sizes = {"base_num_kv_heads": o.num_kv_heads, "head_dim": o.head_dim, "vocab_size": o.vocab_size}
    free = free - {key for key, value in sizes.items() if value is not None}
    free = free if o.text or o.use_tfds_dataset else free | {"dataset_type"}
    return {key: value for key, value in settings.items() if key not in free}


def launch(
    job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None, this: Member = ALONE
) -> Launch:
    """Return the process that trains a job.

    ``inherited``: the environment of this process; XLA_FLAGS and PYTHONPATH in it are extended, not replaced.
    ``gpu_memory``: memory of a visible GPU in MiB, ``None`` if unknown.
    ``this``: which of several processes it is; its rank on this machine says which GPUs are its own.
    """
    extra = dict(setting.split("=", 1) for setting in job.options.settings)
    settings = configuration(job, paths)
    settings = {key: value for key, value in settings.items() if key not in extra}
    base = job.options.maxtext_config or paths.package / "configs/base.yml"
    arguments = [argument(key, value) for key, value in settings.items()]
    # -P keeps the working folder off the module path: a folder of the user's must not shadow the trainer's modules.
    trainer = JOIN if job.options.nodes > 1 else (TRAINER,)
    command = (paths.python, "-P", "-m", *trainer, str(base.resolve()), *arguments, *job.options.settings)
    variables = {**environment(job, paths, inherited=inherited, gpu_memory=gpu_memory), RUN: "1"}
    if job.options.staged:
        variables |= handoff(job, paths, _common_memory(job, gpu_memory)).variables()
    variables |= this.variables() if this.count > 1 else {}
    if job.options.nodes > 1 and job.options.gpus:
        visible = [part for part in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        # A launcher may show each process its own GPUs only, or all of a machine to each.
        first = 0 if len(visible) == job.options.gpus else this.local * job.options.gpus
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + job.options.gpus)))
    return Launch(command, variables, {**settings, **extra})


def _common_memory(job: Job, gpu_memory: int | None) -> int | None:
    """Return the memory of a device where all processes of a job know the same: they must choose one schedule."""
    return memory.limit(job, gpu_memory if job.options.nodes == 1 else None)


def forecasting(job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None) -> Launch:
    """Return the process that forecasts a job: one, on CPU devices; it allocates nothing and reads no data."""
    changes: dict[str, Any] = {"checkpoint": None, "profile": False, "dump": None, "dump_only": False}
    changes |= {"use_tfds_dataset": None, "dataset_path": None, "dataset_name": None, "tokenizer_path": None}
    changes |= {"settings": [each for each in job.options.settings if not each.startswith("dataset_type=")]}
    changes |= {"nodes": 1, "gpus": 0, "cpus": job.devices}
    alone = replace(job, options=Options(**{**vars(job.options), **changes}))
    start = launch(alone, paths, inherited=inherited, gpu_memory=gpu_memory)
    asked = replace(
        handoff(alone, paths, _common_memory(job, gpu_memory)),
        forecast=str(paths.forecast),
        platform=job.options.platform,
        processes=job.options.nodes,
        precompile=str(job.options.precompile.resolve()) if job.options.precompile else "",
        **(_target(job) if job.options.compile else {}),
    )
    command = (*start.command[:3], *FORESEE, *start.command[4:])
    variables = {**start.environment, **asked.variables()}
    if job.options.compile:  # with the flags of the run
        users = inherited.get("XLA_FLAGS", "")
        flags = xla_flags(job.options, devices=job.options.gpus, users=users)
        if job.options.precompile and not any(name in users for name in ("triton_gemm", "load_autotune_results")):
            flags.append("--xla_gpu_enable_triton_gemm=false")  # nothing can measure its tiles, and cuBLASLt needs none
        variables["XLA_FLAGS"] = " ".join([variables["XLA_FLAGS"], *flags])
    if job.options.compile or job.options.precompile:  # the cache takes nothing that no device can load
        variables[compile_cache.SWITCH] = "0"
    return replace(start, command=command, environment=variables)


def _target(job: Job) -> dict[str, Any]:
    """Return the GPUs to compile for: with a process each, as many to a node as its fast link connects."""
    o = job.options
    if o.gpus > 1:
        return {"target": o.device, "target_nodes": o.nodes, "target_gpus": o.gpus, "target_process": "node"}
    gpus = math.gcd(job.devices, planner.device(o.device or "").domain)
    return {"target": o.device, "target_nodes": job.devices // gpus, "target_gpus": gpus}


def handoff(job: Job, paths: Paths, limit: int | None = None) -> Handoff:
    """Return the hand-over to the hooks of a pipeline; ``limit`` is the memory of a device, where known."""
    o = job.options
    return Handoff(
        stages=o.pp,
        interleave=o.interleave,
        schedule=schedule_name(o),
        table=str(o.custom_schedule_path.resolve()) if o.custom_schedule_path else None,
        sizes=job.pieces,
        route=job.route,
        chosen=str(paths.schedule) if schedule_name(o) == "auto" else "",
        limit=limit or 0,
        placement=str(paths.placement),
        dump=str(o.dump.resolve()) if o.dump else "",
        dump_passes=bool(o.dump_mpmd_passes),
        dump_only=bool(o.dump_only),
        profile=str(paths.timelines) if o.profile else "",
        context={
            "autoshard": o.autoshard is not False,
            "enable_task_fusion": o.fuse_tasks is not False,
            "only_fuse_loop_tasks": bool(o.only_fuse_loop_tasks),
        },
        replicate_below=job.batch * o.sequence_length if o.replicate_small_params else 0,
        gather_once=bool(o.gather_once),
        zero=o.zero,
        precompiled=str(o.precompiled.resolve()) if o.precompiled else "",
    )


def visible_gpu_memory() -> list[int] | None:
    """Return the memory of every visible GPU in MiB, ``None`` if there is no driver."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    memory = [int(line) for line in listing.stdout.split() if line.isdigit()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return memory if chosen is None else memory[: len([part for part in chosen.split(",") if part])]


def in_place(start: Launch, *words: str) -> Launch:
    """Return the process that does ``python -m multimesh_maxtext WORDS`` in place of the trainer."""
    return replace(start, command=(*start.command[:3], "multimesh_maxtext", *words))
