"""Locks are made for every Python that we support, whichever runs: real uv, and an index of files made here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import locks, wheels
from tooling.ci import steps
from tooling.core.files import ROOT
from tooling.environment import check_python

CHECK = "environment/check_python"
EARLIER, NEWEST = 'python_version < "3.12"', 'python_version >= "3.12"'


def release(index: Path, name: str, version: str, python: str, *asks: str) -> None:
    """Offer a wheel to these Pythons in a folder that uv reads as a package index."""
    wheel = index / name / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"Requires-Python: {python}", "Provides-Extra: with-cuda", *(f"Requires-Dist: {ask}" for ask in asks)]
    sha256 = wheels.pack(wheel, metadata=lines)
    quoted = python.replace("<", "&lt;").replace(">", "&gt;")
    with (wheel.parent / "index.html").open("a") as page:
        page.write(f'<a href="{wheel.name}#sha256={sha256}" data-requires-python="{quoted}">{wheel.name}</a><br>\n')


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index with a JAX for each line of Pythons, and a package whose newest release asks for a newer Python."""
    place = tmp_path / "index"
    for version, python in (("0.10.2", ">=3.11"), ("0.12.0", ">=3.12")):
        for name in ("jax", "jax-cuda12-pjrt", "jax-cuda12-plugin"):
            release(place, name, version, python)
    release(place, "flax", "1.0", ">=3.11", "jax>=0.10")
    release(place, "flax", "1.1", ">=3.12", "jax>=0.11")
    monkeypatch.setenv("UV_DEFAULT_INDEX", place.as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one group, and few packages in it."""
    root = tmp_path / "root"
    for name in (".ci/lock", *(f"tooling/{name}.py" for name in ("__init__", "environment/__init__", CHECK))):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    (root / "requirements").mkdir()
    lines = "".join(f"jax=={jax} ; {marker}\n" for marker, jax in ((EARLIER, "0.10.2"), (NEWEST, "0.12.0")))
    (root / "requirements" / "run.in").write_text(f"{lines}flax\n")
    (root / "sources.lock").write_text('"version": "0.12.0"')
    for name in ("", "multimesh/"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "pyproject.toml").write_text('requires-python = ">=3.9"\npython_version = "3.9"\n')
    (root / ".venv").symlink_to(sys.prefix)
    return root


def lock(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([checkout / ".ci/lock", *words], capture_output=True, text=True, check=False)


def test_a_lock_holds_what_each_python_is_offered(checkout: Path, index: None) -> None:
    """Whichever Python runs this: an index that is asked for it alone shows 3.11 no later JAX."""
    assert lock(checkout, "run").returncode == 0
    assert 'requires-python = ">=3.11"' in (checkout / "multimesh" / "pyproject.toml").read_text()
    assert "is no group; choose from run dev" in lock(checkout, "nosuch").stderr
    run = checkout / "requirements" / "run.txt"
    assert locks.locked_versions(run, "3.11.7") == {"flax": "1.0", "jax": "0.10.2"}
    for python in ("3.12.0", "3.13.0", "3.14.2"):
        assert locks.locked_versions(run, python) == {"flax": "1.1", "jax": "0.12.0"}
    assert run.read_text().count("--hash=sha256:") == 4
    assert locks.locked_versions(run) == locks.locked_versions(run, sys.version.split()[0])


def test_our_locks_hold_the_jax_of_both_lines(root: Path, tmp_path: Path) -> None:
    """They hold plugins for GPUs of the same release, which JAX ignores otherwise."""
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
    """``.ci/lock`` writes what it says for pip and mypy; doors, workflows and ``.ci/run`` ask ``check_python``."""
    for name in steps.PROJECTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        versions = re.findall(r'(?m)^(?:requires-python = ">=|python_version = ")([0-9.]+)"', text)
        assert set(versions) == {check_python.in_dots(check_python.OLDEST)}, f"{name}: .ci/lock"
    major, minor = check_python.OLDEST
    bound = rf"(?<![\w.-]){major}\.{minor}(?!\.?[0-9])|\({major}, {minor}\)"
    excluded = ["tests", "multimesh/tests", "maxtext/tests", "requirements", "patches", "sources.*", "docs/pictures"]
    excluded += [f"docs/{page}.md" for page in RECORDS]
    command = ["git", "grep", "-lIP", bound, "--", *steps.PROJECTS, ".", *(f":!{path}" for path in excluded)]
    versions = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    by_hand = set(versions) - set(steps.PROJECTS)
    assert by_hand == {"README.md", "docs/getting-started.md", f"tooling/{CHECK}.py"}
