"""Names this Python, and finds stale parts of this checkout: a copied ``.venv``, a MaxText older than its patches."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import yaml

from multimesh_maxtext.errors import MissingPartError


def python() -> str:
    """Return the version of this Python, the one that its environment was made from, and the version of jax."""
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    jax = "".join(f", jax {found.version}" for found in metadata.distributions(name="jax"))
    return f"Python {platform.python_version()} (of {os.path.basename(sys.prefix)}: {base}){jax}"


def check_environment(root: Path) -> None:
    """Raise ``MissingPartError`` where ``.venv`` was copied, and so has the packages of another checkout."""
    venv = root / ".venv"
    try:
        lines = (venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    command = next((line.partition("=")[2].strip() for line in lines if line.startswith("command")), "")
    made = Path(command.split(" ")[-1])
    if command and made.name == venv.name and made.resolve() != venv.resolve():
        raise MissingPartError(
            f"{venv} was copied from {made}, and uses its packages; remove it and run ./bootstrap.sh"
        )


def stale_parts(root: Path) -> Iterator[str]:
    """Yield a line where ``third_party/maxtext`` is another than that of ``sources.lock``, as after a pull."""
    try:
        lock = yaml.safe_load((root / "sources.lock").read_text(encoding="utf-8"))
        wanted = lock["components"]["maxtext"]["patched_commit"]
        git = root / "third_party/maxtext/.git"
        head = (git / "HEAD").read_text(encoding="utf-8").strip().removeprefix("ref: ")
        found = (git / head).read_text(encoding="utf-8").strip() if "/" in head else head
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return  # no checkout with sources, or one in a form of its own
    if wanted and found != wanted:
        yield f"third_party/maxtext is at {found[:12]}, sources.lock wants {wanted[:12]}; run ./bootstrap.sh"
