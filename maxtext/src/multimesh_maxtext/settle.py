"""A command line as a job: everything wrong with it at once, and what runs in place of what this machine lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multimesh_maxtext.checks import Job, find_wrong_flags, find_wrong_sizes, make_job
from multimesh_maxtext.errors import LauncherError, UsageError, raise_all
from multimesh_maxtext.launch import decided
from multimesh_maxtext.model import describe_model, has_package
from multimesh_maxtext.options import Options, Parsed
from multimesh_maxtext.settings import find_wrong_settings


@dataclass(frozen=True)
class Settled:
    """A job that can be started, and lines about what runs otherwise than its flags say."""

    job: Job
    notes: tuple[str, ...]


def settle(parsed: Parsed, package: Path) -> Settled:
    """Return the job of a command line.

    Parameters
    ----------
    package
        MaxText's package folder; its ``configs`` are read.

    Raises
    ------
    LauncherError
        With everything that is wrong. What may only follow from a flag that could not be read is left out.
    """
    options = parsed.options
    notes = tuple(_replace_kernels(options))
    found = [*find_wrong_flags(options), *find_wrong_settings(options.settings, package)]
    job = None
    try:
        job = make_job(options, describe_model(options, package))
    except LauncherError as error:
        found.append(error)
    if job:
        found += [*find_wrong_sizes(job), *_find_decided(job)]
    raise_all([*parsed.wrong, *(error for error in found if not _follows(error, parsed.doubtful))])
    if job is None:
        raise found[-1]
    return Settled(job, notes)


def _find_decided(job: Job) -> Iterator[LauncherError]:
    """Yield the settings of MaxText that are left to flags."""
    settings = decided(job)
    for setting in job.options.settings:
        key = setting.split("=")[0]
        if key in settings:
            yield UsageError(f"{key}= is decided by the flags ({key}={settings[key]}); use the flag, or leave it out")


def _follows(error: LauncherError, doubtful: frozenset[str]) -> bool:
    """Whether an error names a flag, as such or as an axis, that could not be read."""
    return any(re.search(rf"(?<![\w-])(--)?{flag.lstrip('-')}(?![\w-])", str(error)) for flag in doubtful)


def _replace_kernels(options: Options) -> Iterator[str]:
    """Change kernels that are not installed here to equal ones; yield a line for each."""
    if options.attention == "cudnn_flash_te" and not has_package("transformer_engine"):
        options.attention = "cudnn_flash_jax"
        yield "--attention cudnn_flash_te runs as cudnn_flash_jax, the same cuDNN kernels: TransformerEngine is missing"
