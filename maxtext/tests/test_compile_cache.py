"""A second start of the launcher finds what the first one compiled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from multimesh_maxtext.command.environment import CACHE, CACHE_SIZE, CACHE_SWITCH, cache_variables


def test_programs_are_kept_in_the_users_cache(tmp_path: Path) -> None:
    home, limits = {"HOME": str(tmp_path)}, {"JAX_COMPILATION_CACHE_MAX_SIZE": str(CACHE_SIZE)}
    limits["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    assert cache_variables(home) == {CACHE: str(tmp_path / ".cache/multimesh/compiled"), **limits}
    other = str(tmp_path / "other")
    assert cache_variables(home | {"XDG_CACHE_HOME": other})[CACHE] == f"{other}/multimesh/compiled"


@pytest.mark.parametrize(
    "variables", [{CACHE_SWITCH: "false"}, {CACHE_SWITCH: "0"}, {CACHE: "/there"}, {CACHE: ""}, {"HOME": ""}]
)
def test_the_users_variables_stand(tmp_path: Path, variables: dict[str, str]) -> None:
    home = {"HOME": str(tmp_path)}
    assert cache_variables(home | variables) == {}
    (tmp_path / ".cache").touch()  # a file is no folder
    assert cache_variables(home) == {}


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_a_second_start_compiles_nothing(run: Any, tmp_path: Path, processes: int, monkeypatch: Any) -> None:
    """An entry that a kill cut short is compiled again, with the same losses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_SWITCH, "1")
    flags = ["--cpus", str(2 // processes), "--pp", "2", "--num-steps", "2", "--json"]
    flags += ["--nodes", str(processes), "--spawn"] if processes > 1 else []

    def start(name: str) -> Any:
        result = run("--output", str(tmp_path / name), *flags)
        assert result.code == 0, result.stderr
        return [step["loss"] for step in result.json["steps"]], entries()

    def entries() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (tmp_path / "cache").rglob("*-cache")}

    losses, files = start("one")
    assert files
    assert (tmp_path / "cache/multimesh/compiled").is_dir()
    assert start("two") == (losses, files)
    entry = max((tmp_path / "cache").rglob("*-cache"), key=lambda path: path.stat().st_size)
    os.truncate(entry, 100)
    assert start("three")[0] == losses
