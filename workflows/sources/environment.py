"""The Python packages of each group in ``.venv``: hash-locked requirements, then this repository's own folders."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from workflows import complaints, console, errors, files, proc
from workflows.sources.workspace import Workspace

STAMP = ".multimesh-packages.json"
REQUIREMENTS = {"run": "run.txt", "cuda12": "cuda12.txt", "cuda13": "cuda13.txt", "dev": "dev.txt"}
PATH_FILE = "multimesh-third-party.pth"
PROJECTS = (".", "multimesh", "maxtext")  # this repository's own distributions


def install(root: Path, groups: Iterable[str], *, offline: bool, quiet: bool) -> None:
    """Install what these groups need and what is not installed yet.

    Raises
    ------
    ToolError
        This Python is not that of the clone's ``.venv``, or pip failed.
    NetworkError
        Packages are missing and ``offline`` is set.
    """
    if ready(root, groups):
        return
    wanted, stamp = _wanted(root, groups), root / ".venv" / STAMP
    if {"cuda12", "cuda13"} <= wanted.keys() | _read(stamp, root).keys():
        raise errors.UsageError("--group: JAX uses either cuda12 or cuda13; choose one, and remove .venv to change it")
    if Path(sys.prefix).resolve() != (root / ".venv").resolve():
        raise errors.ToolError(f"{sys.executable}: is not the Python of {root / '.venv'}; run ./bootstrap.sh instead")
    with Workspace(root).exclusive(), console.Reporter(quiet=quiet) as reporter:
        have = _read(stamp, root)
        for group, digest in wanted.items():
            if have.get(group) == digest:
                continue
            if group == "editable":
                _install_editable(root, reporter)
            elif offline:
                raise errors.NetworkError(
                    f"requirements/{REQUIREMENTS[group]}: is not installed; run without --offline"
                )
            else:
                _install_locked(root / "requirements" / REQUIREMENTS[group], reporter)
            have[group] = digest
            files.write_json(stamp, have | {"root": str(root)})


def ready(root: Path, groups: Iterable[str]) -> bool:
    """Say whether all that these groups need is installed."""
    return _read(root / ".venv" / STAMP, root).items() >= _wanted(root, groups).items()


def _wanted(root: Path, groups: Iterable[str]) -> dict[str, str]:
    """Return what decides each part of the environment, as a digest; parts in the order of installation."""
    chosen = set(groups)
    wanted = {}
    for group, file in REQUIREMENTS.items():
        if group in chosen:
            wanted[group] = _digest(root / "requirements" / file)
    wanted["editable"] = _digest(*(root / project / "pyproject.toml" for project in PROJECTS))
    return wanted


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _read(stamp: Path, root: Path) -> dict[str, str]:
    """Return what is installed; nothing counts in a clone that was moved."""
    try:
        have = dict(json.loads(stamp.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
    return have if have.get("root") == str(root) else {}


def _install_locked(requirements: Path, reporter: console.Reporter) -> None:
    label = f"requirements/{requirements.name}"
    total = requirements.read_text(encoding="utf-8").count("==")
    reporter.phase(label, f"installing {total} packages")
    _pip("--require-hashes", "-r", str(requirements), label=label, on_line=_counter(label, total, reporter))
    reporter.done(label, "installed")


def _counter(label: str, total: int, reporter: console.Reporter) -> Callable[[str], None]:
    """Return a reader of pip's output that counts the packages it has come to."""
    seen = 0

    def line(text: str) -> None:
        nonlocal seen
        if text.startswith(("Collecting ", "Requirement already satisfied: ")):
            seen += 1
            reporter.advance(label, seen, total)

    return line


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
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--progress-bar=off",
        "--disable-pip-version-check",
        *args,
    ]
    result = proc.run(command, check=False, on_line=on_line, env=os.environ | {"PYTHONSAFEPATH": "1"})
    if result.returncode:
        known = complaints.of_pip(result.stderr.decode("utf-8", "replace"), label)
        raise known or errors.ToolError(f"{label}: pip failed ({result.complaint})")
