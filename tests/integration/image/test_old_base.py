"""A base whose own Python is too old: Debian 11 has 3.9."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.image.conftest import Repository
from tests.integration.parts import engine as engines
from tooling.core import errors
from tooling.image import build, buildx, digests
from tooling.image.engine import Engine
from tooling.image.request import ImageSpec, Means

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bullseye(docker_engine: None, parts_folder: Path) -> str:
    return engines.base_image("bullseye", parts_folder)


@pytest.mark.stand_in("Ubuntu 22.04 made with debootstrap, and a Python put together from Debian 13")
def test_the_inventory_on_ubuntu_names_its_packages_and_the_standalone_python(
    root: Path, docker_engine: None, parts_folder: Path, archive: Path, docker: Callable[..., str], tmp_path: Path
) -> None:
    jammy = engines.base_image("jammy", parts_folder)
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path], check=True)
    mounts = {
        tmp_path / "python": "/opt/python",
        root / "docker" / "scripts": "/srv/scripts",
        root / "sources.lock": "/srv/lock",
    }
    volumes = [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
    ask = (
        "import inventory, pathlib; lock = pathlib.Path('/srv/lock')\n"
        "print(*(each['purl'] for each in [*inventory.system_packages(), *inventory.other(lock)]), sep='\\n')"
    )
    env = ["--env=PYTHONPATH=/srv/scripts", "--env=PYTHONDONTWRITEBYTECODE=1"]
    purls = docker("run", "--rm", *volumes, *env, jammy, "/opt/python/bin/python3", "-c", ask).splitlines()
    assert any(each.startswith("pkg:deb/ubuntu/libc6@") and each.endswith("distro=ubuntu-22.04") for each in purls)
    assert not [each for each in purls if each.startswith("pkg:deb/debian")]
    assert [each for each in purls if each.startswith("pkg:generic/cpython@3.13")]


@pytest.mark.stand_in("Debian 11, and a Python put together from Debian 13")
def test_an_old_base_gets_the_standalone_python(
    repository: Repository,
    bullseye: str,
    archive: Path,
    engine: Engine,
    means: Means,
    docker: Callable[..., str],
    spec: Callable[..., ImageSpec],
) -> None:
    built = build.run(repository.path, engine, spec("python", base_image=bullseye, python_archive=archive), means)
    assert built is not None
    ask = "import sys, ssl, sqlite3; print(sys.version_info[:2], sys.prefix, sys.base_prefix)"
    assert docker("run", "--rm", built.image_id, "python3", "-c", ask) == "(3, 13) /opt/.venv /opt/python"
    assert not list((repository.path / "docker" / "context").glob("*.tar.gz"))


def test_another_python_than_the_pinned_one_is_refused(
    repository: Repository,
    bullseye: str,
    archive: Path,
    engine: Engine,
    means: Means,
    spec: Callable[..., ImageSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = spec("python", base_image=bullseye, python_archive=archive)
    asked = buildx.make_arguments(
        wanted,
        digests.load(repository.path),
        buildx.bases(wanted, digests.load(repository.path)),
        machine="linux/amd64",
        multimesh="multimesh",
    )
    monkeypatch.setattr(buildx, "make_arguments", lambda *_, **__: asked | {"PYTHON_SHA256": "0" * 64})
    with pytest.raises(errors.BuildError, match="the standalone Python is not the pinned one"):
        build.run(repository.path, engine, wanted, means)
