"""Debian packages that a test run needs and the machine lacks."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

_ENV = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}


def need(program: str, *packages: str) -> str:
    """Return the path of a program; install the packages that bring it if it is not there."""
    where = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if (found := shutil.which(program, path=where)) is None:
        _update()
        _apt("install", "-y", "-qq", "--no-install-recommends", *packages)
        found = shutil.which(program, path=where)
        assert found is not None, f"{packages} did not bring {program}"
    return found


def from_sid(folder: Path, *packages: str, suite: str = "sid", architecture: str | None = None) -> Path:
    """Unpack packages of another Debian release or machine in ``folder``, leaving the machine's own apt as it is."""
    state = folder / "apt"
    for each in ("lists/partial", "archives/partial"):
        (state / each).mkdir(parents=True)
    (state / "status").touch()
    (state / "sources.list").write_text(
        f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror()} {suite} main\n"
    )
    config = state / "apt.conf"
    config.write_text(
        f'Dir::State "{state}";\nDir::State::status "{state}/status";\nDir::State::lists "{state}/lists";\n'
        f'Dir::Cache "{state}";\nDir::Etc::sourcelist "{state}/sources.list";\nDir::Etc::sourceparts "-";\n'
        'Acquire::Languages "none";\nAPT::Sandbox::User "root";\n'
        + (f'APT::Architecture "{architecture}";\n' if architecture else "")
    )
    env = _ENV | {"APT_CONFIG": str(config)}
    _apt("update", "-qq", env=env)
    _apt("download", *packages, env=env, cwd=folder)
    for package in packages:
        (file,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", file, folder], check=True)
        file.unlink()
    return folder


@functools.cache
def mirror() -> str:
    """Return the Debian archive that this machine's apt is told to use."""
    ask = ["apt-get", "indextargets", "--format", "$(LABEL) $(SITE)", "Created-By: Packages"]
    told = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.splitlines()
    sites = [line.removeprefix("Debian ") for line in told if line.startswith("Debian ")]
    assert sites, f"apt names no Debian archive: {told}"
    return sites[0]


@functools.cache
def _update() -> None:
    _apt("update", "-qq")


def _apt(*args: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    done = subprocess.run(["apt-get", *args], env=env or _ENV, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"apt-get {' '.join(args)}: {done.stderr[-1000:]}"
