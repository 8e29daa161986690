"""Chooses the Python of ``.venv``: ``bootstrap.sh`` runs this in any Python from 3.6 on, with nothing installed.

It is the one that ``$PYTHON`` names; else that of the ``.venv`` that is here; else the first from ``PREFERRED`` on,
which has the newest JAX; else an older one.
"""

import glob
import os
import shutil
import subprocess
import sys
from typing import Iterator, NamedTuple, Optional, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
OLDEST, PREFERRED, NEWEST = (3, 11), (3, 12), (3, 14)  # `.ci/lock` writes what follows

# The answer: a version, the path of the Python behind an environment, a fault. Some systems package modules apart.
QUESTION = """
import platform, sys, sysconfig
fault = ("is not CPython" if platform.python_implementation() != "CPython" else
         "is a pre-release" if sys.version_info[3] != "final" else
         "is a free-threaded build" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
try:
    import bz2, ctypes, ensurepip, lzma, ssl, venv, zlib
except ImportError as error:
    package = "python{}.{}-venv".format(*sys.version_info)
    fault = "has no {0.name}: install {1} (Debian, Ubuntu: apt-get install {1})".format(error, package)
path = getattr(sys, "_base_executable", None) or sys.executable
print("{}.{}.{}".format(*sys.version_info), path, fault, sep="\\n")
"""


class Python(NamedTuple):
    """A program that may be a Python, and why it cannot be taken."""

    path: str  # of the Python itself: not of an environment, a link or a shim that leads to it
    version: Tuple[int, ...]
    fault: str


def main() -> int:
    """Go on in the chosen Python with ``tooling/environment/install.py``; print which Python it is."""
    python = choose(os.environ.get("PYTHON"))
    if python.fault:
        print(f"error: {python.path}: {python.fault}; or name another with PYTHON=/path/to/python3", file=sys.stderr)
        return 1
    older = "" if python.version >= PREFERRED else f"; from {in_dots(PREFERRED)} on there is a newer JAX"
    print(f"Python {in_dots(python.version)} ({python.path}){older}", file=sys.stderr, flush=True)
    program = os.path.join(ROOT, "tooling", "environment", "install.py")
    return os.execv(python.path, [python.path, "-IB", program, *sys.argv[1:]])  # noqa: S606


def choose(name: Optional[str]) -> Python:
    """Return the Python to take; one that has a fault where none can be taken."""
    present = look(shutil.which(name) or name) if name else look(os.path.join(ROOT, ".venv", "bin", "python"))
    if name or not present.fault:
        return present
    pythons = list(map(look, candidates()))
    preferred = [python for python in pythons if python.version >= PREFERRED and not python.fault]
    # Of those that cannot be taken the newest is named: the others are often Pythons of the system.
    return preferred[0] if preferred else max(pythons, key=lambda python: (not python.fault, python.version))


def candidates() -> Iterator[str]:
    """Yield the programs to try: on PATH, then those of pyenv and of uv, the newest first."""
    minors = range(NEWEST[1], OLDEST[1] - 1, -1)
    for name in ["python3"] + [f"python3.{minor}" for minor in minors]:
        yield shutil.which(name) or name
    shims = os.path.dirname(shutil.which("python3") or "")  # of a pyenv whose HOME may be another than ours
    beside = os.path.dirname(shims) if os.path.basename(shims) == "shims" else os.path.expanduser("~/.pyenv")
    pyenv = os.environ.get("PYENV_ROOT") or beside
    uv = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    for minor in minors:
        for start in (f"{pyenv}/versions/3.", f"{uv}/uv/python/cpython-3."):
            yield from sorted(glob.glob(f"{glob.escape(start)}{minor}.*/bin/python3"), reverse=True)


def look(program: str) -> Python:
    """Return which Python a program is, and why it cannot be taken."""
    command, pipe = [program, "-IS", "-c", QUESTION], subprocess.PIPE
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, timeout=20, check=True)
        numbers, path, fault = os.fsdecode(answer.stdout).split("\n")[:3]
        version = tuple(map(int, numbers.split(".")))
    except (OSError, ValueError, subprocess.SubprocessError):
        return Python(program, (), "is not there, or is no Python; install one")
    if not OLDEST <= version[:2] <= NEWEST:
        fault = f"is Python {numbers}, not {in_dots(OLDEST)} to {in_dots(NEWEST)}; install one of these"
    return Python(os.path.realpath(path), version, fault)


def in_dots(version: Tuple[int, ...]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())
