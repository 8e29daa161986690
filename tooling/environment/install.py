"""``bootstrap``: makes ``.venv``, brings in sources, and installs hash-locked packages and this repository's folders.

``bootstrap.sh`` runs it in the Python that ``find_python`` chose; it goes on in that of ``.venv``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import sysconfig
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
READY, PATH_FILE = ".venv/.multimesh-ready", "multimesh-third-party.pth"
PROJECTS = (".", "multimesh", "planner", "numerics", "maxtext")  # this repository's own distributions
# The package is not installed yet, and the user's folder (which relative paths mean) is not this clone.
GO_ON = "import sys; sys.path[0] = sys.argv.pop(1); import tooling.cli; sys.exit(tooling.cli.main())"


def make_and_go_on(options: Sequence[str]) -> int:
    """Make the environment if need be, then become ``python -m tooling bootstrap`` in it."""
    cli.parse(["bootstrap", *options])  # wrong options make nothing
    venv, label = ROOT / ".venv", f"requirements/{TOOLS}.txt"
    python, ready = venv / "bin" / "python", ROOT / READY
    place = {"python": os.path.realpath(sys.executable), "root": str(ROOT)}  # an environment that moved is none
    note = place | {TOOLS: files.sha256(ROOT / label)}

    def lacks(values: dict[str, str]) -> bool:
        return not (python.exists() and values.items() <= files.read_object(ready).items())

    if lacks(note):
        with files.lock(ROOT / "third_party" / ".venv.lock", "waiting for another run that makes .venv") as lock:
            if lacks(place):
                console.note("making .venv")
                if venv.is_symlink() or venv.is_file():
                    venv.unlink()
                ready.unlink(missing_ok=True)
                # In its place, which may be a mount, as in the devcontainer. What a killed run leaves, such as an
                # ensurepip, holds the lock until it ends: it is its standard input.
                proc.run([sys.executable, "-m", "venv", "--clear", "--prompt", venv.name, venv], stdin=lock)
                files.write_json(ready, place)
            if lacks(note):
                console.note(f"{label}: installing")
                pip(python, "--require-hashes", "-r", str(ROOT / label), label=label)
                files.write_json(ready, files.read_object(ready) | note)
    return os.execv(python, [str(python), "-c", GO_ON, str(ROOT), "bootstrap", *options])  # noqa: S606


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
    install(sync.choose_groups(args))
    if failure is not None:
        raise failure


def install(groups: Sequence[str]) -> None:
    """Install the packages of these groups, unless the note of the last run has the same digests of their locks."""
    settings = "".join((ROOT / name / "pyproject.toml").read_text(encoding="utf-8") for name in PROJECTS)
    locks = {group: files.sha256(ROOT / f"requirements/{group}.txt") for group in INSTALLED if group in groups}
    if groups != ("image",):
        locks[EDITABLE] = hashlib.sha256(settings.encode()).hexdigest()
    ready = files.read_object(ROOT / READY)
    if locks.items() <= ready.items():
        return
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix).resolve() != python.parents[1].resolve():
        raise errors.ToolingError(f"{sys.executable}: is not the Python of {ROOT}/.venv; run ./bootstrap.sh instead")
    # An install that broke off has written no note.
    there = {name for name in manifest.CUDA if list(metadata.distributions(name=f"jax-{name}-plugin"))}
    named = {"cuda12" if group == manifest.COMPILER else group for group in (*ready, *groups)}
    cuda = there | named & {*manifest.CUDA}
    if len(cuda) > 1:
        raise errors.OptionError(
            "--group: JAX uses either cuda12, of which compile-gpu is a part, or cuda13; choose one, and remove .venv "
            "to change it"
        )
    with files.lock(ROOT / "third_party" / ".venv.lock", "waiting for another run that installs packages"):
        for group in [group for group in locks if group != EDITABLE and locks[group] != ready.get(group)]:
            label, only = f"requirements/{group}.txt", ["--no-deps"] * (group == manifest.COMPILER)
            with console.work(f"{label}: installing"):
                pip(python, "--require-hashes", *only, "-r", str(ROOT / label), label=label)
        with console.work(f"{EDITABLE}: installing"):
            projects = [word for project in PROJECTS for word in ("-e", str(ROOT / project))]
            pip(python, "--no-deps", "--no-build-isolation", "--no-index", *projects, label=EDITABLE)
        # MaxText is not installed, only found: its own requirements ask for more than running it needs.
        path_file = Path(sysconfig.get_path("purelib")) / PATH_FILE
        files.write(path_file, f"{ROOT / 'third_party' / 'maxtext' / 'src'}\n")
        files.write_json(ROOT / READY, files.read_object(ROOT / READY) | locks)


def pip(python: Path, *args: str, label: str) -> None:
    """Install packages with the pip of a Python. (uv would not read pip's settings, such as a company's index.)"""
    # A pip that was killed leaves packages without their last file, which the next would take for installed.
    for place in python.parents[1].glob("lib/python3*/site-packages/*.dist-info"):
        if not (place / "RECORD").exists():
            shutil.rmtree(place)
    # A run imports a quarter of the modules, and Python keeps what it compiles.
    compiling = [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]
    proc.run_pip(python, "install", *compiling, *args, label=label)


if __name__ == "__main__":
    sys.exit(cli.main(inner=make_and_go_on))
