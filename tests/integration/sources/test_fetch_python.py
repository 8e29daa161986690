"""The Python that uv fetches where this machine has none that fits: real uv, from the package index."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import platform
import shutil
import sys
import sysconfig
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tooling.environment import find_python

NAME = f"cpython-{find_python.FETCH}.99-linux-{platform.machine()}-gnu"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone on a machine whose only Python, the running one, does not fit."""
    root = tmp_path / "a clone"
    (root / "third_party").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    for module, name, value in (
        (find_python, "FETCHED", root / "third_party" / ".python"),
        (find_python, "UV_FOLDER", root / "third_party" / ".uv"),
        (find_python, "LOCK", root / "third_party" / ".venv.lock"),
    ):
        monkeypatch.setattr(module, name, str(value))
    return root


def leftovers(clone: Path) -> set[str]:
    return {path.name for path in (clone / "third_party").iterdir()} - {".venv.lock", ".python"}


def test_where_github_is_out_of_reach(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locked uv is installed, finds nobody, and is gone again."""
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", "http://127.0.0.1:1")

    with pytest.raises(find_python.Failure) as failure:
        find_python.take(offline=False)

    assert str(failure.value) == (
        "no Python 3.11 to 3.14 can be used: Python 3.13 could not be fetched (127.0.0.1:1: Connection refused "
        "(os error 111)); install one, or name it with PYTHON=/path/to/python3"
    )
    assert leftovers(clone) == set()


def test_where_the_package_index_is_out_of_reach(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")

    with pytest.raises(find_python.Failure, match=r"uv could not be fetched \(No matching distribution"):
        find_python.take(offline=False)
    assert leftovers(clone) == set()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server of one archive, laid out as uv's are, whose Python is this machine's."""
    content = tmp_path / "content" / "python"
    (content / "bin").mkdir(parents=True)
    library = content / "lib" / f"python{find_python.FETCH}"
    library.mkdir(parents=True)
    (library / "_sysconfigdata__linux.py").write_text(
        "# system configuration generated and used by the sysconfig module\nbuild_time_vars = {}\n"
    )
    program = content / "bin" / f"python{find_python.FETCH}"
    program.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
    program.chmod(0o755)
    (content / "bin" / "python3").symlink_to(program.name)
    with tarfile.open(tmp_path / "content" / "python.tar.gz", "w:gz") as archive:
        archive.add(content, "python")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "content")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}/python.tar.gz"
        serving.shutdown()


@pytest.mark.stand_in("an archive made here in place of a standalone Python from GitHub")
def test_what_is_fetched_is_checked_and_taken(
    clone: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv fetches from an index with one entry; a wrong checksum is refused, the right one is taken and stays."""
    monkeypatch.setattr(find_python, "install_uv", lambda maker: shutil.which("uv", path=sysconfig.get_path("scripts")))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(tmp_path / "index.json"))
    right = hashlib.sha256((tmp_path / "content" / "python.tar.gz").read_bytes()).hexdigest()
    entry = {
        "name": "cpython", "arch": {"family": platform.machine(), "variant": None}, "os": "linux", "libc": "gnu",
        "major": 3, "minor": int(find_python.FETCH.split(".")[1]), "patch": 99, "prerelease": "", "url": server,
        "variant": None, "build": "1",
    }  # fmt: skip
    (tmp_path / "index.json").write_text(json.dumps({NAME: entry | {"sha256": "0" * 64}}))
    with pytest.raises(find_python.Failure, match="could not be fetched"):
        find_python.take(offline=False)
    assert find_python.list_pythons(find_python.FETCHED) == []

    (tmp_path / "index.json").write_text(json.dumps({NAME: entry | {"sha256": right}}))
    for _ in range(2):  # the second time it is found, with no server and no uv
        taken, remark = find_python.take(offline=False)
        assert (taken.origin, taken.version, remark) == ("fetched by uv", tuple(sys.version_info[:3]), "")
        assert find_python.list_pythons(find_python.FETCHED)[:1] == [f"{find_python.FETCHED}/{NAME}/bin/python3"]
        monkeypatch.setattr(find_python, "install_uv", None)
    assert leftovers(clone) == set()
