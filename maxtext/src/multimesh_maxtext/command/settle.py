"""Makes a job of a command line: finds all its errors at once, and replaces kernels that this machine lacks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multimesh_maxtext.command.buckets import find_wrong_buckets
from multimesh_maxtext.command.checks import Job, find_wrong_flags, find_wrong_sizes, make_job
from multimesh_maxtext.command.dataset import find_missing_settings, find_notes
from multimesh_maxtext.command.kernel_folders import find_wrong_folders
from multimesh_maxtext.command.launch import settings_of_flags
from multimesh_maxtext.command.member import find_alone
from multimesh_maxtext.command.model import describe_model, has_package
from multimesh_maxtext.command.options import Options, Parsed
from multimesh_maxtext.command.settings import find_idle_settings, find_wrong_settings
from multimesh_maxtext.command.within_stage import describe_experts
from multimesh_maxtext.errors import LauncherError, UsageError, raise_all

_FLAG_OF = {
    "steps": "--num-steps",
    "max_target_length": "--sequence-length",
    "remat_policy": "--remat",
    "base_num_decoder_layers": "--num-layers",
    "base_emb_dim": "--model-dims",
    "base_mlp_dim": "--mlp-dims",
    "base_num_query_heads": "--num-heads",
    "base_num_kv_heads": "--num-kv-heads",
    "base_output_directory": "--output",
    "checkpoint_period": "--checkpoint-every",
    "max_num_checkpoints_to_keep": "--keep-checkpoints",
    "enable_autocheckpoint": "--checkpoint, which saves when a signal ends the run",
    "eval_interval": "--eval-every",
    "hardware": "--gpus or --cpus",
    "gradient_accumulation_steps": "--batch-size and --microbatch-size",
    "per_device_batch_size": "--batch-size and --microbatch-size",
    "dataset_type": "--text, --use-tfds-dataset",
    "profiler": "--profile",
    "shard_optimizer_over_data": "--zero",
    **dict.fromkeys(("init_weights_seed", "data_shuffle_seed"), "--seed"),
    "ici_data_parallelism": "--dp",
    "ici_fsdp_parallelism": "--fsdp",
    "ici_tensor_parallelism": "--tp",
    "ici_context_parallelism": "--cp",
    "ici_expert_parallelism": "--ep",
    "ici_pipeline_parallelism": "--pp",
}
"""Flags that decide settings of MaxText, where their names differ."""


@dataclass(frozen=True)
class Settled:
    """A job that can be started, and a line for each flag that was replaced."""

    job: Job
    notes: tuple[str, ...]


def settle(parsed: Parsed, package: Path) -> Settled:
    """Return the job of a command line.

    ``package``: MaxText's package folder; its ``configs`` are read.

    Raises ``LauncherError`` with all errors, but for those that may only follow from a flag that could not be read.
    """
    options = parsed.options
    found = [*find_wrong_flags(options), *find_wrong_buckets(options), *find_alone(options)]
    found += find_wrong_folders(options)
    notes = tuple(_replace_kernels(options))
    flag = [f"attention_type={options.attention_type}"] if options.attention_type else []
    wrong = dict(find_wrong_settings([*options.settings, *flag], package))
    found += [*wrong.values(), *find_idle_settings(options.settings)]
    job, sound = None, copy.copy(options)
    sound.settings = [setting for setting in options.settings if setting not in wrong]
    try:
        job = make_job(options, describe_model(sound, package))
    except LauncherError as error:
        found.append(error)
    if job:
        found += [*find_wrong_sizes(job), *find_missing_settings(job), *_find_overrides(job)]
        notes = (*notes, *find_notes(job), *describe_experts(options, job.model))
    raise_all([*parsed.wrong, *(error for error in found if not _follows(error, parsed.doubtful))])
    if job is None:
        raise found[-1]
    return Settled(job, notes)


def _find_overrides(job: Job) -> Iterator[LauncherError]:
    """Yield errors of settings that flags decide."""
    settings = settings_of_flags(job)
    for setting in job.options.settings:
        key = setting.split("=")[0]
        if key in settings:
            flag = _FLAG_OF.get(key) or (f"--{key.replace('_', '-')}" if hasattr(job.options, key) else "")
            remedy = f"use {flag}, or leave it out" if flag else "leave it out"
            yield UsageError(f"{key}= is decided by the flags ({key}={settings[key]}); {remedy}")
        elif key == "model_name":
            yield UsageError(f"{setting}: the sizes of the model follow from --model-name; use that")


def _follows(error: LauncherError, doubtful: frozenset[str]) -> bool:
    """Whether an error names a flag that could not be read, as such or as an axis."""
    words = {word.strip(",.;:()").removeprefix("--") for word in str(error).split()}
    return any(flag.lstrip("-") in words for flag in doubtful)


def _replace_kernels(options: Options) -> Iterator[str]:
    """Change kernels that are not installed here to equal ones; yield a line for each."""
    if options.attention == "cudnn_flash_te" and options.cp == 1 and not has_package("transformer_engine"):
        options.attention = "cudnn_flash_jax"
        yield "--attention cudnn_flash_te runs as cudnn_flash_jax, the same cuDNN kernels: TransformerEngine is missing"
