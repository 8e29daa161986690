"""Locks ``requirements/*.in`` for every Python that we support; the sources of JAX and ``requires-python`` follow."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tooling.core import console, errors, files, proc
from tooling.core.console import Subparsers, command
from tooling.environment import find_python
from tooling.sources import manifest, named, pins
from tooling.sources.workspace import Workspace

# Those that others are constrained by come first.
GROUPS = ("run", "dev", "tooling", "bench", "docs", "inventory", "jupyter", "data", "torch", "cuda12", "cuda13",
          "compile-gpu")  # fmt: skip
ALONE = ("compile-gpu",)  # without what their packages ask for
OLDEST = find_python.in_dots(find_python.OLDEST)
SOURCES_ONLY = ("docopt", "promise")
PROJECTS = ("pyproject.toml", "multimesh/pyproject.toml", "maxtext/pyproject.toml")


def add_step(parts: Subparsers) -> None:
    """Add the step ``lock``."""
    text = "write requirements/GROUP.txt from GROUP.in, for every Python that we support; what is locked stays"
    part = command(parts, "lock", run_lock, text)
    part.add_argument("group", nargs="*", help=f"default: {' '.join(GROUPS)}")
    part.add_argument("--upgrade", action="store_true", help="take the newest release of each package instead")


def run_lock(args: argparse.Namespace) -> None:
    """Lock the groups. Print which sources follow; git shows what else changed."""
    if strange := sorted(set(args.group) - set(GROUPS)):
        raise errors.UsageError(f"{strange[0]}: is no group; choose from {' '.join(GROUPS)}")
    here = Workspace()
    for name in PROJECTS:
        files.write(here.root / name, name_oldest((here.root / name).read_text(encoding="utf-8")))
    for group in GROUPS:
        if not args.group or group in args.group:
            lock(here.root, group, *(["--upgrade"] if args.upgrade else []))
    follow(here)


def name_oldest(text: str) -> str:
    """Return a ``pyproject.toml`` with the oldest Python that we support, for pip and for mypy."""
    return re.sub(r'(?m)^((?:requires-python = ">=|python_version = ")\d)[\d.]+', rf"\g<1>{OLDEST[1:]}", text)


def follow(here: Workspace) -> None:
    """Pin the sources of the locked wheels that name their commit, as those of JAX do."""
    for component in manifest.load(here.manifest).components:
        if component.commit is None or component.follows:
            continue
        version, _ = named.newest_pin(here, component.commit.wheel)
        if version != component.version:
            with here.exclusive(), console.Reporter() as reporter:
                pin = pins.bump(here, component.name, version, None, reporter)
            print(f"{component.name}: {version} is {pin.commit}, as its wheel says")


def lock(root: Path, name: str, *options: str) -> None:
    """Lock ``requirements/NAME.in`` by hash; locked versions stay, as far as its text allows.

    uv asks an index for every Python from the oldest on, and not for the one that runs. Where the newest release of a
    package does not serve all of them, each gets its own. All platforms are in one file. Nothing is built: a package
    that has no wheel is an error, apart from those whose metadata is in ``requirements/uv.toml``.
    """
    style = ("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--quiet")
    unbuilt = ("--only-binary=:all:", *(word for each in SOURCES_ONLY for word in ("--no-binary", each)))
    asked = ("--universal", *unbuilt, "--python-version", OLDEST, "--generate-hashes", *style, *options)
    asked = (*asked, "--no-deps") if name in ALONE else asked
    argv = [sys.executable, "-m", "uv", "pip", "compile", *asked, "-o", f"{name}.txt", f"{name}.in"]
    result = proc.run(argv, cwd=root / "requirements", check=False)
    if result.returncode:
        cause = re.search(r"^\s*cause: (.+)$", result.stderr.decode("utf-8", "replace"), re.MULTILINE)
        raise errors.ToolError(f"{name}.in: uv cannot lock it: {cause[1] if cause else result.complaint}")
