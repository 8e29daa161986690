"""A copy of this repository that tests may change, and one image that is built from it once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.parts import packages
from tests.repositories import commit
from tooling.image import pipeline

NAME = "multimesh-test/image"
CPU = ("--accelerator", "cpu", "--repo", NAME)
STANDALONE = "/opt/python"


class Repository(NamedTuple):
    """A copy of the repository, and ``build.py`` in it."""

    path: Path

    def build(self, *argv: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run build.py to its end, which is this code."""
        command = [self.path / "docker" / "build.py", *argv]
        done = subprocess.run(command, cwd=self.path / "docker", capture_output=True, text=True, env=os.environ | env)
        assert done.returncode == code, done.stderr[-4000:]
        return done

    def answer(self, *argv: str, **env: str) -> dict[str, Any]:
        """Run build.py, and return what it says in JSON."""
        return dict(json.loads(self.build(*argv, "--json", **env).stdout))


def copy_repository(root: Path, place: Path) -> Repository:
    """Copy the files of git and the patched MaxText, with a git history of its own."""
    argv = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    for name in filter(os.path.lexists, (root / name for name in names.split("\0") if name)):
        target = place / name.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target, follow_symlinks=False)
    shutil.copytree(root / "third_party" / "maxtext", place / "third_party" / "maxtext", symlinks=True)
    (place / ".venv").symlink_to((root / ".venv").resolve())
    commit(place, {})
    return Repository(place)


@pytest.fixture(scope="session")
def repository(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The copy that the image is built from; tests leave it as it is."""
    return copy_repository(root, tmp_path_factory.mktemp("repository") / "clone of this")


@pytest.fixture
def changed(root: Path, tmp_path: Path) -> Repository:
    """A copy of a test's own."""
    return copy_repository(root, tmp_path / "changed")


@pytest.fixture(scope="session")
def image(repository: Repository, trixie: str) -> dict[str, Any]:
    """The CPU image that runs: built, checked by MaxText's CPU job, named; the answer of build.py --json."""
    place = ("--repo", "multimesh-test", "--name", "image", "--tag", "T")
    return repository.answer("--accelerator", "cpu", "--base-image", trixie, *place)


@pytest.fixture(scope="session")
def ask(trixie: str) -> Callable[..., Namespace]:
    """Ask for a target on the stand-in base."""

    def of(target: str, **changes: Any) -> Namespace:
        plain = pipeline.parse([*CPU, "--tag", "T", "--base-image", trixie])
        return Namespace(**vars(plain) | {"target": target} | changes)

    return of


@pytest.fixture(scope="session")
def archive(parts_folder: Path) -> Path:
    """A Python 3.13 with its own C library and pip, laid out as the pinned standalone one: Debian 13's."""
    patchelf, debootstrap = packages.need("patchelf", "patchelf"), packages.need("debootstrap", "debootstrap")
    system = parts_folder / "newer"
    make = [debootstrap, "--variant=minbase", "--include=python3-venv", "trixie", system, packages.mirror()]
    subprocess.run(packages.as_root(*make), check=True, capture_output=True)
    python = parts_folder / "standalone" / "python"
    (python / "bin").mkdir(parents=True)
    shutil.copytree(system / "usr/lib/python3.13", python / "lib" / "python3.13", symlinks=True)
    shutil.copytree(system / "usr/share/python-wheels", python / "share" / "python-wheels")
    for settings in (python / "lib" / "python3.13").glob("_sysconfigdata*.py"):
        text = settings.read_text().replace("/usr/share/python-wheels", f"{STANDALONE}/share/python-wheels")
        settings.write_text(text)
    (python / "lib" / "python3.13" / "EXTERNALLY-MANAGED").unlink()
    for library in (system / "usr/lib/x86_64-linux-gnu").glob("lib*.so.*"):
        shutil.copy(library, python / "lib" / library.name)
    loader = next((system / "usr/lib/x86_64-linux-gnu").glob("ld-linux-x86-64.so.2"))
    shutil.copy(loader, python / "lib" / loader.name)
    shutil.copy(system / "usr/bin/python3.13", python / "bin" / "python3.13")
    (python / "bin" / "python3").symlink_to("python3.13")
    libraries = f"{STANDALONE}/lib"
    paths = ["--set-interpreter", f"{libraries}/{loader.name}", "--force-rpath", "--set-rpath", libraries]
    subprocess.run([patchelf, *paths, str(python / "bin" / "python3.13")], check=True)
    file = parts_folder / "python.tar.gz"
    subprocess.run(["tar", "-czf", file, "-C", python.parent, "python"], check=True)
    subprocess.run(packages.as_root("rm", "-r", system), check=True)
    return file
