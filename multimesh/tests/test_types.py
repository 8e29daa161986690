"""Type checkers see the user's own arguments through `jit`, `task`, `microbatch` and `pipeline`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PYRIGHT = "pyright@1.1.414"

SCRIPT = """\
import jax
import multimesh as mm
from jax.sharding import Mesh


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return (x @ weights[0]).sum()


def train(meshes: list[Mesh], weights: list[jax.Array], x: jax.Array) -> None:
    placed = mm.task(loss, "stage", mesh=meshes[0])
    with mm.task(mesh=meshes[1]):
        placed(weights, x)
    step = mm.jit(mm.microbatch(mm.pipeline(loss, meshes), argnum=1, size=4))
    step(weights, x)
    step(weights=weights, x=x)
    placed(weights)  # one is missing
    step(weights, x, 3)  # one too many
    mm.microbatch(loss, sizes=4)  # size
    mm.jit(loss, donate=0)  # donate_argnums


class Model:
    @mm.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return x

    @mm.jit(donate_argnums=1)
    def train(self, x: jax.Array) -> jax.Array:
        return x


def call(model: Model, x: jax.Array) -> None:
    model(x)
    model.train(x)
    model.train(x, x)  # one too many
"""
WRONG = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def lines_of(output: str) -> list[int]:
    return sorted({int(number) for number in re.findall(r"script\.py:(\d+)(?::\d+)?(?: -)?:? error", output)})


@pytest.mark.parametrize(
    "checker", [pytest.param("mypy", marks=pytest.mark.longer), pytest.param("pyright", marks=pytest.mark.full)]
)
def test_a_checker_finds_the_mistakes_of_a_script_and_no_others(checker: str, script: Path):
    npx = shutil.which("npx")
    line = [sys.executable, "-m", "mypy", "--cache-dir", script.parent / "cache", "--follow-imports=silent", script]
    if checker == "pyright":
        if npx is None:
            pytest.skip("needs Node.js")
        line = [npx, "--yes", PYRIGHT, "--pythonpath", sys.executable, script]
    process = subprocess.run(line, capture_output=True, text=True, cwd=script.parent, check=False)
    assert lines_of(process.stdout) == WRONG, process.stdout + process.stderr
