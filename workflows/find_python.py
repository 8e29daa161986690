"""Which Python ``.venv`` is made with: ``bootstrap.sh`` runs this in any Python from 3.6 on, with nothing installed.

It is ``$PYTHON`` if that is set; else that of the ``.venv`` that is here; else the first of ``pythons.candidates`` that
is 3.12 or later; else one that uv fetches into ``third_party/.python``; else a Python 3.11.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import List, Optional, Tuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
from workflows.pythons import FETCHED, NEWEST, OLDEST, PREFERRED, ROOT, Python, dotted, installed, jax_of, look, search

FETCH = "3.13"  # the hash-locked uv knows one build of it, with its checksum
UV_FOLDER = os.path.join(ROOT, "third_party", ".uv")
LIMIT = 300  # seconds for fetching
LOCKED, LOCK = os.path.join(ROOT, "requirements", "dev.txt"), os.path.join(ROOT, "third_party", ".venv.lock")
# uv gives up at once where nothing answers; the user's own settings stand.
HURRIED = {"UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "1"}
ENVIRONMENT_FAILED, DISK_FAILED, INTERRUPTED = 11, 10, 130


class Failure(Exception):
    """Why there is no Python to go on with, in one line."""


def main() -> int:
    """Say which Python it is, and go on in it with ``workflows/venv.py``."""
    try:
        offline = not {"--offline", "--help", "-h", "--dry-run"}.isdisjoint(sys.argv)
        chosen, remark = choose(os.environ.get("PYTHON") or "", offline)
        print(chosen, remark, sep="; " if remark else "", file=sys.stderr, flush=True)
        script = os.path.join(ROOT, "workflows", "venv.py")
        os.execv(chosen.path, [chosen.path, "-IB", script, *sys.argv[1:]])  # noqa: S606
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
        better = search().taken if here.version < PREFERRED else None
        if better is None:
            return here, ""
        brings = f"Python {dotted(better.version)}{jax_of(better.version)}"
        return here, f"PYTHON={better.path} ./bootstrap.sh makes .venv anew with {brings}"
    chosen, remark = take(offline)
    return chosen, "; ".join(filter(None, [remark, anew(here)]))


def obey(named: str, here: Python) -> Tuple[Python, str]:
    """Take the Python that ``$PYTHON`` names; an environment of the same version stays."""
    asked = look(shutil.which(named) or named, "PYTHON")
    if asked.fault:
        found = search()
        other = found.taken or found.old
        raise Failure("PYTHON={}: {}; or name {}".format(named, asked.fault, other.path if other else "another"))
    if here.unfit or here.version[:2] != asked.version[:2]:
        return asked, anew(here)
    if here.path == asked.path:
        return here, ""
    return here, f"{asked.path} is of the same version; remove .venv to use it"


def anew(here: Python) -> str:
    """Say that an environment is made in place of the one that is here, if one is."""
    return f"makes .venv anew, which had Python {dotted(here.version)}" if here.version else ""


def take(offline: bool) -> Tuple[Python, str]:
    """Return the Python for a first ``.venv``."""
    found = search()
    if found.taken:
        return found.taken, ""
    reasons = [f"{each.path} {each.fault}" for each in found.refused]
    try:
        if offline:
            raise Failure("--offline fetches none")
        return fetch(found.old), ""
    except Failure as failure:
        why = "; ".join([*reasons, str(failure)])
        if found.old:
            return found.old, f"found none from {dotted(PREFERRED)} on: {why}"
        supported, remedy = (
            f"{dotted(OLDEST)} to {dotted(NEWEST)}",
            "install one, or name it with PYTHON=/path/to/python3",
        )
        raise Failure(f"no Python {supported} can be used: {why}; {remedy}") from failure


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
            watch(install, f"Python {FETCH}", FETCHED)
        finally:
            for leftover in (UV_FOLDER, os.path.join(FETCHED, ".temp")):
                shutil.rmtree(leftover, ignore_errors=True)
    got = [look(program, "fetched by uv") for program in installed(FETCHED)] or [Python("", "", unfit="is not there")]
    if got[0].fault:
        raise Failure(f"the one that uv fetched {got[0].fault}")
    return got[0]


def install_uv(maker: Python) -> str:
    """Install the locked uv into a folder of its own, and return the program."""
    with open(LOCKED, encoding="utf-8") as file:
        read = re.search(r"^uv==.*?[^\\]\n", file.read(), re.MULTILINE | re.DOTALL)
    if not read:
        raise Failure("requirements/dev.txt has no uv to fetch one with")
    watch([maker.path, "-m", "venv", "--clear", UV_FOLDER], "uv", UV_FOLDER)
    requirements = os.path.join(UV_FOLDER, "uv.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        file.write(read.group())
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "15"]
    pip = [os.path.join(UV_FOLDER, "bin", "python"), "-m", "pip", "install", *options]
    watch([*pip, "--require-hashes", "--no-deps", "-r", requirements], "uv", UV_FOLDER)
    return os.path.join(UV_FOLDER, "bin", "uv")


def watch(command: List[str], what: str, folder: str) -> None:
    """Run a command that brings something into a folder; show how much has come on a terminal, nothing elsewhere.

    Raises ``Failure`` with the reason that it gave, or where it takes longer than ``LIMIT``.
    """
    end = time.monotonic() + LIMIT
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=dict(HURRIED, **os.environ)
            )
        except OSError as error:
            raise Failure(f"{command[0]}: {error.strerror}") from error
        try:
            while process.poll() is None and time.monotonic() < end:
                show(f"fetching {what}: {size(folder) / 1e6:.0f} MB")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            show("")
            process.kill()
            process.wait()
        said.seek(0)
        lines = [line.strip() for line in os.fsdecode(said.read()).splitlines() if line.strip()]
    if process.returncode:
        reasons = [line for line in lines if line.startswith(("cause:", "ERROR:"))] or lines or ["it failed"]
        hosts = re.findall(r"https?://([^/\s]+)", " ".join(reasons))
        reason = ": ".join([*hosts[-1:], re.sub(r"^(cause|error|ERROR): ", "", reasons[-1])[:300]])
        late = time.monotonic() >= end
        raise Failure(f"{what} could not be fetched ({f'it took longer than {LIMIT} s' if late else reason})")


def show(text: str) -> None:
    """Put a text in place of the last line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def size(folder: str) -> int:
    """Return the bytes of the files in a folder that may be changing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


if __name__ == "__main__":
    sys.exit(main())
