"""Translates a checked job to MaxText's configuration and environment. Pure functions."""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from multimesh_maxtext.command import compile_cache, within_stage
from multimesh_maxtext.command.buckets import find_buckets
from multimesh_maxtext.command.checks import UNTOKENIZED, Job
from multimesh_maxtext.command.flags import TIMEOUTS
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.settings import read_dataset, read_values
from multimesh_maxtext.command.text import index_path
from multimesh_maxtext.command.values import XLA_SWITCHES, XLA_THRESHOLDS
from multimesh_maxtext.errors import UsageError

RUN_NAME = "train"
DEFAULT_PERIOD = 100

DEFAULT_EVAL_STEPS = 4
JAX_FRACTION = 0.75
"""Share of a GPU's memory that JAX takes by default."""

_PACKAGES = [
    Path(spec.origin).resolve().parents[1]
    for spec in map(find_spec, ("multimesh_maxtext", "multimesh"))
    if spec and spec.origin
]
"""Folders of the packages that the hooks import."""

_LOG_LEVELS = {
    "none": {"TF_CPP_MIN_LOG_LEVEL": "1"},
    "info": {"JAX_LOGGING_LEVEL": "INFO", "TF_CPP_MIN_LOG_LEVEL": "0"},
    "debug": {"JAX_LOGGING_LEVEL": "DEBUG", "TF_CPP_MIN_LOG_LEVEL": "0"},
    "spew": {"JAX_LOGGING_LEVEL": "DEBUG", "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "1"},
}

GPU_ONLY = ("collective_matmul", *XLA_SWITCHES, *XLA_THRESHOLDS, "debug_nccl", "fbmem")

PIPELINE_ONLY = ("dump_mpmd_passes", "autoshard", "replicate_small_params", "fuse_tasks", "only_fuse_loop_tasks")
"""Flags that scripts of the original give to jobs without a pipeline too."""

_NOWHERE = {
    "zcmem": "the Realm runtime",
    "sysmem": "the Realm runtime",
    "host_offload_min_reuse_distance": "the original's compiler; --remat minimal_offloaded offloads",
    "load_balance_embeddings": "the original's compiler",
    "load_balance_decoder_norm": "the original's compiler",
    "hoist_loop_convert": "the original's compiler",
    "compile_topology_num_slices": "MaxText's train_compile",
}
"""Flags without a counterpart here, and their purpose."""

_MB_FROM = 1000
"""``--fbmem`` counts GB below this, and MB from here on."""

_LEAST_FRACTION = 0.05
"""Least share of a GPU's memory. With less JAX cannot even load its libraries; a wrong unit is likely."""


@dataclass(frozen=True)
class Paths:
    """Where one run reads and writes. ``process`` is this process's folder below that of the first, empty for that."""

    python: str
    maxtext: Path
    output: Path
    metrics: Path
    process: str = ""

    def below(self, name: str) -> Paths:
        """Return where something else than a run writes: in a folder of its own."""
        return replace(self, output=self.output / name, metrics=self.output / name / "metrics.jsonl")

    @property
    def package(self) -> Path:
        """MaxText's package folder."""
        return self.maxtext / "maxtext"

    @property
    def log(self) -> Path:
        """MaxText's log."""
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
    def schedule(self) -> Path:
        """The choice of ``--schedule auto``, as the hooks of ``--backend multimesh`` write it."""
        return self.output / "schedule.json"

    @property
    def restarts(self) -> Path:
        """Why the job was started again, each time."""
        return self.output / "restarts.json"

    @property
    def timelines(self) -> Path:
        """Timelines of ``--profile``, as the hooks of ``--backend multimesh`` write them."""
        return self.output / "timelines"

    @property
    def checkpoints(self) -> Path:
        """Where MaxText keeps its checkpoints; a link to ``--checkpoint``."""
        return self.output / RUN_NAME / "checkpoints"

    @property
    def made(self) -> tuple[str, ...]:
        """Patterns of a run's files in the output folder, but for the folders of other processes."""
        own = (self.placement, self.forecast, self.timelines, self.schedule, self.restarts, self.text)
        logs, picture = f"{self.log.stem}*{self.log.suffix}", self.forecast.with_suffix(".svg").name
        return (*(path.name for path in own), logs, picture, "metrics.jsonl", RUN_NAME, "spmd")

    @property
    def text(self) -> Path:
        """The tokens of ``--text``."""
        return self.output / "text"


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
        "remat_policy": "minimal_with_context" if o.remat == "minimal_flash" else o.remat,
        "scan_layers": job.scans_layers,
        **_model(job),
        **_grid(job),
        **_dataset(job, paths),
    }
    for name in ("use_iota_embed", "logits_dot_in_fp32", "compile_topology_num_slices"):
        if getattr(o, name) is not None:
            settings[name] = getattr(o, name)
    if o.staged and job.model.resolved.get("quantization"):
        # MaxText takes all devices of the process, among them those of other stages, and cuts a microbatch by them.
        settings["quantization_local_shard_count"] = within_stage.quantizing_devices(o, job.mesh_devices)
    if o.checkpoint:
        settings |= {"enable_checkpointing": True, "checkpoint_period": o.checkpoint_every or DEFAULT_PERIOD}
        settings["max_num_checkpoints_to_keep"] = o.keep_checkpoints
        settings["enable_autocheckpoint"] = True  # also where a signal says that the job is about to end
    if o.eval_every:
        settings |= {"eval_interval": o.eval_every, "eval_steps": o.eval_steps or DEFAULT_EVAL_STEPS}
        if job.rows % job.readers and read_dataset(o) not in UNTOKENIZED:  # each reader evaluates on as many rows
            rows = math.lcm(job.rows, job.readers)
            settings["eval_per_device_batch_size"] = per_device(rows, job.mesh_devices)
    if o.zero and not o.staged:
        settings["shard_optimizer_over_data"] = True
    if o.profile:
        settings |= {
            "profiler": "xplane",
            "skip_first_n_steps_for_profiler": min(1, o.num_steps - 1),
            "profiler_steps": max(1, min(5, o.num_steps - 2)),
        }
    return settings


def _model(job: Job) -> dict[str, Any]:
    if not job.model.name:
        return dict(job.model.settings)
    return {"model_name": job.model.name, "override_model_config": True, **job.model.settings}


def _grid(job: Job) -> dict[str, Any]:
    o = job.options
    settings: dict[str, Any] = {
        "ici_data_parallelism": o.dp,
        "ici_fsdp_parallelism": o.fsdp,
        "ici_tensor_parallelism": 1 if o.sequence_parallel else o.tp,
        "ici_tensor_sequence_parallelism": o.tp if o.sequence_parallel else 1,
        "ici_context_parallelism": o.cp,
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
    """Return the share of a device. MaxText multiplies it by the devices and truncates: that gives ``rows`` again."""
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
    tokenizer = {"tokenizer_path": o.tokenizer_path} if o.tokenizer_path else {}
    if o.use_tfds_dataset:
        return {"dataset_type": "tfds", "dataset_path": o.dataset_path, "dataset_name": o.dataset_name, **tokenizer}
    return {"dataset_type": "synthetic", **tokenizer}


def argument(key: str, value: Any) -> str:
    """Return ``key=value`` such that MaxText's YAML reader gives back the value, of the same type."""
    if isinstance(value, bool) or value is None:
        return f"{key}={json.dumps(value)}"
    if isinstance(value, str) and value and (yaml.safe_load(value) if _plain(value) else None) != value:
        return f"{key}={json.dumps(value, ensure_ascii=False)}"
    return f"{key}={value}"


def _plain(value: str) -> bool:
    return value != "=" and not any(character in value for character in "#:{}[],&*!|>'\"%@`\n")


def environment(job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None) -> dict[str, str]:
    """Return the variables that the trainer gets on top of the inherited ones."""
    o = job.options
    given, users_flags = read_values(o.settings), inherited.get("XLA_FLAGS", "")
    flags = [users_flags, *xla_flags(o, devices=job.devices // o.nodes, users=users_flags, process=paths.process)]
    packages = [str(folder) for folder in _PACKAGES if folder.name not in ("site-packages", "dist-packages")]
    # A stray jax.py or numpy.py of the user's must not win: installed packages come before inherited folders.
    places = sysconfig.get_paths()
    installed = dict.fromkeys(places[name] for name in ("stdlib", "platstdlib", "platlib", "purelib"))
    users = [path for path in inherited.get("PYTHONPATH", "").split(":") if Path(path).is_absolute()]
    search = [str(paths.maxtext), *packages, *(installed if users else ()), *users]
    variables = {
        # Without Google Cloud MaxText also leaves out TensorBoard; else it takes what is installed.
        "DECOUPLE_GCLOUD": str(not (given.get("enable_tensorboard") is True or find_buckets(given))).upper(),
        "JAX_PLATFORMS": "cuda" if o.gpus else "cpu",
        "PYTHONPATH": ":".join(search),
        "PYTHONUNBUFFERED": "1",
        **_LOG_LEVELS[o.debug],
    }
    if o.checkpoint and o.nodes > 1:
        variables["JAX_ENABLE_PREEMPTION_SERVICE"] = "1"  # SIGTERM is a notice, which all processes get
    waits = {name: getattr(o, f"{name}_timeout") for name in TIMEOUTS}
    variables |= {f"MULTIMESH_{name.upper()}_TIMEOUT": f"{value:g}" for name, value in waits.items() if value}
    if "jax_cache_dir" not in given:
        variables |= compile_cache.variables(inherited, cpu=o.platform == "cpu")
    if any(flags):
        variables["XLA_FLAGS"] = " ".join(filter(None, flags))
    if o.platform == "cpu":
        # XLA:CPU takes the size of its thread pool from NPROC: fewer threads than waiting collectives deadlock.
        # OpenBLAS threads of every virtual device would fight over the same cores.
        variables |= {"NPROC": str(max(64, 8 * job.devices)), "OPENBLAS_NUM_THREADS": "1"}
    elif o.fbmem is not None and gpu_memory:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction(o.fbmem, gpu_memory))
    if o.debug_nccl and o.gpus:
        variables["NCCL_DEBUG"] = "INFO"
    return variables


def xla_flags(options: Options, *, devices: int, users: str = "", process: str = "") -> list[str]:
    """Return the flags for ``XLA_FLAGS``.

    ``devices``: devices of this process; on the CPU platform XLA makes so many of the host.
    ``users``: flags that are set already. They win over our defaults, and the command line wins over them.
    ``process``: folder of one of several processes in that of ``--dump``.
    """
    flags: list[str] = []
    if options.platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    else:
        for name, (_, switches) in XLA_SWITCHES.items():
            given = getattr(options, name)
            value = str(given is not False).lower()
            flags += [f"{switch}={value}" for switch in switches if given is not None or switch not in users]
        for name, (_, default, flag) in XLA_THRESHOLDS.items():
            given = getattr(options, name)
            size = default if given is None else given
            flags += [f"{flag}={size}"] if given is not None or flag not in users else []
        if options.collective_matmul is not None:
            flags += [
                f"--xla_gpu_threshold_for_windowed_einsum_mib={options.collective_matmul}",
                "--xla_gpu_multi_streamed_windowed_einsum=true",
            ]
    # A pipeline has many kernels: only where a flag asks for them, beside the plan.
    if options.dump and (options.dump_hlo or options.dump_all_passes or not options.staged):
        folder = options.dump.resolve() / process / ("xla" if options.staged else "")
        flags.append(f'--xla_dump_to="{folder}"')
        flags.append("--xla_dump_hlo_as_text=true")
        flags += ["--xla_dump_hlo_pass_re=.*"] if options.dump_all_passes else []
    return flags


def fbmem_mib(fbmem: int) -> int:
    """Return ``--fbmem`` in MiB, as the original hands it to its runtime."""
    return fbmem if fbmem >= _MB_FROM else 1000 * fbmem


def memory_fraction(fbmem: int, device_memory: int) -> float:
    """Return JAX's memory fraction for ``--fbmem``, of a device's memory in MiB. JAX takes at most the whole device.

    Raises ``UsageError`` where that is next to nothing.
    """
    fraction = round(min(1.0, fbmem_mib(fbmem) / device_memory), 4)
    if fraction < _LEAST_FRACTION:
        raise UsageError(
            f"--fbmem {fbmem} is {fraction} of a GPU's {device_memory} MiB, less than {_LEAST_FRACTION}; it counts GB "
            f"below {_MB_FROM} and MB from there on: use e.g. --fbmem {int(0.9 * device_memory)}, or leave it out"
        )
    return fraction


def notes(options: Options, *, gpu_memory: int | None) -> list[str]:
    """Return lines about flags that became something else, or nothing.

    ``gpu_memory``: memory of a visible GPU in MiB, ``None`` if unknown.
    """
    lines = []
    if options.fbmem is not None and options.gpus and gpu_memory is not None:
        fraction = memory_fraction(options.fbmem, gpu_memory)
        lines.append(f"--fbmem {options.fbmem}: JAX takes {fraction} of each GPU's {gpu_memory} MiB")
    if options.zero and not options.staged:
        lines.append(
            "--zero 1: MaxText rounds parameters and sums of gradients to bfloat16 if it accumulates microbatches"
        )
    missing = _without_effect(options, gpu_memory)
    return [*lines, f"without effect here: {missing}"] if missing else lines


def _without_effect(options: Options, gpu_memory: int | None) -> str:
    """Name the flags without effect, and their purpose."""

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')}"

    why: dict[str, list[str]] = {}
    for name, reason in _NOWHERE.items():
        if options.has(name) and (name, getattr(options, name)) != ("host_offload_min_reuse_distance", 0):
            why.setdefault(reason, []).append(flag(name))
    if options.network not in (None, "none"):
        why.setdefault("the Realm runtime", []).append("--network")
    if options.realm:
        why.setdefault("the Realm runtime", []).extend(dict.fromkeys(options.realm))
    if options.fbmem is not None and options.gpus and gpu_memory is None and not options.forecast:
        why.setdefault("a GPU, and none can be seen here", []).append("--fbmem")
    if options.forecast:
        given = ("profile", "verify", "checkpoint", "eval_every", "dump", "metrics_hook")
        why.setdefault("a run: a forecast trains nothing", []).extend(flag(name) for name in given if options.has(name))
    if options.platform == "cpu":
        why.setdefault("GPUs", []).extend(flag(name) for name in GPU_ONLY if options.has(name))
    if not options.staged:
        why.setdefault("pipelines of MultiMesh", []).extend(flag(name) for name in PIPELINE_ONLY if options.has(name))
    return "; ".join(f"{', '.join(names)} (for {reason})" for reason, names in why.items() if names)
