"""The Python packages of each group in ``.venv``: hash-locked requirements, then this repository's own folders."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from workflows import complaints, console, errors, files, proc
from workflows import groups as groups_of
from workflows.sources import locked
from workflows.sources.workspace import Workspace

REQUIREMENTS = {group: f"requirements/{group}.txt" for group in ("run", *groups_of.CUDA, "data", "dev")}
PATH_FILE, READY = "multimesh-third-party.pth", ".venv/.multimesh-ready"
PROJECTS = (".", "multimesh", "maxtext")  # this repository's own distributions


def install(root: Path, groups: Sequence[str], *, offline: bool, quiet: bool) -> None:
    """Install the packages of these groups, unless the note of the last run says that they are there.

    The note has, of each group, a digest of what decides its packages. Building an image needs none of them.

    Raises ``ToolError`` where this is not the Python of the clone's ``.venv``, or pip fails; ``NetworkError`` where
    packages are missing and ``offline`` is set.
    """
    wanted = {group: _digest(root, group) for group in groups if group != "image"}
    if wanted.items() <= files.read_object(root / READY).items():
        return
    with Workspace(root).exclusive(), console.Reporter(quiet=quiet) as reporter:
        have = files.read_object(root / READY)
        if Path(sys.prefix).resolve() != (root / ".venv").resolve():
            raise errors.ToolError(
                f"{sys.executable}: is not the Python of {root / '.venv'}; run ./bootstrap.sh instead"
            )
        present = {each for each in groups_of.CUDA if list(metadata.distributions(name=f"jax-{each}-plugin"))}
        if len(present | set(groups_of.CUDA) & set(groups)) > 1:
            raise errors.UsageError(
                "--group: JAX uses either cuda12 or cuda13; choose one, and remove .venv to change it"
            )
        for group, file in REQUIREMENTS.items():
            if group in groups and wanted[group] != have.get(group):
                _install_locked(root, file, reporter, offline=offline)
        _install_editable(root, reporter)
        files.write_json(root / READY, have | wanted)


def _digest(root: Path, group: str) -> str:
    """Return a digest of the environment's Python, a group's requirements and this repository's own projects."""
    names = [*filter(None, [REQUIREMENTS.get(group)]), *(f"{project}/pyproject.toml" for project in PROJECTS)]
    content = b"".join((root / name).read_bytes() for name in names)
    return hashlib.sha256(f"{os.path.realpath(sys.executable)} {sys.version}".encode() + content).hexdigest()


def _install_locked(root: Path, label: str, reporter: console.Reporter, *, offline: bool) -> None:
    total = len(locked.versions(root / label))
    seen = 0

    def count(line: str) -> None:
        nonlocal seen
        if line.startswith(("Collecting ", "Requirement already satisfied: ")):
            seen += 1
            reporter.advance(label, seen, total)

    reporter.phase(label, f"installing {total} packages")
    options = ["--no-index"] if offline else []  # pip then looks only at what is installed
    try:
        _pip("--require-hashes", *options, "-r", str(root / label), label=label, on_line=count)
    except errors.WorkflowsError as error:
        if offline:
            raise errors.NetworkError(f"{label}: is not installed; run without --offline") from error
        raise
    reporter.done(label, "installed")


def _install_editable(root: Path, reporter: console.Reporter) -> None:
    label = "this repository"
    reporter.phase(label, "installing editable")
    projects = [word for project in PROJECTS for word in ("-e", str(root / project))]
    _pip("--no-deps", "--no-build-isolation", "--no-index", *projects, label=label)
    # MaxText is not installed, only found: its own requirements ask for more than running it needs.
    path_file = Path(sysconfig.get_path("purelib")) / PATH_FILE
    path_file.write_text(f"{root / 'third_party' / 'maxtext' / 'src'}\n", encoding="utf-8")
    reporter.done(label, "installed")


def _pip(*args: str, label: str, on_line: Callable[[str], None] | None = None) -> None:
    options = ("--no-input", "--progress-bar=off", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, *args]
    result = proc.run(command, check=False, on_line=on_line, env=os.environ | {"PYTHONSAFEPATH": "1"})
    if result.returncode:
        known = complaints.of_pip(result.stderr.decode("utf-8", "replace"), label)
        raise known or errors.ToolError(f"{label}: pip failed ({result.complaint})")
