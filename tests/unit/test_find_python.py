"""Which Python ``bootstrap.sh`` takes, and its reasons. The Pythons are scripts that answer."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tooling.environment import find_python


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: nothing on PATH, an empty home, and a clone without ``.venv``."""
    for name in ("PYENV_ROOT", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(find_python, "ROOT", str(tmp_path / "clone"))
    return tmp_path


def script(place: Path, text: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return place


def fake(place: Path, version: str, fault: str = "", path: str = "") -> Path:
    """A program that answers like CPython of this version."""
    return script(place, f"printf '%s\\n' '{version}' '{path or place}' '{fault}'")


def test_the_order(machine: Path) -> None:
    """Each of these wins over those after it; Python 3.11 comes last, wherever it is."""
    home = machine / "home"
    order = [
        fake(machine / "bin" / "python3", "3.12.9"),
        fake(machine / "bin" / "python3.13", "3.13.2"),
        fake(home / ".local/share/uv/python/cpython-3.14.1-linux-x86_64-gnu/bin/python3", "3.14.1"),
        fake(home / ".pyenv/versions/3.12.9/bin/python3", "3.12.9"),
    ]
    fake(machine / "bin" / "python3.11", "3.11.4")
    for expected in order:
        assert find_python.choose(None).path == str(expected)
        fake(expected, "3.11.9") if expected == order[0] else expected.unlink()
    assert find_python.choose(None).path == str(order[0]), "python3 comes before python3.11"


def test_shims_that_fail_lead_to_the_versions_behind_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv's shims are on PATH, but HOME is another and only an old version is active."""
    root = machine / "elsewhere"
    fake(root / "shims" / "python3", "3.11.7")
    script(root / "shims" / "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    new = fake(root / "versions" / "3.13.0" / "bin" / "python3", "3.13.0")
    monkeypatch.setenv("PATH", f"{root}/shims:{machine}/bin")
    assert find_python.choose(None) == (str(new), (3, 13, 0), "")


@pytest.mark.parametrize(
    ("version", "fault", "said"),
    [
        ("3.10.2", "", "is Python 3.10.2, not 3.11 to 3.14"),
        ("3.15.0", "", "is Python 3.15.0, not 3.11 to 3.14"),
        ("3.14.0", "is a pre-release", "is a pre-release"),
    ],
)
def test_a_python_that_cannot_be_taken(
    machine: Path, version: str, fault: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    python = fake(machine / "bin" / "python3", version, fault)
    assert find_python.main() == 1
    assert capsys.readouterr().err.startswith(f"error: {python}: {said}")
    fake(machine / "bin" / "python3.11", "3.11.2")
    assert find_python.choose(None).version == (3, 11, 2)


def test_an_environment_keeps_its_python_unless_another_is_named(machine: Path) -> None:
    fake(machine / "clone" / ".venv" / "bin" / "python", "3.11.1", path="/usr/bin/python3.11")
    fake(machine / "bin" / "python3", "3.13.0")
    named = fake(machine / "bin" / "mine", "3.11.4")
    assert find_python.choose(None) == (os.path.realpath("/usr/bin/python3.11"), (3, 11, 1), "")
    for name in (str(named), "mine"):
        assert find_python.choose(name).path == str(named)
    for name in ("missing", str(script(machine / "silent", "exit 3")), str(script(machine / "loud", "echo hello"))):
        assert "is not there, or is no Python" in find_python.choose(name).fault


def test_it_is_read_by_old_pythons() -> None:
    text = Path(find_python.__file__).read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 7))
    assert "from __future__" not in text, "Python 3.6 has no annotations there"
