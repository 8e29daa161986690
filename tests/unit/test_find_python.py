"""Which Python ``bootstrap.sh`` takes, what it passes over, and what it says. The Pythons are scripts that answer."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tooling.environment import find_python

LOCKED = (
    "jax==0.10.2 ; python_full_version < '3.12' \\\n    --hash=x\njax==0.12.0.1 ; python_full_version >= '3.12' \\\n"
)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: nothing on PATH, an empty home, and a clone without ``.venv``."""
    for name in ("PYTHON", "PYENV_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "clone" / "requirements").mkdir(parents=True)
    (tmp_path / "clone" / "requirements" / "run.txt").write_text(LOCKED)
    monkeypatch.setattr(find_python, "ROOT", str(tmp_path / "clone"))
    monkeypatch.setattr(find_python, "FETCHED", str(tmp_path / "clone" / "third_party" / ".python"))
    return tmp_path


def script(place: Path, text: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return place


def fake(place: Path, version: str, **said: Any) -> Path:
    """A program that answers like CPython of this version, but for what is given."""
    answer = {
        "path": str(place), "version": [int(part) for part in version.split(".")], "final": True, "free": False,
        "implementation": "CPython", "bits": 64, "missing": [],
    }  # fmt: skip
    return script(place, f"echo '{json.dumps(answer | said)}'")


def shim(place: Path) -> Path:
    """What pyenv has on PATH for a version that is not active."""
    return script(place, f"echo 'pyenv: {place.name}: command not found' >&2; exit 127")


def test_the_order(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these wins over those after it; Python 3.11 comes last, wherever it is."""
    uv = machine / "uv"
    script(machine / "bin" / "uv", f"echo {uv}")
    monkeypatch.setenv("PYENV_ROOT", str(machine / "one pyenv"))
    monkeypatch.setenv("PATH", f"{machine}/bin:{machine}/other/shims:{machine}/more")
    order = [
        fake(machine / "bin" / "python3", "3.12.9"),
        fake(machine / "bin" / "python3.14", "3.14.0"),
        fake(machine / "bin" / "python3.13", "3.13.2"),
        fake(machine / "more" / "python3.13", "3.13.1"),
        fake(machine / "bin" / "python3.12", "3.12.1"),
        fake(machine / "one pyenv" / "versions" / "3.12.10" / "bin" / "python3", "3.12.10"),
        fake(machine / "one pyenv" / "versions" / "3.12.9" / "bin" / "python3", "3.12.9"),
        fake(machine / "other" / "versions" / "3.13.0" / "bin" / "python3", "3.13.0"),
        fake(machine / "home" / ".pyenv" / "versions" / "3.13.1" / "bin" / "python3", "3.13.1"),
        fake(uv / "cpython-3.13.3-linux-x86_64-gnu" / "bin" / "python3", "3.13.3"),
        fake(Path(find_python.FETCHED) / "cpython-3.13.3-linux-x86_64-gnu" / "bin" / "python3", "3.13.3"),
    ]
    old = fake(machine / "bin" / "python3.11", "3.11.4")
    for expected in order:
        found = find_python.best(find_python.search())
        assert found is not None
        assert found.path == str(expected)
        fake(expected, "3.11.9") if expected.name == "python3" and expected == order[0] else expected.unlink()
    found = find_python.best(find_python.search())
    assert found is not None
    assert found.path == str(order[0]), "python3 comes before python3.11"
    order[0].unlink()
    assert find_python.best(find_python.search()) == find_python.look(str(old), "python3.11 on PATH")


def test_shims_that_fail_lead_to_the_versions_behind_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv's shims are on PATH, but HOME is another and none of the wanted versions is active."""
    root = machine / "elsewhere"
    fake(root / "shims" / "python3", "3.11.7", path=str(root / "versions" / "3.11.7" / "bin" / "python3.11"))
    shim(root / "shims" / "python3.13")
    fake(root / "versions" / "3.13.0" / "bin" / "python3", "3.13.0")
    fake(root / "versions" / "3.9.18" / "bin" / "python3", "3.9.18")
    monkeypatch.setenv("PATH", f"{root}/shims:{machine}/bin")

    chosen, remark = find_python.choose("", offline=True)

    assert str(chosen) == f"Python 3.13.0 (pyenv: {root}/versions/3.13.0/bin/python3), jax 0.12.0.1"
    assert remark == ""


@pytest.mark.parametrize(
    ("version", "said", "fault"),
    [
        ("3.10.2", {}, "is Python 3.10.2, not one of 3.11 to 3.14"),
        ("3.15.0", {}, "is Python 3.15.0, not one of 3.11 to 3.14"),
        ("3.13.0", {"free": True}, "is a free-threaded build"),
        ("3.14.0", {"final": False}, "is a pre-release"),
        ("3.13.0", {"implementation": "PyPy"}, "is PyPy, not CPython"),
        ("3.13.0", {"bits": 32}, "is a build of 32 bits, not 64"),
        ("3.12.3", {"missing": ["ensurepip"]}, "cannot make environments; install its venv package (Debian, Ubuntu: "
         "apt-get install python3.12-venv)"),
        ("3.13.0", {"missing": ["bz2", "ssl"]}, "was built without bz2, ssl; build it with them"),
    ],
)  # fmt: skip
def test_what_is_passed_over(machine: Path, version: str, said: dict[str, Any], fault: str) -> None:
    passed = fake(machine / "bin" / "python3", version, **said)
    good = fake(machine / "bin" / "python3.12", "3.12.1")
    assert find_python.choose("", offline=True)[0].path == str(good)

    good.unlink()
    with pytest.raises(find_python.Failure) as failure:
        find_python.choose("", offline=True)
    assert str(failure.value) == (
        f"no Python 3.11 to 3.14 can be used: {passed} {fault}; --offline fetches none; install one, or name it with "
        "PYTHON=/path/to/python3"
    )


def test_python_3_11_is_taken_in_need_and_says_why(machine: Path) -> None:
    python = fake(machine / "bin" / "python3", "3.11.2")
    bare = fake(machine / "bin" / "python3.12", "3.12.3", missing=["ensurepip"])

    chosen, remark = find_python.choose("", offline=True)

    assert str(chosen) == f"Python 3.11.2 (python3 on PATH: {python}), jax 0.10.2"
    assert remark.startswith(f"found none from 3.12 on: {bare} cannot make environments; install its venv package")
    assert remark.endswith("; --offline fetches none")


def test_an_environment_keeps_its_python(machine: Path) -> None:
    fake(machine / "clone" / ".venv" / "bin" / "python", "3.12.1", path="/usr/bin/python3.12")
    fake(machine / "bin" / "python3", "3.13.0")

    chosen, remark = find_python.choose("", offline=False)

    assert (chosen.path, chosen.origin, remark) == (os.path.realpath("/usr/bin/python3.12"), "of .venv", "")


def test_an_old_environment_stays_and_is_told_of_a_newer_python(machine: Path) -> None:
    fake(machine / "clone" / ".venv" / "bin" / "python", "3.11.7")
    fake(machine / "bin" / "python3", "3.11.7")
    assert find_python.choose("", offline=False)[1] == "", "nothing is fetched for it, and nothing to be told"

    new = fake(machine / "bin" / "python3.13", "3.13.0")
    chosen, remark = find_python.choose("", offline=False)

    assert chosen.version == (3, 11, 7)
    assert remark == f"PYTHON={new} ./bootstrap.sh makes .venv anew with Python 3.13.0, jax 0.12.0.1"


def test_the_named_python(machine: Path) -> None:
    """It is taken by its path or its name, even where it is 3.11; another version means another environment."""
    named = fake(machine / "bin" / "mine", "3.11.4")
    fake(machine / "bin" / "python3", "3.13.0")
    for name in (str(named), "mine"):
        chosen, remark = find_python.choose(name, offline=False)
        assert (chosen.path, chosen.origin, remark) == (str(named), "PYTHON", "")

    here = fake(machine / "clone" / ".venv" / "bin" / "python", "3.13.0")
    assert find_python.choose("mine", offline=False) == (chosen, "makes .venv anew, which had Python 3.13.0")

    fake(here, "3.11.9")
    chosen, remark = find_python.choose("mine", offline=False)
    assert (chosen.path, remark) == (str(here), f"{named} is of the same version; remove .venv to use it")

    fake(here, "3.11.9", final=False)
    chosen, remark = find_python.choose("mine", offline=False)
    assert (chosen.path, remark) == (str(named), "makes .venv anew, which had Python 3.11.9"), (
        "a pre-release is no keeper"
    )


@pytest.mark.parametrize("other", [True, False])
def test_a_named_python_that_cannot_be_taken(machine: Path, other: bool) -> None:
    shim(machine / "bin" / "python3.12")
    if other:
        fake(machine / "bin" / "python3", "3.13.0")
    instead = str(machine / "bin" / "python3") if other else "another"
    for name, fault in (
        ("python3.12", "pyenv: python3.12: command not found"),
        ("missing", "No such file or directory"),
        (str(fake(machine / "free", "3.13.0", free=True)), "is a free-threaded build"),
        (str(script(machine / "silent", "exit 3")), "it failed"),
        (str(script(machine / "loud", "echo hello")), "is no Python"),
    ):
        with pytest.raises(find_python.Failure) as failure:
            find_python.choose(name, offline=False)
        assert str(failure.value) == f"PYTHON={name}: {fault}; or name {instead}"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_python_that_can_make_environments(
    machine: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's own lacks ensurepip until python3-venv is installed."""
    fake(machine / "bin" / "python3", "3.13.5", missing=["ensurepip"])
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: started.append(argv))
    monkeypatch.setattr("sys.argv", ["find_python.py", "--group", "image", flag])
    find_python.main()
    [argv] = started
    assert argv[0] == sys.executable
    assert argv[-3:] == ["--group", "image", flag]


def test_names_of_folders_that_are_no_releases(machine: Path) -> None:
    for name in (
        "3.13t-dev",
        "pypy3.11-7.3.19",
        "3.14.0rc1",
        "miniconda3-3.12",
        "cpython-3.14.0+freethreaded-linux",
        "3.15.0",
    ):
        fake(machine / "versions" / name / "bin" / "python3", "3.13.0")
    assert find_python.list_pythons(str(machine / "versions")) == []
    assert find_python.list_pythons(str(machine / "missing")) == []


@pytest.mark.parametrize(("version", "jax"), [("3.11.7", "0.10.2"), ("3.12.0", "0.12.0.1"), ("3.14.1", "0.12.0.1")])
def test_the_jax_that_a_python_means(version: str, jax: str) -> None:
    assert find_python.jax_of(tuple(map(int, version.split(".")))) == f", jax {jax}"


def test_one_jax_for_all_pythons_needs_no_marker(machine: Path) -> None:
    (machine / "clone" / "requirements" / "run.txt").write_text("jax==0.13.0 \\\n    --hash=x\n")
    assert find_python.jax_of((3, 13)) == ", jax 0.13.0"


def test_it_is_read_by_old_pythons() -> None:
    text = Path(find_python.__file__).read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 7))
    assert "from __future__" not in text, "Python 3.6 has no annotations there"
