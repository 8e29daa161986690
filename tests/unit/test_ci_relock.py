"""Locks are made for every Python that we support, whichever runs: real uv, and an index of files made here."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import locks
from tooling.ci import steps
from tooling.core.files import ROOT
from tooling.environment import find_python

JAX = ("jax", "jax-cuda12-pjrt", "jax-cuda12-plugin")
EARLIER, NEWEST = 'python_version < "3.12"', 'python_version >= "3.12"'


class Index:
    """A folder that uv reads as a package index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def release(self, name: str, version: str, python: str, asks: Sequence[str] = ()) -> None:
        """Offer a wheel to these Pythons."""
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        stem = f"{name.replace('-', '_')}-{version}"
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {python}\n"
        texts = {
            "METADATA": head
            + "Provides-Extra: with-cuda\n"
            + "".join(f"Requires-Dist: {requirement}\n" for requirement in asks),
            "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        wheel = place / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            record = f"{stem}.dist-info/RECORD,,\n"
            for file, text in texts.items():
                archive.writestr(f"{stem}.dist-info/{file}", text)
                digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
                record += f"{stem}.dist-info/{file},sha256={digest},{len(text)}\n"
            archive.writestr(f"{stem}.dist-info/RECORD", record)
        quoted = python.replace("<", "&lt;").replace(">", "&gt;")
        with (place / "index.html").open("a") as page:
            sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
            page.write(f'<a href="{wheel.name}#sha256={sha256}" data-requires-python="{quoted}">{wheel.name}</a><br>\n')


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index with a JAX for each line of Pythons, and a package whose newest release asks for a newer Python."""
    packages = Index(tmp_path / "index")
    for version, python in (("0.10.2", ">=3.11"), ("0.12.0", ">=3.12")):
        for name in JAX:
            packages.release(name, version, python)
    packages.release("flax", "1.0", ">=3.11", ["jax>=0.10"])
    packages.release("flax", "1.1", ">=3.12", ["jax>=0.11"])
    monkeypatch.setenv("UV_DEFAULT_INDEX", packages.folder.as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    return packages


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with few groups, and few packages in each."""
    folder = tmp_path / "root" / "requirements"
    folder.mkdir(parents=True)
    for group in ("docs", "cuda12"):
        (folder / f"{group}.in").write_text("-c run.txt\nflax\n")
    lines = ((EARLIER, "0.10.2"), (NEWEST, "0.12.0"))
    (folder / "run.in").write_text("".join(f"jax=={jax} ; {marker}\n" for marker, jax in lines) + "flax\n")
    names = ("jax-cuda12-pjrt", "jax-cuda12-plugin[with-cuda]")
    text = "".join(f"{name}=={jax} ; {marker}\n" for marker, jax in lines for name in names)
    (folder / "cuda12.in").write_text(f"-c run.txt\n{text}")
    (folder.parent / ".ci").mkdir()
    for name in (
        ".ci/lock",
        "tooling/__init__.py",
        "tooling/environment/__init__.py",
        "tooling/environment/find_python.py",
    ):
        (folder.parent / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder.parent / name)
    (folder.parent / "sources.lock").write_text('"version": "0.12.0"')
    for name in ("", "multimesh/"):
        (folder.parent / name).mkdir(exist_ok=True)
        (folder.parent / name / "pyproject.toml").write_text('requires-python = ">=3.9"\npython_version = "3.9"\n')
    (folder.parent / ".venv").symlink_to(sys.prefix)
    return folder.parent


def lock(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([here / ".ci/lock", *words], capture_output=True, text=True, check=False)


def test_a_lock_holds_what_each_python_is_offered(here: Path, index: Index) -> None:
    """Whichever Python runs this: an index that is asked for it alone shows 3.11 no later JAX."""
    assert lock(here, "run").returncode == 0
    assert 'requires-python = ">=3.11"' in (here / "multimesh" / "pyproject.toml").read_text()
    assert "is no group; choose from run dev" in lock(here, "nosuch").stderr
    run = here / "requirements" / "run.txt"
    assert locks.locked_versions(run, "3.11.7") == {"flax": "1.0", "jax": "0.10.2"}
    for python in ("3.12.0", "3.13.0", "3.14.2"):
        assert locks.locked_versions(run, python) == {"flax": "1.1", "jax": "0.12.0"}
    assert run.read_text().count("--hash=sha256:") == 4
    assert locks.locked_versions(run) == locks.locked_versions(run, sys.version.split()[0])


def test_our_locks_hold_the_jax_of_both_lines(root: Path, tmp_path: Path) -> None:
    """And plugins for GPUs of the same release, which JAX ignores otherwise."""
    markers = dict(re.findall(r"^jax==(\S+) ; (.*)$", (root / "requirements" / "run.in").read_text(), re.MULTILINE))
    assert sorted(markers.values()) == sorted((EARLIER, NEWEST))
    for python, marker in (("3.11.7", EARLIER), ("3.12.1", NEWEST), ("3.13.0", NEWEST), ("3.14.0", NEWEST)):
        (jax,) = (version for version, other in markers.items() if other == marker)
        run = locks.locked_versions(root / "requirements" / "run.txt", python)
        assert (run["jax"], run["jaxlib"]) == (jax, jax)
        for cuda in ("cuda12", "cuda13"):
            plugins = locks.locked_versions(root / "requirements" / f"{cuda}.txt", python)
            assert (plugins[f"jax-{cuda}-pjrt"], plugins[f"jax-{cuda}-plugin"]) == (jax, jax)


RECORDS = ("any-model", "performance", "processes", "releasing")
"""Pages that say which Python ran something, and so what is true of the one that goes."""


def test_three_files_say_which_python_is_the_oldest() -> None:
    """``.ci/lock`` writes what it says for pip and mypy; doors, workflows and ``.ci/run`` ask ``find_python``."""
    for name in steps.PROJECTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        named = re.findall(r'(?m)^(?:requires-python = ">=|python_version = ")([0-9.]+)"', text)
        assert set(named) == {find_python.in_dots(find_python.OLDEST)}, f"{name}: .ci/lock"
    major, minor = find_python.OLDEST
    bound = rf"(?<![\w.-]){major}\.{minor}(?!\.?[0-9])|\({major}, {minor}\)"
    excluded = [
        "tests",
        "multimesh/tests",
        "maxtext/tests",
        "requirements",
        "patches",
        "sources.*",
        "docs/pictures",
        *(f"docs/{page}.md" for page in RECORDS),
    ]
    command = ["git", "grep", "-lIP", bound, "--", *steps.PROJECTS, ".", *(f":!{path}" for path in excluded)]
    named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    by_hand = set(named) - set(steps.PROJECTS)
    assert by_hand == {"README.md", "docs/getting-started.md", "tooling/environment/find_python.py"}
