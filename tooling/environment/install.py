"""``bootstrap``: makes ``.venv``, brings in sources, and installs hash-locked packages and this repository's folders.

``bootstrap.sh`` runs it in the Python that ``find_python`` chose; it goes on in that of ``.venv``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tooling import cli
from tooling.core import console, errors, files, proc
from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.sources import manifest, sync

TOOLS, EDITABLE = "tooling", "this repository"
INSTALLED = ("run", *manifest.CUDA, manifest.COMPILER, "data", "dev")
VENV, LOCK = ROOT / ".venv", ROOT / "third_party" / ".venv.lock"
PYTHON, READY = VENV / "bin" / "python", VENV / ".multimesh-ready"
PROJECTS = tuple(ROOT / name for name in (".", "multimesh", "planner", "numerics", "maxtext"))
"""This repository's own distributions."""
# The package is not installed yet, and the user's folder (which relative paths mean) is not this clone.
GO_ON = "import sys; sys.path[0] = sys.argv.pop(1); import tooling.cli; sys.exit(tooling.cli.main())"


def make_and_go_on(options: Sequence[str]) -> int:
    """Make the environment if need be, then become ``python -m tooling bootstrap`` in it."""
    cli.parse(["bootstrap", *options])  # wrong options make nothing
    place = {"python": os.path.realpath(sys.executable), "root": str(ROOT)}  # an environment that moved is none

    def lacks() -> bool:
        return not (PYTHON.exists() and place.items() <= files.read_object(READY).items())

    if lacks():
        with files.lock(LOCK, "waiting for another run that makes .venv") as lock:
            if lacks():
                console.note("making .venv")
                if VENV.is_symlink() or VENV.is_file():
                    VENV.unlink()
                READY.unlink(missing_ok=True)
                # In its place, which may be a mount, as in the devcontainer. What a killed run leaves, such as an
                # ensurepip, holds the lock until it ends: it is its standard input.
                proc.run([sys.executable, "-m", "venv", "--clear", "--prompt", VENV.name, VENV], stdin=lock)
                files.write_json(READY, place)
    install([TOOLS])
    return os.execv(PYTHON, [str(PYTHON), "-c", GO_ON, str(ROOT), "bootstrap", *options])  # noqa: S606


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
    failure: Exception | None = None
    try:
        sync.run(args)
    except errors.OptionError:
        raise
    except (errors.ToolingError, ExceptionGroup) as error:
        failure = error
    groups = sync.choose_groups(args)
    there = {name for name in manifest.CUDA if any(metadata.distributions(name=f"jax-{name}-plugin"))}
    asked = {"cuda12" if group == manifest.COMPILER else group for group in groups} & {*manifest.CUDA}
    if asked and len(there | asked) > 1:
        raise errors.OptionError(
            "--group: JAX uses either cuda12, of which compile-gpu is a part, or cuda13; choose one, and remove .venv "
            "to change it"
        )
    install([*(group for group in INSTALLED if group in groups), *([EDITABLE] if groups != ("image",) else [])])
    if failure is not None:
        raise failure


def install(names: Sequence[str]) -> None:
    """Install what these locks (or ``EDITABLE``) name, where the note of the last run has not the same digest."""
    settings = "".join((project / "pyproject.toml").read_text(encoding="utf-8") for project in PROJECTS)
    locks = {name: ROOT / "requirements" / f"{name}.txt" for name in names if name != EDITABLE}
    digests = {name: files.sha256(path) for name, path in locks.items()}
    if EDITABLE in names:
        digests[EDITABLE] = hashlib.sha256(settings.encode()).hexdigest()
    if digests.items() <= files.read_object(READY).items():
        return
    with files.lock(LOCK, "waiting for another run that installs packages"):
        ready = files.read_object(READY)
        for name, digest in digests.items():
            if ready.get(name) == digest:
                continue
            label = EDITABLE if name == EDITABLE else f"requirements/{name}.txt"
            with console.work(f"{label}: installing"):
                if name == EDITABLE:
                    folders = [word for project in PROJECTS for word in ("-e", str(project))]
                    _pip("--no-deps", "--no-build-isolation", "--no-index", *folders, label=label)
                    # MaxText is not installed, only found: its own requirements ask for more than running it needs.
                    (packages,) = VENV.glob("lib/python3*/site-packages")
                    files.write(packages / "multimesh-third-party.pth", f"{ROOT / 'third_party' / 'maxtext' / 'src'}\n")
                else:
                    only = ["--no-deps"] * (name == manifest.COMPILER)
                    _pip("--require-hashes", *only, "-r", str(locks[name]), label=label)
            ready[name] = digest
            files.write_json(READY, ready)


def _pip(*args: str, label: str) -> None:
    """Install packages with the pip of .venv. (uv would not read pip's settings, such as a company's index.)"""
    # A pip that was killed leaves packages without their last file, which the next would take for installed.
    for place in VENV.glob("lib/python3*/site-packages/*.dist-info"):
        if not (place / "RECORD").exists():
            shutil.rmtree(place)
    # A run imports a quarter of the modules, and Python keeps what it compiles.
    compiling = [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]
    proc.run_pip(PYTHON, "install", *compiling, *args, label=label)


if __name__ == "__main__":
    sys.exit(cli.main(inner=make_and_go_on))
