"""The Python packages of each group in ``.venv``: hash-locked requirements, then this repository's own folders."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from tooling.core import console, errors, files, proc
from tooling.core.console import Subparsers, command
from tooling.sources import manifest, sync
from tooling.sources.workspace import ROOT, Workspace

INSTALLED = ("run", *manifest.CUDA, manifest.COMPILER, "data", "dev")
REQUIREMENTS = {group: f"requirements/{group}.txt" for group in INSTALLED}
PATH_FILE, READY = "multimesh-third-party.pth", ".venv/.multimesh-ready"
PROJECTS = (".", "multimesh", "maxtext")  # this repository's own distributions


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = command(
        subparsers, "bootstrap", run, "bring in sources and install the Python packages of the groups",
        ["./bootstrap.sh --group run                 # what training MaxText needs: 2 minutes, 3 GB",
         "./bootstrap.sh --group run --group dev     # and what tests need",
         "./bootstrap.sh --group image               # what building an image needs: seconds",
         "./bootstrap.sh                             # everything, with the sources of jax and xla"],
        prog="./bootstrap.sh",
    )  # fmt: skip
    sync.add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Sync the sources, then install; a failed source does not keep the packages from coming."""
    failed = None
    try:
        sync.run(args)
    except errors.UsageError:
        raise
    except errors.ToolingError as error:
        failed = error
    install(ROOT, sync.choose_groups(args), offline=args.offline)
    if failed is not None:
        raise failed


def install(root: Path, groups: Sequence[str], *, offline: bool) -> None:
    """Install the packages of these groups, unless the note of the last run says that they are there.

    The note has, of each group, a digest of what decides its packages. Building an image needs none of them.

    Raises ``ToolError`` where this is not the Python of the clone's ``.venv``, or pip fails; ``NetworkError`` where
    packages are missing and ``offline`` is set.
    """
    wanted = {group: _digest(root, group) for group in groups if group != "image"}
    if wanted.items() <= files.read_object(root / READY).items():
        return
    with Workspace(root).exclusive(), console.Reporter() as reporter:
        have = files.read_object(root / READY)
        if Path(sys.prefix).resolve() != (root / ".venv").resolve():
            raise errors.ToolError(
                f"{sys.executable}: is not the Python of {root / '.venv'}; run ./bootstrap.sh instead"
            )
        present = {each for each in manifest.CUDA if list(metadata.distributions(name=f"jax-{each}-plugin"))}
        asked = {"cuda12" if each == manifest.COMPILER else each for each in groups}
        if len(present | set(manifest.CUDA) & asked) > 1:
            raise errors.UsageError(
                "--group: JAX uses either cuda12, of which compile-gpu is a part, or cuda13; choose one, and remove "
                ".venv to change it"
            )
        for group, file in REQUIREMENTS.items():
            if group in groups and wanted[group] != have.get(group):
                only = ("--no-deps",) if group == manifest.COMPILER else ()  # its packages ask for all of CUDA
                _install_lock(root, file, reporter, *only, offline=offline)
        _install_editable(root, reporter)
        files.write_json(root / READY, have | wanted)


def _digest(root: Path, group: str) -> str:
    """Return a digest of the environment's Python, a group's requirements and this repository's own projects."""
    names = [*filter(None, [REQUIREMENTS.get(group)]), *(f"{project}/pyproject.toml" for project in PROJECTS)]
    content = b"".join((root / name).read_bytes() for name in names)
    return hashlib.sha256(f"{os.path.realpath(sys.executable)} {sys.version}".encode() + content).hexdigest()


def _install_lock(root: Path, label: str, reporter: console.Reporter, *only: str, offline: bool) -> None:
    total = len(re.findall(r"^\w", (root / label).read_text(encoding="utf-8"), re.MULTILINE))
    numbers = itertools.count(1)

    def count(line: str) -> None:
        if line.startswith(("Collecting ", "Requirement already satisfied: ")):
            reporter.advance(label, next(numbers), total)

    reporter.phase(label, f"installing {total} packages")
    options = ["--no-index"] if offline else []  # pip then looks only at what is installed
    try:
        pip(sys.executable, "--require-hashes", *only, *options, "-r", str(root / label), label=label, on_line=count)
    except errors.ToolingError as error:
        if offline:
            raise errors.NetworkError(f"{label}: is not installed; run without --offline") from error
        raise
    reporter.done(label, "installed")


def _install_editable(root: Path, reporter: console.Reporter) -> None:
    label = "this repository"
    reporter.phase(label, "installing editable")
    projects = [word for project in PROJECTS for word in ("-e", str(root / project))]
    pip(sys.executable, "--no-deps", "--no-build-isolation", "--no-index", *projects, label=label)
    # MaxText is not installed, only found: its own requirements ask for more than running it needs.
    path_file = Path(sysconfig.get_path("purelib")) / PATH_FILE
    path_file.write_text(f"{root / 'third_party' / 'maxtext' / 'src'}\n", encoding="utf-8")
    reporter.done(label, "installed")


def pip(python: str, *args: str, label: str, on_line: Callable[[str], None] | None = None) -> None:
    """Install packages with the pip of a Python; raise what its complaint means."""
    options = ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        options.append("--no-compile")  # a run imports a quarter of the modules, and Python keeps what it compiles
    command = [python, "-m", "pip", "install", *options, *args]
    result = proc.run(command, check=False, on_line=on_line, env=os.environ | {"PYTHONSAFEPATH": "1"})
    if result.returncode:
        known = proc.of_pip(result.stderr.decode("utf-8", "replace"), label)
        raise known or errors.ToolError(f"{label}: pip failed ({result.complaint}); check pip's index")
