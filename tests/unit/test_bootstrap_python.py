"""Which Python ``bootstrap.sh`` takes, and its reasons. The Pythons are scripts that answer."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.parts.processes import write_program
from tooling.core.files import ROOT
from tooling.environment import check_python


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """An empty machine: nothing on PATH, an empty home, and a clone without ``.venv``."""
    (tmp_path / "clone").mkdir()
    shutil.copy2(ROOT / "bootstrap.sh", tmp_path / "clone")
    return tmp_path


def fake(place: Path, minor: int, fault: str = "") -> Path:
    """A program that answers like CPython of this version, and that says its name once it is taken."""
    waits = f'[ "$3 {minor}" = "python3 11" ] && [ "$4" -gt 11 ] && exit 1'
    answer = f"echo '{place}: {fault}'; exit 1" if fault else f"{waits}; echo {place}"
    return write_program(place, f"#!/bin/sh\ncase $2 in */check_python.py) {answer} ;; *) echo 3.{minor} $0 ;; esac\n")


def bootstrap(machine: Path, *folders: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = ":".join(str(machine / folder) for folder in (*folders, "bin"))
    env = {"PATH": path, "HOME": str(machine / "home")} | env
    return subprocess.run(["/bin/sh", machine / "clone/bootstrap.sh"], env=env, capture_output=True, text=True)


def test_the_order(machine: Path) -> None:
    """Each of these wins over those after it; Python 3.11 comes last, wherever it is."""
    order = [
        fake(machine / "clone/.venv/bin/python", 11),
        fake(machine / "bin/python3", 12),
        fake(machine / "home/.local/share/uv/python/cpython-3.14.1-linux/bin/python3", 14),
        fake(machine / "bin/python3.13", 13),
        fake(machine / "home/.pyenv/versions/3.12.9/bin/python3", 12),
    ]
    fake(machine / "bin/python3.11", 11)
    for expected in order:
        assert bootstrap(machine).stdout.split()[1:] == [str(expected)]
        fake(expected, 11) if expected == order[1] else expected.unlink()
    assert bootstrap(machine).stdout == f"3.11 {machine / 'bin/python3'}\n", "python3 comes before python3.11"


def test_shims_that_fail_lead_to_the_versions_behind_them(machine: Path) -> None:
    """pyenv's shims are on PATH, but HOME is another and only an old version is active."""
    fake(machine / "pyenv/shims/python3", 11)
    fake(machine / "pyenv/shims/python3.13", 13).write_text("#!/bin/sh\nexit 127\n")
    new = fake(machine / "pyenv/versions/3.13.0/bin/python3", 13)
    assert bootstrap(machine, "pyenv/shims").stdout == f"3.13 {new}\n"


def test_a_python_that_cannot_be_taken_is_told(machine: Path) -> None:
    python = fake(machine / "bin/python3", 12, "is not CPython")
    process = bootstrap(machine)
    assert process.returncode == 1
    assert process.stderr == f"error: {python}: is not CPython; or name another with PYTHON=/path/to/python3\n"
    other = fake(machine / "bin/python3.11", 11)
    assert bootstrap(machine).stdout == f"3.11 {other}\n"
    assert bootstrap(machine, PYTHON="python3").stderr == process.stderr
    assert "error: missing: is not there, or is no Python" in bootstrap(machine, PYTHON="missing").stderr


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ((3, 10, 2, "final"), "is Python .*, not 3.11 to 3.14; install one of these"),
        ((3, 15, 0, "final"), "is Python .*, not 3.11 to 3.14"),
        ((3, 14, 0, "candidate"), "is a pre-release"),
        (sys.version_info, ""),
    ],
)
def test_what_a_python_says_of_itself(version: tuple[object, ...], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert re.fullmatch(f"{fault}.*" if fault else "", check_python.find_fault())
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1)
    assert fault or check_python.find_fault() == "is a free-threaded build"


def test_python3_waits_for_those_with_a_newer_jax_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final"))
    monkeypatch.delenv("PYTHON", raising=False)
    for words, code in ((["python3", "14"], 1), (["python3", "11"], 0), ([".venv/bin/python", "14"], 0)):
        monkeypatch.setattr(sys, "argv", ["", *words])
        assert check_python.main() == code
    monkeypatch.setenv("PYTHON", "python3")
    monkeypatch.setattr(sys, "argv", ["", "python3", "14"])
    assert check_python.main() == 0


def test_it_is_read_by_old_pythons() -> None:
    text = Path(check_python.__file__).read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 7))
    assert "from __future__" not in text, "Python 3.6 has no annotations there"
