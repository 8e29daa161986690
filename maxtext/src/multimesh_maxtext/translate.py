"""From a checked job to what MaxText is started with: configuration, environment, command. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from multimesh.errors import UsageError
from multimesh_maxtext.checks import Job
from multimesh_maxtext.handoff import Handoff
from multimesh_maxtext.options import Options
from multimesh_maxtext.ordering import schedule_name
from multimesh_maxtext.realm import memory_fraction
from multimesh_maxtext.text import index_path
from multimesh_maxtext.xla import xla_flags

TRAINER = "maxtext.trainers.pre_train.train"
JOINING = "multimesh_maxtext.joining"
RUN_NAME = "train"

_DEFAULTS = {
    *("run_name", "jax_cache_dir", "enable_checkpointing", "enable_tensorboard", "grain_worker_count"),
    *("learning_rate", "vocab_size", "head_dim", "base_num_kv_heads", "olmo_apply_ngram_filter"),
}
"""Settings that we choose without a flag: a KEY=VALUE argument replaces them."""

_CHECKPOINTED = {"run_name", "enable_checkpointing"}
"""... but for these, where ``--checkpoint`` depends on them."""

DEFAULT_PERIOD = 100
DEFAULT_EVAL_STEPS = 4

_PACKAGES = [
    Path(spec.origin).resolve().parents[1]
    for spec in map(find_spec, ("multimesh_maxtext", "multimesh"))
    if spec and spec.origin
]
"""The folders that hold what the hooks import."""

_LOG_LEVELS = {
    "none": {"TF_CPP_MIN_LOG_LEVEL": "1"},
    "info": {"JAX_LOGGING_LEVEL": "INFO", "TF_CPP_MIN_LOG_LEVEL": "0"},
    "debug": {"JAX_LOGGING_LEVEL": "DEBUG", "TF_CPP_MIN_LOG_LEVEL": "0"},
    "spew": {"JAX_LOGGING_LEVEL": "DEBUG", "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "1"},
}


@dataclass(frozen=True)
class Paths:
    """Where one run reads and writes."""

    python: str
    maxtext: Path
    output: Path
    metrics: Path

    @property
    def package(self) -> Path:
        """MaxText's package folder."""
        return self.maxtext / "maxtext"

    @property
    def log(self) -> Path:
        """What MaxText prints."""
        return self.output / "maxtext.log"

    @property
    def placement(self) -> Path:
        """Where every parameter lies, as the hooks of ``--backend multimesh`` write it."""
        return self.output / "placement.json"

    @property
    def forecast(self) -> Path:
        """The memory that each stage will need, as the hooks of ``--backend multimesh`` write it."""
        return self.output / "forecast.json"

    @property
    def timelines(self) -> Path:
        """Timelines of ``--profile``, as the hooks of ``--backend multimesh`` write them."""
        return self.output / "timelines"

    @property
    def checkpoints(self) -> Path:
        """Where MaxText keeps its checkpoints; a link to ``--checkpoint``."""
        return self.output / RUN_NAME / "checkpoints"

    @property
    def text(self) -> Path:
        """The tokens of ``--text``."""
        return self.output / "text"


@dataclass(frozen=True)
class Launch:
    """One process to start: its command, what it adds to the environment, and the configuration it stands for."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    configuration: Mapping[str, Any]


def forecasting(job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None) -> Launch:
    """Return the process that forecasts the memory of a job; it allocates nothing and reads no checkpoint."""
    changes = {"checkpoint": None, "profile": False, "dump": None, "dump_only": False}
    job = replace(job, options=Options(**{**vars(job.options), **changes}))
    start = launch(job, paths, inherited=inherited, gpu_memory=gpu_memory)
    asked = replace(handoff(job, paths), forecast=str(paths.forecast))
    return replace(start, environment={**start.environment, **asked.variables()})


def handoff(job: Job, paths: Paths) -> Handoff:
    """Return what the hooks of ``--backend multimesh`` are told."""
    o = job.options
    return Handoff(
        stages=o.pp,
        interleave=o.interleave,
        schedule=schedule_name(o),
        table=str(o.custom_schedule_path.resolve()) if o.custom_schedule_path else None,
        placement=str(paths.placement),
        dump=str(o.dump.resolve()) if o.dump else "",
        dump_passes=o.dump_mpmd_passes,
        dump_only=o.dump_only,
        profile=str(paths.timelines) if o.profile else "",
    )


def launch(
    job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None, local_rank: int = 0
) -> Launch:
    """Return the process that trains a job.

    Parameters
    ----------
    inherited
        The environment of this process; XLA_FLAGS and PYTHONPATH in it are extended, not replaced.
    gpu_memory
        Memory of a visible GPU in MiB, ``None`` if unknown.
    local_rank
        Of several processes: which of those on this machine it is, and so which GPUs are its own.
    """
    settings = configuration(job, paths)
    extra = dict(setting.split("=", 1) for setting in job.options.settings)
    free = _DEFAULTS - _CHECKPOINTED if job.options.checkpoint else _DEFAULTS
    for key in extra:
        if key not in free and key in settings:
            raise UsageError(f"{key}= is decided by the flags ({key}={settings[key]}); use the flag, or leave it out")
    settings = {key: value for key, value in settings.items() if key not in extra}
    base = job.options.maxtext_config or paths.package / "configs/base.yml"
    arguments = [argument(key, value) for key, value in settings.items()]
    # -P keeps the working folder off the module path: a folder of the user's must not shadow the trainer's modules.
    trainer = JOINING if job.options.nodes > 1 else TRAINER
    command = (paths.python, "-P", "-m", trainer, str(base.resolve()), *arguments, *job.options.settings)
    variables = environment(job, paths, inherited=inherited, gpu_memory=gpu_memory)
    if job.options.nodes > 1 and job.options.gpus:
        first = local_rank * job.options.gpus
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + job.options.gpus)))
    return Launch(command, variables, {**settings, **extra})


def configuration(job: Job, paths: Paths) -> dict[str, Any]:
    """Return MaxText's settings for a job, by MaxText's names."""
    o = job.options
    settings: dict[str, Any] = {
        "run_name": RUN_NAME,
        "base_output_directory": str(paths.output),
        "metrics_file": str(paths.metrics),
        "hardware": o.platform,
        "skip_jax_distributed_system": True,
        "jax_cache_dir": "",
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "steps": o.num_steps,
        "init_weights_seed": o.seed,
        "data_shuffle_seed": o.seed,
        "max_target_length": o.sequence_length,
        "attention": o.attention,
        "remat_policy": o.remat,
        "scan_layers": job.scans_layers,
        "use_iota_embed": o.use_iota_embed,
        "logits_dot_in_fp32": o.logits_dot_in_fp32,
        **_model(job),
        **_grid(job),
        **_dataset(job, paths),
    }
    if o.checkpoint:
        settings |= {"enable_checkpointing": True, "checkpoint_period": o.checkpoint_every or DEFAULT_PERIOD}
    if o.eval_every:
        settings |= {"eval_interval": o.eval_every, "eval_steps": o.eval_steps or DEFAULT_EVAL_STEPS}
    if o.profile:
        settings |= {
            "profiler": "xplane",
            "skip_first_n_steps_for_profiler": min(1, o.num_steps - 1),
            "profiler_steps": max(1, min(5, o.num_steps - 2)),
        }
    return settings


def _model(job: Job) -> dict[str, Any]:
    if not job.options.model_name:
        return dict(job.model.settings)
    return {"model_name": job.options.model_name, "override_model_config": True, **job.model.settings}


def _grid(job: Job) -> dict[str, Any]:
    o = job.options
    settings: dict[str, Any] = {
        "ici_data_parallelism": o.dp,
        "ici_fsdp_parallelism": o.fsdp,
        "ici_tensor_parallelism": 1 if o.sequence_parallel else o.tp,
        "ici_tensor_sequence_parallelism": o.tp if o.sequence_parallel else 1,
        "ici_expert_parallelism": o.ep,
        "ici_pipeline_parallelism": 1 if o.staged else o.pp,
        # One mesh over all processes, in the order of their ranks: the innermost axes stay within a machine.
        **({"num_slices": 1} if o.nodes > 1 else {}),
    }
    if o.pp == 1 or o.staged:
        return settings | {
            "gradient_accumulation_steps": job.microbatches,
            "per_device_batch_size": per_device(job.batch // job.microbatches, job.mesh_devices),
        }
    return settings | {
        "gradient_accumulation_steps": 1,
        "per_device_batch_size": per_device(job.batch, job.devices),
        "num_pipeline_microbatches": job.microbatches,
        "num_pipeline_repeats": o.interleave,
        "num_layers_per_pipeline_stage": job.model.layers // (o.pp * o.interleave),
    }


def per_device(rows: int, devices: int) -> float:
    """Return the share that MaxText multiplies by the devices and truncates, such that it comes to ``rows`` again."""
    share = rows / devices
    while int(devices * share) < rows:
        share = math.nextafter(share, math.inf)
    return share


def _dataset(job: Job, paths: Paths) -> dict[str, Any]:
    o = job.options
    if o.text:
        return {
            "dataset_type": "olmo_grain",
            "olmo_index_path": str(index_path(paths.text)),
            "olmo_apply_ngram_filter": False,
            "grain_worker_count": 0,
        }
    if o.use_tfds_dataset:
        settings = {"dataset_type": "tfds", "dataset_path": o.dataset_path, "dataset_name": o.dataset_name}
        return settings | ({"tokenizer_path": o.tokenizer_path} if o.tokenizer_path else {})
    return {"dataset_type": "synthetic"}


def environment(job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None) -> dict[str, str]:
    """Return the variables that the trainer gets on top of the inherited ones."""
    o = job.options
    flags = [inherited.get("XLA_FLAGS", ""), *xla_flags(o, devices=job.devices // o.nodes)]
    packages = [str(folder) for folder in _PACKAGES if folder.name not in ("site-packages", "dist-packages")]
    own = packages if o.staged or o.nodes > 1 else []
    search = [str(paths.maxtext), *own, *filter(None, [inherited.get("PYTHONPATH")])]
    variables = {
        "DECOUPLE_GCLOUD": "TRUE",
        "JAX_PLATFORMS": "cuda" if o.gpus else "cpu",
        "PYTHONPATH": ":".join(search),
        "PYTHONUNBUFFERED": "1",
        **_LOG_LEVELS[o.debug],
    }
    if o.staged:
        variables |= handoff(job, paths).variables()
    if any(flags):
        variables["XLA_FLAGS"] = " ".join(filter(None, flags))
    if o.platform == "cpu":
        # XLA:CPU takes the size of its thread pool from NPROC: fewer threads than waiting collectives deadlock.
        # OpenBLAS threads of every virtual device would fight over the same cores.
        variables |= {"NPROC": str(max(64, 8 * job.devices)), "OPENBLAS_NUM_THREADS": "1"}
    elif o.fbmem and gpu_memory:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction(o.fbmem, gpu_memory))
    if o.debug_nccl and o.gpus:
        variables["NCCL_DEBUG"] = "INFO"
    return variables


def argument(key: str, value: Any) -> str:
    """Return ``key=value`` such that MaxText's YAML reader gives back the value, of the same type."""
    if isinstance(value, bool) or value is None:
        return f"{key}={json.dumps(value)}"
    if isinstance(value, str) and value and (yaml.safe_load(value) if _plain(value) else None) != value:
        return f"{key}={json.dumps(value, ensure_ascii=False)}"
    return f"{key}={value}"


def _plain(value: str) -> bool:
    return not any(character in value for character in "#:{}[],&*!|>'\"%@`\n")
