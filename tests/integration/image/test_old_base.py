"""A base whose own Python is too old: Debian 11 has 3.9."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.image.conftest import Repository
from tests.integration.parts import engine as engines
from tests.integration.parts import packages
from workflows import errors
from workflows.image import build, command, digests
from workflows.image.engine import Engine
from workflows.image.spec import ImageSpec, Means

pytestmark = pytest.mark.full
STANDALONE = "/opt/python/lib"


@pytest.fixture(scope="module")
def bullseye(docker_engine: None, parts_folder: Path) -> str:
    return engines.base_image("bullseye", parts_folder)


@pytest.fixture(scope="module")
def archive(parts_folder: Path) -> Path:
    """A Python 3.11 that brings its own C library, laid out as the pinned standalone one."""
    patchelf, debootstrap = packages.need("patchelf", "patchelf"), packages.need("debootstrap", "debootstrap")
    system = parts_folder / "newer"
    argv = [debootstrap, "--variant=minbase", "--include=python3", "bookworm", str(system), packages.mirror()]
    subprocess.run(argv, check=True, capture_output=True)
    python = parts_folder / "standalone" / "python"
    (python / "bin").mkdir(parents=True)
    shutil.copytree(system / "usr/lib/python3.11", python / "lib" / "python3.11", symlinks=True)
    for library in (system / "usr/lib/x86_64-linux-gnu").glob("lib*.so.*"):
        shutil.copy(library, python / "lib" / library.name)
    loader = next((system / "usr/lib/x86_64-linux-gnu").glob("ld-linux-x86-64.so.2"))
    shutil.copy(loader, python / "lib" / loader.name)
    shutil.copy(system / "usr/bin/python3.11", python / "bin" / "python3.11")
    (python / "bin" / "python3").symlink_to("python3.11")
    own = ["--set-interpreter", f"{STANDALONE}/{loader.name}", "--force-rpath", "--set-rpath", STANDALONE]
    subprocess.run([patchelf, *own, str(python / "bin" / "python3.11")], check=True)
    file = parts_folder / "python.tar.gz"
    subprocess.run(["tar", "-czf", file, "-C", python.parent, "python"], check=True)
    shutil.rmtree(system)
    return file


@pytest.mark.stand_in("Ubuntu 22.04 made with debootstrap, and a Python put together from Debian 12")
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
    assert [each for each in purls if each.startswith("pkg:generic/cpython@3.11")]


@pytest.mark.stand_in("Debian 11, and a Python put together from Debian 12")
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
    assert docker("run", "--rm", built.image_id, "python3", "-c", ask) == "(3, 11) /opt/.venv /opt/python"
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
    asked = command.arguments(
        wanted,
        digests.load(repository.path),
        command.bases(wanted, digests.load(repository.path)),
        machine="linux/amd64",
        multimesh="multimesh",
    )
    monkeypatch.setattr(command, "arguments", lambda *_, **__: asked | {"PYTHON_SHA256": "0" * 64})
    with pytest.raises(errors.BuildError, match="the standalone Python is not the pinned one"):
        build.run(repository.path, engine, wanted, means)
