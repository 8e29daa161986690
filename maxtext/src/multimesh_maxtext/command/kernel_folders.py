"""Folders of compiled kernels: which of them a command line may name, and what one holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from multimesh_maxtext.command.checks import schedule_name
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.errors import FileError, LauncherError, UsageError

_MANIFEST = "manifest.json"  # the library's


def find_wrong_folders(o: Options) -> Iterator[LauncherError]:
    """Yield what is wrong about ``--precompile`` and ``--precompiled``."""
    if o.precompiled and o.forecast:
        yield UsageError("--precompiled is for a run that trains; leave it out beside --forecast and --precompile")
    if (o.precompile or o.precompiled) and schedule_name(o) == "auto":
        yield UsageError("--schedule auto finds its order where it runs, so nothing can be precompiled; name another")
    if o.precompile and o.nodes > 1 and not o.gpus:
        yield UsageError("--precompile compiles for CPU devices of one process; leave out --nodes")
    if o.precompile and (o.precompile / _MANIFEST).exists():
        yield FileError(f"--precompile {o.precompile}: it holds kernels already; choose another folder, or remove it")
    if o.precompiled and not (o.precompiled / _MANIFEST).is_file():
        yield FileError(
            f"--precompiled {o.precompiled}: it has no {_MANIFEST}; name a folder that --precompile has written"
        )


def describe_kernels(folder: Path) -> dict[str, int]:
    """Return how many kernels a folder has, how many of them unlike, and the bytes of these."""
    found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    size = sum((folder / name).stat().st_size for name in found["files"].values())
    return {"kernels": len(found["kernels"]), "programs": len(found["files"]), "bytes": size}
