"""Small disks: file systems in memory that fill up, and that can be made read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.parts import packages


@contextmanager
def small(place: Path, megabytes: int) -> Iterator[Path]:
    """Have a disk of a few megabytes at a new folder for the length of a block."""
    place.mkdir()
    options = f"size={megabytes}m,mode=1777"
    process = subprocess.run(
        packages.as_root("mount", "-t", "tmpfs", "-o", options, "tmpfs", place), capture_output=True, text=True
    )
    if process.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {process.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(packages.as_root("umount", "--lazy", place), check=True)


def remount(place: Path, mode: str) -> None:
    """Let everybody write to a small disk (``rw``), or nobody (``ro``)."""
    subprocess.run(packages.as_root("mount", "-o", f"remount,{mode}", place), check=True)
