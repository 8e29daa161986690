"""Packages of Debian or Ubuntu that a test run needs and the machine lacks, and what only root may do there."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
UBUNTU = "http://archive.ubuntu.com/ubuntu"
# One test run at a time reads apt's lists: apt itself waits for the lock of the packages only.
_TURNS = Path(tempfile.gettempdir()) / "multimesh-apt.lock"


def as_root(*argv: str | Path, env: Mapping[str, str] | None = None) -> list[str]:
    """Return a command that runs as root, by sudo where we are somebody else; that leaves all but ``env`` behind."""
    command = ["env", *(f"{name}={value}" for name, value in (env or {}).items()), *map(str, argv)]
    return command if os.geteuid() == 0 else ["sudo", "-n", *command]


def need(program: str, *packages: str) -> str:
    """Return the path of a program; install the packages that bring it if it is not there."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if (path := shutil.which(program, path=search)) is None:
        _install(*packages)
        path = shutil.which(program, path=search)
        assert path is not None, f"{packages} did not bring {program}"
    return path


def from_sid(folder: Path, *packages: str) -> Path:
    """Unpack packages of Debian unstable in ``folder``, leaving the machine's own apt as it is."""
    state = folder / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    (state / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror()} sid main\n")
    config = state / "apt.conf"
    config.write_text(
        f'Dir::State "{state}";\nDir::State::status "{state}/status";\nDir::State::lists "{state}/lists";\n'
        f'Dir::Cache "{state}";\nDir::Etc::sourcelist "{state}/sources.list";\nDir::Etc::sourceparts "-";\n'
        'Acquire::Languages "none";\nAPT::Sandbox::User "root";\n'
    )
    env = os.environ | {"APT_CONFIG": str(config)}
    _apt("update", "-qq", env=env)
    _apt("download", *packages, env=env, cwd=folder)
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", file, folder], check=True)
        file.unlink()
    return folder


@functools.cache
def mirror() -> str:
    """Return a Debian archive: the one that this machine's apt is told to use, or on Ubuntu Debian's own."""
    if not KEYRING.exists():
        _install("debian-archive-keyring")
    ask = ["apt-get", "indextargets", "--format", "$(LABEL) $(SITE)", "Created-By: Packages"]
    sites = re.findall("^Debian (.*)", subprocess.run(ask, check=True, capture_output=True, text=True).stdout, re.M)
    return next(iter(sites), "http://deb.debian.org/debian")


def _install(*packages: str) -> None:
    _update()
    _apt("install", "-y", "-qq", "--no-install-recommends", *packages)


def _apt(*args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run apt: as root for the machine's own packages, as we are with a state of our own (``env``)."""
    # A machine that has just started may be installing packages of its own.
    wait = ["apt-get", "-o", "DPkg::Lock::Timeout=300", *args]
    argv = wait if env else as_root(*wait, env={"DEBIAN_FRONTEND": "noninteractive"})
    with _TURNS.open("w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX)
        process = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 0, f"{' '.join(argv)}: {process.stderr[-1000:]}"


_update = functools.cache(functools.partial(_apt, "update", "-qq"))
