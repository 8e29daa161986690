"""The Pythons of this machine. Like ``find_python``, it runs in any Python from 3.6 on, with nothing installed."""

import contextlib
import json
import os
import re
import subprocess
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
FETCHED = os.path.join(ROOT, "third_party", ".python")
OLDEST, PREFERRED, NEWEST = (3, 11), (3, 12), (3, 14)
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
        return f"Python {dotted(self.version)} ({self.origin}: {self.path}){jax_of(self.version)}"


class Found(NamedTuple):
    """The Pythons of this machine."""

    taken: Optional[Python]  # the first from 3.12 on
    old: Optional[Python]  # the first 3.11, where there is none from 3.12 on
    refused: List[Python]


def search() -> Found:
    """Look at the Pythons of this machine, in order, up to the first from 3.12 on."""
    seen: Dict[str, Python] = {}
    for program, origin in candidates():
        if os.path.realpath(program) not in seen:
            each = seen[os.path.realpath(program)] = look(program, origin)
            if not each.fault and each.version >= PREFERRED:
                return Found(each, None, [])
    old = [each for each in seen.values() if not each.fault]
    return Found(None, old[0] if old else None, [each for each in seen.values() if each.version and each.fault])


def candidates() -> Iterator[Tuple[str, str]]:
    """Yield the programs to try, and where each is from."""
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if os.path.isabs(folder)]
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        programs = [os.path.join(folder, name) for folder in folders]
        programs = [each for each in programs if os.path.isfile(each) and os.access(each, os.X_OK)]
        for program in programs[:1] if name == "python3" else programs:
            yield program, f"{name} on PATH"
    roots = [os.environ.get("PYENV_ROOT") or ""]
    # HOME may be another than that of the pyenv on PATH, whose shims fail for versions that are not active.
    roots += [os.path.dirname(folder) for folder in folders if os.path.basename(folder) == "shims"]
    for root in [*roots, os.path.expanduser("~/.pyenv")]:
        for program in installed(os.path.join(root, "versions")):
            yield program, "pyenv"
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # there is no uv on PATH, or it is broken
        for program in installed(ask(["uv", "python", "dir"]).strip()):
            yield program, "uv"
    for program in installed(FETCHED):
        yield program, "fetched by uv"


def installed(folder: str) -> List[str]:
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
        return "is Python {}, not one of {} to {}".format(dotted(told["version"]), dotted(OLDEST), dotted(NEWEST))
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
        package = "python{}-venv".format(dotted(told["version"][:2]))
        return f"cannot make environments; install its venv package (Debian, Ubuntu: apt-get install {package})"
    return "was built without {}; build it with them".format(", ".join(told["missing"]))


def dotted(version: Tuple[int, ...]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


def jax_of(version: Tuple[int, ...]) -> str:
    """Return which jax the locked requirements have for a version of Python, to be put after it."""
    found = jax_for(os.path.join(ROOT, "requirements", "run.txt"), version)
    return f", jax {found}" if found else ""


def jax_for(requirements: str, version: Tuple[int, ...]) -> str:
    """Return the jax that a lock has for a version of Python, or nothing."""
    with open(requirements, encoding="utf-8") as file:
        locked = re.findall(r"^jax==([^\s;]+)(?:\s*;\s*([^\\\n]*))?", file.read(), re.MULTILINE)
    fitting = [jax for jax, marker in locked if all(holds(part, version) for part in marker.split(" and "))]
    return fitting[0] if fitting else ""


def holds(condition: str, version: Tuple[int, ...]) -> bool:
    """Say whether a condition of a requirement about Python's version is met; any other is taken to be."""
    read = re.match(r"\s*python(?:_full)?_version\s*(<=|>=|<|>|==|!=)\s*['\"]([\d.]+?)(?:\.\*)?['\"]", condition)
    if not read:
        return True
    wanted = tuple(map(int, read.group(2).split(".")))
    have = version[: len(wanted)]
    return {
        "<": have < wanted, "<=": have <= wanted, ">": have > wanted, ">=": have >= wanted,
        "==": have == wanted, "!=": have != wanted,
    }[read.group(1)]  # fmt: skip
