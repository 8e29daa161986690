"""``KEY=VALUE`` arguments before MaxText reads and checks them: names, paths in buckets, what would do nothing."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from multimesh_maxtext.command.flags import FLAGS, Flags
from multimesh_maxtext.errors import FlagError, LauncherError, MissingPartError, UnsupportedError

_CLOUD = "it is for Google Cloud, which a run does without; see --metrics-file and --metrics-hook"
_PATHWAYS = "it is for Pathways; a run with --resume goes on on another grid"
_IDLE = {
    **dict.fromkeys(
        ("enable_goodput_recording", "monitor_goodput", "enable_pathways_goodput", "goodput_job_name"), _CLOUD
    ),
    **dict.fromkeys((f"report_{kind}_metric_for_gcp_monitoring" for kind in ("heartbeat", "performance")), _CLOUD),
    **dict.fromkeys(("use_vertex_tensorboard", "enable_checkpoint_cloud_logger", "managed_mldiagnostics"), _CLOUD),
    **dict.fromkeys(("elastic_enabled", "enable_single_controller", "subslice_shape"), _PATHWAYS),
    "jax_distributed_initialization_timeout": "run.py starts the processes; use MULTIMESH_START_TIMEOUT",
}
"""Settings of MaxText that would be accepted and do nothing in a run, and why. Switched off they are no error."""

_BUCKETS = {"gs": ("gcsfs", "google-cloud-storage"), "s3": ("s3fs", "s3fs")}
"""Of each kind of bucket: the module by which paths in it are read, and what to install beside it."""

_FIELD = re.compile(r"^  (\w+): \S", re.MULTILINE)
"""A field of MaxText's configuration classes in their source, because to import it imports JAX."""


def has_package(name: str) -> bool:
    """Say whether a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def find_buckets(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that name a bucket, and its kind."""
    return {key: str(value)[:2] for key, value in settings.items() if str(value).startswith(("gs://", "s3://"))}


@functools.cache
def setting_names(package: Path) -> frozenset[str]:
    """Return the names of MaxText's settings. ``package`` is its package folder."""
    return frozenset(_FIELD.findall((package / "configs/types.py").read_text(encoding="utf-8")))


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
    for key, kind in find_buckets(flags.values).items():
        if not has_package(_BUCKETS[kind][0]):
            packages = " ".join(dict.fromkeys(_BUCKETS[kind]))
            yield MissingPartError(f"{key}={kind}://...: a package is missing; pip install {packages}")
