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

from tests.repositories import commit
from tooling.image import pipeline

NAME = "multimesh-test/image"
CPU = ("--accelerator", "cpu", "--repo", NAME)


class Repository(NamedTuple):
    """A copy of the repository, and ``build.py`` in it."""

    path: Path

    def build(self, *argv: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run build.py to its end, which is this code."""
        command = [self.path / "docker" / "build.py", *argv]
        child = subprocess.run(command, cwd=self.path / "docker", capture_output=True, text=True, env=os.environ | env)
        assert child.returncode == code, child.stderr[-4000:]
        return child

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
def copy(root: Path, tmp_path: Path) -> Repository:
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
        flags = pipeline.parse([*CPU, "--tag", "T", "--base-image", trixie])
        return Namespace(**vars(flags) | {"target": target} | changes)

    return of


STANDALONE = """
apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends python3-venv patchelf >&2
from=/usr/lib/x86_64-linux-gnu to=/tmp/python
mkdir -p $to/bin $to/lib $to/share
cp -a /usr/lib/python3.13 $to/lib && cp -a /usr/share/python-wheels $to/share
sed -i s,/usr/share/python-wheels,/opt/python/share/python-wheels, $to/lib/python3.13/_sysconfigdata*.py
rm $to/lib/python3.13/EXTERNALLY-MANAGED
cp -L $from/lib*.so.* $from/ld-linux-x86-64.so.2 $to/lib
cp /usr/bin/python3.13 $to/bin && ln -s python3.13 $to/bin/python3
there=/opt/python/lib
patchelf --force-rpath --set-rpath $there $to/bin/python3.13  # with both in one call the program is broken
patchelf --set-interpreter $there/ld-linux-x86-64.so.2 $to/bin/python3.13
tar -C /tmp -cz python
"""


@pytest.fixture(scope="session")
def archive(trixie: str, parts_folder: Path) -> Path:
    """A Python 3.13 with its own C library and pip, laid out as the pinned standalone one: Debian 13's."""
    file = parts_folder / "python.tar.gz"
    with file.open("wb") as output:
        argv = ["docker", "run", "--rm", "--network=host", trixie, "sh", "-ec", STANDALONE]
        subprocess.run(argv, check=True, stdout=output, stderr=subprocess.PIPE)
    return file
