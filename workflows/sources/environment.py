"""The Python packages of each group in ``.venv``: hash-locked requirements, then this repository's own folders."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from workflows import complaints, console, errors, proc
from workflows.sources import locked, quick
from workflows.sources.workspace import Workspace

REQUIREMENTS = {group: f"requirements/{group}.txt" for group in ("run", *quick.CUDA, "data", "dev")}
PATH_FILE = "multimesh-third-party.pth"
PROJECTS = (".", "multimesh", "maxtext")  # this repository's own distributions


def install(root: Path, groups: Sequence[str], *, offline: bool, quiet: bool) -> None:
    """Install the packages of these groups, unless the note of the last run says that they are there.

    Raises ``ToolError`` where this is not the Python of the clone's ``.venv``, or pip fails; ``NetworkError`` where
    packages are missing and ``offline`` is set.
    """
    with Workspace(root).exclusive(), console.Reporter(quiet=quiet) as reporter:
        have = quick.recall(str(root), quick.PACKAGES) or []
        if set(groups) <= set(have):
            return
        if Path(sys.prefix).resolve() != (root / ".venv").resolve():
            raise errors.ToolError(
                f"{sys.executable}: is not the Python of {root / '.venv'}; run ./bootstrap.sh instead"
            )
        present = {each for each in quick.CUDA if list(metadata.distributions(name=f"jax-{each}-plugin"))}
        if len(present | set(quick.CUDA) & set(groups)) > 1:
            raise errors.UsageError(
                "--group: JAX uses either cuda12 or cuda13; choose one, and remove .venv to change it"
            )
        inputs = quick.signature(str(root), quick.PACKAGES)
        for group, file in REQUIREMENTS.items():
            if group in groups and group not in have:
                _install_locked(root, file, reporter, offline=offline)
        _install_editable(root, reporter)
        quick.remember(str(root), quick.PACKAGES, inputs, sorted({*have, *groups}))


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
