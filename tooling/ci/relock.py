"""Locks ``requirements/*.in`` for every Python that we support, and moves the JAX of each."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors, proc
from tooling.core.console import Subparsers, command
from tooling.sources.workspace import ROOT

# Those that others are constrained by come first.
GROUPS = ("run", "dev", "tooling", "bench", "docs", "inventory", "jupyter", "data", "torch", "cuda12", "cuda13")
OLDEST = "3.11"
SOURCES_ONLY = ("docopt", "promise")
# Pythons with a JAX of their own: the names of their moves, the markers of their lines, the oldest Python of each.
EARLIER, NEWEST = "JAX for Python < 3.12", "JAX for Python >= 3.12"
_LINES = ((EARLIER, 'python_version < "3.12"', OLDEST), (NEWEST, 'python_version >= "3.12"', "3.12"))
_JAX = re.compile(r"^(jax|jax-cuda1[23]-pjrt|jax-cuda1[23]-plugin\[with-cuda\])==(\S+) ; (.+)$", re.MULTILINE)


class Move(NamedTuple):
    """The old and the new value of one pin; ``fault`` says why it stayed."""

    name: str
    old: str
    new: str
    fault: str = ""

    @property
    def line(self) -> str:
        """A row of the report's table."""
        old, new = (value.removeprefix("sha256:")[:12] for value in (self.old, self.new))
        outcome = " ".join(self.fault.split()).replace("|", "/") or "moved"
        return f"| {self.name} | {old} | {new} | {outcome} |"


def add_step(parts: Subparsers) -> None:
    """Add the step ``lock``."""
    text = "write requirements/GROUP.txt from GROUP.in, for every Python that we support; what is locked stays"
    part = command(parts, "lock", run_lock, text)
    part.add_argument("group", nargs="*", help=f"default: {' '.join(GROUPS)}")
    part.add_argument("--upgrade", action="store_true", help="take the newest release of each package instead")


def run_lock(args: argparse.Namespace) -> None:
    """Print nothing: git shows what changed."""
    if strange := sorted(set(args.group) - set(GROUPS)):
        raise errors.UsageError(f"{strange[0]}: is no group; choose from {' '.join(GROUPS)}")
    for group in GROUPS:
        if not args.group or group in args.group:
            lock(ROOT, group, *(["--upgrade"] if args.upgrade else []))


def lock(root: Path, name: str, *options: str) -> None:
    """Lock ``requirements/NAME.in`` by hash; locked versions stay, as far as its text allows.

    uv asks an index for every Python from the oldest on, and not for the one that runs. Where the newest release of a
    package does not serve all of them, each gets its own. All platforms are in one file. Nothing is built: a package
    that has no wheel is an error, apart from those whose metadata is in ``requirements/uv.toml``.
    """
    style = ("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--quiet")
    unbuilt = ("--only-binary=:all:", *(word for each in SOURCES_ONLY for word in ("--no-binary", each)))
    asked = ("--universal", *unbuilt, "--python-version", OLDEST, "--generate-hashes", *style, *options)
    _uv(root, f"{name}.in", *asked, "-o", f"{name}.txt")


def move(root: Path) -> list[Move]:
    """Give each line of Pythons the newest JAX that an index offers it, and lock anew; a line that cannot stays."""
    return [_move(root, *line) for line in _LINES]


def _move(root: Path, name: str, marker: str, oldest: str) -> Move:
    folder = root / "requirements"
    before = {path: path.read_bytes() for group in GROUPS for path in folder.glob(f"{group}.*")}
    old = _jax(folder / "run.in", marker)
    new = old
    try:
        new = newest(root, "jax", oldest)
        if new != old:
            for path in (path for path in before if path.suffix == ".in"):
                text = path.read_text(encoding="utf-8")
                text = _JAX.sub(lambda found: f"{found[1]}=={new} ; {marker}" if found[3] == marker else found[0], text)
                path.write_text(text, encoding="utf-8")
            for group in GROUPS:
                lock(root, group)
    except errors.ToolingError as error:
        for path, content in before.items():
            path.write_bytes(content)
        return Move(name, old, new, str(error))
    return Move(name, old, new)


def newest(root: Path, package: str, python: str) -> str:
    """Return the newest release of a package that an index offers to a Python; a pre-release is none."""
    said = _uv(root, "-", "--no-deps", "--no-header", "--no-annotate", "--python-version", python, stdin=package)
    return re.findall(r"^[^=\s]+==(\S+)", said, re.MULTILINE)[0]


def _jax(path: Path, marker: str) -> str:
    for found in _JAX.finditer(path.read_text(encoding="utf-8")):
        if found[3] == marker:
            return found[2]
    raise errors.ManifestError(f"{path}: has no line 'jax==VERSION ; {marker}'; restore it with git")


def _uv(root: Path, source: str, *options: str, stdin: str = "") -> str:
    argv = [sys.executable, "-m", "uv", "pip", "compile", *options, source]
    result = proc.run(argv, cwd=root / "requirements", stdin=stdin.encode(), check=False)
    if result.returncode:
        cause = re.search(r"^\s*cause: (.+)$", result.stderr.decode("utf-8", "replace"), re.MULTILINE)
        raise errors.ToolError(f"{source}: uv cannot lock it: {cause[1] if cause else result.complaint}")
    return result.text
