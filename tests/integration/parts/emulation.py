"""QEMU for the programs of another machine, registered with the kernel for as long as a test needs it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.parts import packages

_KERNEL = Path("/proc/sys/fs/binfmt_misc")
_ENTRY = _KERNEL / "qemu-aarch64"
# What the package has for a machine with systemd; opened when it is registered, so that containers need no QEMU inside.
_SETTING = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")


@contextmanager
def arm64() -> Iterator[None]:
    """Let this machine run programs for linux/arm64; what it had registered before is left as it is."""
    packages.need("qemu-aarch64-static", "qemu-user-static")
    with _file_system():
        if _ENTRY.exists():
            yield
            return
        _tell(_KERNEL / "register", _SETTING.read_text())
        try:
            yield
        finally:
            _tell(_ENTRY, "-1")


@contextmanager
def switched_off() -> Iterator[None]:
    """Take it away for a moment."""
    _tell(_ENTRY, "0")
    try:
        yield
    finally:
        _tell(_ENTRY, "1")


def _tell(file: Path, words: str) -> None:
    subprocess.run(packages.as_root("tee", file), input=words.encode(), stdout=subprocess.DEVNULL, check=True)


@contextmanager
def _file_system() -> Iterator[None]:
    if (_KERNEL / "register").exists():
        yield
        return
    subprocess.run(packages.as_root("mount", "-t", "binfmt_misc", "binfmt_misc", _KERNEL), check=True)
    try:
        yield
    finally:
        subprocess.run(packages.as_root("umount", _KERNEL), check=True)
