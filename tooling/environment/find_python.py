"""Which Python ``.venv`` is made with: ``bootstrap.sh`` runs this in any Python from 3.6 on, with nothing installed.

It is ``$PYTHON`` if that is set; else that of the ``.venv`` that is here; else the first of ``candidates``
from ``PREFERRED`` on; else one that uv fetches into ``third_party/.python``; else an older one.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
FETCHED = os.path.join(ROOT, "third_party", ".python")
OLDEST, PREFERRED, NEWEST = (3, 11), (3, 12), (3, 14)  # `python -m tooling ci lock` writes what follows
PATIENCE = 20  # seconds that a program gets to answer

# Modules that pip and our packages need. Some builds of Python leave them out, and some systems package them apart.
QUESTION = """
import importlib.util, json, platform, sys, sysconfig
need = ("venv", "ensurepip", "zlib", "_ctypes", "_ssl", "_bz2", "_lzma")
print(json.dumps({
    "path": getattr(sys, "_base_executable", None) or sys.executable, "version": sys.version_info[:3],
    "final": sys.version_info[3] == "final", "implementation": platform.python_implementation(),
    "free": bool(sysconfig.get_config_var("Py_GIL_DISABLED")), "bits": 64 if sys.maxsize > 2**32 else 32,
    "missing": [name.lstrip("_") for name in need if importlib.util.find_spec(name) is None]}))
"""
FETCH = "3.13"  # the hash-locked uv knows one build of it, with its checksum
UV_FOLDER = os.path.join(ROOT, "third_party", ".uv")
LIMIT = 300  # seconds for fetching
LOCKED, LOCK = os.path.join(ROOT, "requirements", "dev.txt"), os.path.join(ROOT, "third_party", ".venv.lock")
# uv gives up at once where nothing answers; the user's own settings stand.
HURRIED = {"UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "1"}
ENVIRONMENT_FAILED, DISK_FAILED, INTERRUPTED = 31, 30, 130


class Failure(Exception):
    """Why there is no Python to go on with, in one line."""


class Python(NamedTuple):
    """A program that may be a Python, and its answer about itself."""

    path: str  # of the Python itself: not of an environment, a link or a shim that leads to it
    origin: str
    version: Tuple[int, ...] = ()
    unfit: str = ""  # why MultiMesh cannot run in it, or nothing
    bare: str = ""  # why no environment can be made with it, and the remedy; or nothing

    @property
    def fault(self) -> str:
        """Why it cannot be taken; empty if it can."""
        return self.unfit or self.bare

    def __str__(self) -> str:
        return f"Python {in_dots(self.version)} ({self.origin}: {self.path}){jax_of(self.version)}"


def main() -> int:
    """Say which Python it is, and go on in it with ``tooling/environment/venv.py``."""
    try:
        path, options = sys.executable, sys.argv[1:]
        # Help makes no environment, so any Python that runs the rest will do.
        if sys.version_info < OLDEST or {"--help", "-h"}.isdisjoint(options):
            offline = not {"--offline", "--help", "-h"}.isdisjoint(options)
            chosen, remark = choose(os.environ.get("PYTHON") or "", offline)
            print(chosen, remark, sep="; " if remark else "", file=sys.stderr, flush=True)
            path = chosen.path
        os.execv(path, [path, "-IB", os.path.join(ROOT, "tooling", "environment", "venv.py"), *options])  # noqa: S606
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return ENVIRONMENT_FAILED
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}; free or unlock it and run again", file=sys.stderr)
        return DISK_FAILED
    except KeyboardInterrupt:
        print("error: interrupted; run the same command again to go on", file=sys.stderr)
        return INTERRUPTED


def choose(named: str, offline: bool) -> Tuple[Python, str]:
    """Return the Python to take, and a remark on it."""
    here = look(os.path.join(ROOT, ".venv", "bin", "python"), "of .venv")
    if named:
        return obey(named, here)
    if not here.unfit:
        better = best(search()) if here.version < PREFERRED else None
        if better is None or better.version < PREFERRED:
            return here, ""
        brings = f"Python {in_dots(better.version)}{jax_of(better.version)}"
        return here, f"PYTHON={better.path} ./bootstrap.sh makes .venv anew with {brings}"
    chosen, remark = take(offline)
    return chosen, "; ".join(filter(None, [remark, anew(here)]))


def obey(named: str, here: Python) -> Tuple[Python, str]:
    """Take the Python that ``$PYTHON`` names; an environment of the same version stays."""
    asked = look(shutil.which(named) or named, "PYTHON")
    if asked.fault:
        other = best(search())
        raise Failure("PYTHON={}: {}; or name {}".format(named, asked.fault, other.path if other else "another"))
    if here.unfit or here.version[:2] != asked.version[:2]:
        return asked, anew(here)
    if here.path == asked.path:
        return here, ""
    return here, f"{asked.path} is of the same version; remove .venv to use it"


def anew(here: Python) -> str:
    """Say that an environment is made in place of the one that is here, if one is."""
    return f"makes .venv anew, which had Python {in_dots(here.version)}" if here.version else ""


def take(offline: bool) -> Tuple[Python, str]:
    """Return the Python for a first ``.venv``."""
    found = search()
    chosen = best(found)
    if chosen and chosen.version >= PREFERRED:
        return chosen, ""
    reasons = [f"{each.path} {each.fault}" for each in found if each.version and each.fault]
    try:
        if offline:
            raise Failure("--offline fetches none")
        return fetch(chosen), ""
    except Failure as failure:
        why = "; ".join([*reasons, str(failure)])
        if chosen:
            return chosen, f"found none from {in_dots(PREFERRED)} on: {why}"
        raise Failure(
            f"no Python {in_dots(OLDEST)} to {in_dots(NEWEST)} can be used: {why}; install one, or name it with "
            "PYTHON=/path/to/python3"
        ) from failure


def fetch(old: Optional[Python]) -> Python:
    """Fetch a Python with uv, which itself comes from the package index. The lock ``dev.txt`` pins both.

    Raises ``Failure`` where that is not possible within ``LIMIT``.
    """
    maker = old or look(sys.executable, "")
    if maker.bare or not maker.version:
        raise Failure("fetching one needs a Python that can make environments")
    with open(LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            uv = install_uv(maker)
            install = [uv, "python", "install", FETCH, "--install-dir", FETCHED, "--no-bin", "--no-cache"]
            bring(install, f"Python {FETCH}")
        finally:
            for leftover in (UV_FOLDER, os.path.join(FETCHED, ".temp")):
                shutil.rmtree(leftover, ignore_errors=True)
    got = [look(program, "fetched by uv") for program in list_pythons(FETCHED)] or [
        Python("", "", unfit="is not there")
    ]
    if got[0].fault:
        raise Failure(f"the one that uv fetched {got[0].fault}")
    return got[0]


def install_uv(maker: Python) -> str:
    """Install the locked uv into a folder of its own, and return the program."""
    with open(LOCKED, encoding="utf-8") as file:
        read = re.search(r"^uv==.*?[^\\]\n", file.read(), re.MULTILINE | re.DOTALL)
    if not read:
        raise Failure("requirements/dev.txt has no uv to fetch one with")
    bring([maker.path, "-m", "venv", "--clear", UV_FOLDER], "uv")
    requirements = os.path.join(UV_FOLDER, "uv.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        file.write(read.group())
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "15"]
    pip = [os.path.join(UV_FOLDER, "bin", "python"), "-m", "pip", "install", *options]
    bring([*pip, "--require-hashes", "--no-deps", "-r", requirements], "uv")
    return os.path.join(UV_FOLDER, "bin", "uv")


def bring(command: List[str], what: str) -> None:
    """Run a command that fetches something.

    Raises ``Failure`` with the reason that it gave, or where it takes longer than ``LIMIT``.
    """
    print(f"fetching {what}", file=sys.stderr, flush=True)
    null, pipe, env = subprocess.DEVNULL, subprocess.PIPE, dict(HURRIED, **os.environ)
    try:
        done = subprocess.run(command, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, env=env, timeout=LIMIT)
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{what} could not be fetched (it took longer than {LIMIT} s)") from error
    if done.returncode:
        lines = [line.strip() for line in os.fsdecode(done.stdout).splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith(("cause:", "ERROR:"))] or lines or ["it failed"]
        hosts = re.findall(r"https?://([^/\s]+)", " ".join(reasons))
        reason = ": ".join([*hosts[-1:], re.sub(r"^(cause|error|ERROR): ", "", reasons[-1])[:300]])
        raise Failure(f"{what} could not be fetched ({reason})")


def search() -> List[Python]:
    """Look at the Pythons of this machine, in order, up to the first that is preferred and can be taken."""
    seen: Dict[str, Python] = {}
    for program, origin in candidates():
        if os.path.realpath(program) not in seen:
            each = seen[os.path.realpath(program)] = look(program, origin)
            if not each.fault and each.version >= PREFERRED:
                break
    return list(seen.values())


def best(found: List[Python]) -> Optional[Python]:
    """Return the Python to take: the first preferred one, which a search ends with, else the first."""
    fit = [each for each in found if not each.fault]
    return next((each for each in fit if each.version >= PREFERRED), fit[0] if fit else None)


def candidates() -> Iterator[Tuple[str, str]]:
    """Yield the programs to try, and where each is from."""
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if os.path.isabs(folder)]
    for name in ("python3", *(f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1))):
        programs = [os.path.join(folder, name) for folder in folders]
        programs = [each for each in programs if os.path.isfile(each) and os.access(each, os.X_OK)]
        for program in programs[:1] if name == "python3" else programs:
            yield program, f"{name} on PATH"
    roots = [os.environ.get("PYENV_ROOT") or ""]
    # HOME may be another than that of the pyenv on PATH, whose shims fail for versions that are not active.
    roots += [os.path.dirname(folder) for folder in folders if os.path.basename(folder) == "shims"]
    for root in [*roots, os.path.expanduser("~/.pyenv")]:
        for program in list_pythons(os.path.join(root, "versions")):
            yield program, "pyenv"
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # there is no uv on PATH, or it is broken
        for program in list_pythons(ask(["uv", "python", "dir"]).strip()):
            yield program, "uv"
    for program in list_pythons(FETCHED):
        yield program, "fetched by uv"


def list_pythons(folder: str) -> List[str]:
    """Return the Pythons in a folder of pyenv or uv, which has a subfolder for each version: the newest first."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        read = re.match(r"(?:cpython-)?(\d+)\.(\d+)(?:\.(\d+))?(?:-|$)", name)
        version = tuple(int(part or 0) for part in read.groups()) if read else ()
        if OLDEST <= version[:2] <= NEWEST:
            found.append((version, os.path.join(folder, name, "bin", "python3")))
    return [program for _, program in sorted(found, reverse=True)]


def look(program: str, origin: str) -> Python:
    """Ask a program which Python it is."""
    try:
        told = json.loads(ask([program, "-IS", "-c", QUESTION]))
    except subprocess.TimeoutExpired:
        return Python(program, origin, unfit=f"gave no answer in {PATIENCE} s")
    except subprocess.CalledProcessError as error:
        said = os.fsdecode(error.stderr).strip().splitlines() or ["it failed"]
        return Python(program, origin, unfit=said[0][:200])
    except OSError as error:
        return Python(program, origin, unfit=error.strerror or "cannot be started")
    except ValueError:
        return Python(program, origin, unfit="is no Python")
    return Python(os.path.realpath(told["path"]), origin, tuple(told["version"]), unfit_for(told), bare_of(told))


def ask(command: List[str]) -> str:
    """Run a command and return its output."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    done = subprocess.run(command, stdin=null, stdout=pipe, stderr=pipe, timeout=PATIENCE, check=True)
    return os.fsdecode(done.stdout)


def unfit_for(told: Dict[str, Any]) -> str:
    """Say why MultiMesh cannot run in a Python that said this of itself."""
    if not OLDEST <= tuple(told["version"][:2]) <= NEWEST:
        return "is Python {}, not one of {} to {}".format(in_dots(told["version"]), in_dots(OLDEST), in_dots(NEWEST))
    kinds = {
        "a build of {} bits, not 64".format(told["bits"]): told["bits"] != 64,
        "{}, not CPython".format(told["implementation"]): told["implementation"] != "CPython",
        "a free-threaded build": told["free"],
        "a pre-release": not told["final"],
    }
    return "".join(f"is {kind}" for kind in [kind for kind in kinds if kinds[kind]][:1])


def bare_of(told: Dict[str, Any]) -> str:
    """Say what a Python lacks for making an environment, by its answer about itself."""
    if not told["missing"]:
        return ""
    if {"venv", "ensurepip"} & set(told["missing"]):
        package = "python{}-venv".format(in_dots(told["version"][:2]))
        return f"cannot make environments; install its venv package (Debian, Ubuntu: apt-get install {package})"
    return "was built without {}; build it with them".format(", ".join(told["missing"]))


def in_dots(version: Tuple[int, ...]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


def jax_of(version: Tuple[int, ...]) -> str:
    """Return which jax the locked requirements have for a version of Python, to be put after it."""
    found = jax_for(os.path.join(ROOT, "requirements", "run.txt"), version)
    return f", jax {found}" if found else ""


def jax_for(requirements: str, version: Tuple[int, ...]) -> str:
    """Return the jax that a lock has for a version of Python, or nothing."""
    with open(requirements, encoding="utf-8") as file:
        line = r"^jax==([^\s;]+)(?: ; python_full_version (<|>=) '(\d+)\.(\d+)')?"
        locked = re.findall(line, file.read(), re.MULTILINE)
    for jax, sign, *bound in locked:
        if not sign or (version[:2] >= tuple(map(int, bound))) == (sign == ">="):
            return str(jax)
    return ""


if __name__ == "__main__":
    sys.exit(main())
