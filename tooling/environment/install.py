"""``bootstrap``: makes ``.venv``, installs hash-locked packages and this repository's folders, and brings in sources.

``bootstrap.sh`` runs it in the Python that ``check_python`` let pass; it goes on in that of ``.venv``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tooling import cli
from tooling.core import console, errors, files, proc
from tooling.core.files import ROOT
from tooling.environment.check_python import PREFERRED, in_dots

TOOLS, OURS = "tooling", "this repository"
VENV, LOCK = ROOT / ".venv", ROOT / "third_party" / ".venv.lock"
PYTHON, READY = VENV / "bin" / "python", VENV / ".multimesh-ready"
PROJECTS = tuple(ROOT / name for name in (".", "multimesh", "planner", "numerics", "maxtext"))
"""This repository's own distributions."""
# The package is not installed yet, and the user's folder (which relative paths mean) is not this clone.
GO_ON = "import sys; sys.path[0] = sys.argv.pop(1); import tooling.cli; sys.exit(tooling.cli.main())"


def make_and_go_on(options: Sequence[str]) -> int:
    """Make the environment if need be, then become ``python -m tooling bootstrap`` in it."""
    cli.parse(["bootstrap", *options])  # wrong options make nothing
    older = "" if sys.version_info >= PREFERRED else f"; from {in_dots(PREFERRED)} on there is a newer JAX"
    console.note(f"Python {platform.python_version()} ({sys.executable}){older}")
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


def run(args: argparse.Namespace) -> None:
    """Install, then sync the sources, of which one that fails does not keep the packages from coming."""
    from tooling.sources import sync  # its libraries have come by now

    groups = sync.choose_groups(args)
    cuda = {"cuda12" if group == "compile-gpu" else group for group in groups} & {*sync.CUDA}
    there = {name for name in sync.CUDA if any(metadata.distributions(name=f"jax-{name}-plugin"))}
    if cuda and len(there | cuda) > 1:
        raise errors.OptionError(
            "--group: JAX uses either cuda12, of which compile-gpu is a part, or cuda13; choose one, and remove .venv "
            "to change it"
        )
    sync.choose_components(args)  # wrong options install nothing
    names = [group for group in ("run", *sync.ADDED, "dev") if group in groups]
    install([*names, *([OURS] if groups != {"image"} else [])])
    sync.run(args)


def install(names: Sequence[str]) -> None:
    """Install what these locks (or ``OURS``) name, where the note of the last run has not the same digest."""
    digests = {}
    for name in names:
        inputs = [project / "pyproject.toml" for project in PROJECTS]
        paths = inputs if name == OURS else [ROOT / "requirements" / f"{name}.txt"]
        digests[name] = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    if digests.items() <= files.read_object(READY).items():
        return
    with files.lock(LOCK, "waiting for another run that installs packages"):
        ready = files.read_object(READY)
        for name, digest in digests.items():
            if ready.get(name) == digest:
                continue
            label = name if name == OURS else f"requirements/{name}.txt"
            options = ["--no-deps"] if name in (OURS, "compile-gpu") else []
            if name == OURS:
                options += ["--no-build-isolation", "--no-index", *(f"--editable={project}" for project in PROJECTS)]
            else:
                options += ["--require-hashes", "-r", str(ROOT / label)]
            with console.work(f"{label}: installing"):
                _pip(*options, label=label)
            files.write_json(READY, ready := ready | {name: digest})


def _pip(*args: str, label: str) -> None:
    """Install packages with the pip of .venv. (uv would not read pip's settings, such as a company's index.)"""
    (packages,) = VENV.glob("lib/python3*/site-packages")
    # A pip that was killed leaves packages without their last file, which the next would take for installed.
    for place in packages.glob("*.dist-info"):
        if not (place / "RECORD").exists():
            shutil.rmtree(place)
    # MaxText is not installed, only found: its own requirements ask for more than running it needs.
    files.write(packages / "multimesh-third-party.pth", f"{ROOT / 'third_party' / 'maxtext' / 'src'}\n")
    # A run imports a quarter of the modules, and Python keeps what it compiles.
    compiling = [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]
    proc.run_pip(PYTHON, "install", *compiling, *args, label=label)


if __name__ == "__main__":
    sys.exit(cli.main(inner=make_and_go_on))
