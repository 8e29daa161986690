"""Paths in buckets, ``gs://`` and ``s3://``: which settings may have them, and the packages that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multimesh_maxtext.command.model import has_package
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.settings import read_values
from multimesh_maxtext.errors import LauncherError, MissingPartError, UnsupportedError

_PACKAGES = {"gs": ("gcsfs", "google-cloud-storage"), "s3": ("s3fs", "s3fs")}
"""Of each kind of bucket: the module by which paths in it are read, and what to install beside it."""

_FOLDERS = ("output", "checkpoint", "export", "metrics_file", "dump", "text")


def find_buckets(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that name a bucket, and its kind."""
    found = {key: str(value).partition("://")[0] for key, value in settings.items() if "://" in str(value)}
    return {key: kind for key, kind in found.items() if kind in _PACKAGES}


def find_wrong_buckets(o: Options) -> Iterator[LauncherError]:
    """Yield the paths in buckets that this command cannot use, and the packages that are missing for others."""
    for name in _FOLDERS:
        value = getattr(o, name)
        for path in value if isinstance(value, list) else filter(None, [value]):
            if isinstance(path, Path) and path.parts[0].removesuffix(":") in _PACKAGES:
                yield UnsupportedError(
                    f"--{name.replace('_', '-')} {path.parts[0]}//{'/'.join(path.parts[1:])}: this must be on a file "
                    "system; mount the bucket, for example with gcsfuse or mountpoint-s3, and give the path there"
                )
    for key, kind in find_buckets(read_values(o.settings)).items():
        module, package = _PACKAGES[kind]
        if not has_package(module):
            every = dict.fromkeys((module, package))
            yield MissingPartError(f"{key}={kind}://...: a package is missing; pip install {' '.join(every)}")
