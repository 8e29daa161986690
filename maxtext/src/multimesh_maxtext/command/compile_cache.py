"""Where the programs that trainers compile are kept for the next start. It imports no JAX."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

FOLDER = "JAX_COMPILATION_CACHE_DIR"
"""JAX's variable for the folder."""

SWITCH = "JAX_ENABLE_COMPILATION_CACHE"
"""JAX's variable that turns the cache off: 0 or false."""

SIZE = 5 * 10**9
"""Bytes of the folder; what was not read for longest goes first."""


def variables(inherited: Mapping[str, str], *, cpu: bool) -> dict[str, str]:
    """Return the variables of a trainer that keeps all that it compiles.

    Nothing where the user's variables of JAX name a folder or turn the cache off, or where ours can't be written.
    Processes share the folder: JAX locks it, and in a job of several processes the first writes. An entry that can't
    be read is compiled again.

    ``inherited``: the environment of this process.
    ``cpu``: whether programs are for CPUs. Machines with other instructions then have other folders.
    """
    off = inherited.get(SWITCH, "1").lower() in ("0", "false", "f", "no", "n", "off")
    folder = default_folder(inherited, cpu=cpu)
    if off or FOLDER in inherited or folder is None or not _writable(folder):
        return {}
    limits = {"JAX_COMPILATION_CACHE_MAX_SIZE": str(SIZE), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {FOLDER: str(folder)} | {name: value for name, value in limits.items() if name not in inherited}


def first_use(added: Mapping[str, str]) -> str:
    """Return a hint for users who have not used the cache yet; empty for others."""
    folder = added.get(FOLDER)
    if folder is None or Path(folder).exists():
        return ""
    return (
        f"compiled programs are kept for the next start in {folder}, up to {SIZE / 1e9:g} GB; {SWITCH}=0 turns that off"
    )


def default_folder(inherited: Mapping[str, str], *, cpu: bool) -> Path | None:
    """Return the user's cache folder for compiled programs; None for a user without a home."""
    given = Path(inherited.get("XDG_CACHE_HOME", ""))
    if not given.is_absolute() and not inherited.get("HOME"):
        return None
    home = given if given.is_absolute() else Path(inherited["HOME"]) / ".cache"
    return home / "multimesh" / "compiled" / (f"cpu-{_instructions()}" if cpu else "accelerators")


def _instructions() -> str:
    """A short name of what this CPU can run."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    known = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def _writable(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
