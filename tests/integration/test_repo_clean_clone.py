"""README's first screen, as somebody meets it: a fresh clone, an empty home, nothing set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

COMMANDS = {
    "run": "./bootstrap.sh --group run && maxtext/validate-cpu.sh",
    "test": "./bootstrap.sh --group run --group dev && .venv/bin/pytest -x",
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(__file__).resolve().parents[2]
    folder = tmp_path_factory.mktemp("clean") / "a clone"  # a space, because people have them
    subprocess.run(["git", "clone", "-q", str(root), str(folder)], check=True)
    return folder


# `.ci/run` runs both commands in a fresh clone anyway; here the home is empty as well.
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_readme_in_a_clean_clone(clone: Path, tmp_path: Path, name: str) -> None:
    shown = (clone / "README.md").read_text(encoding="utf-8")
    assert f"$ {COMMANDS[name].removesuffix(' -x')}\n" in shown
    # What the machine's administrator sets stays: the package index may be a mirror with a certificate of its own.
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    env = kept | {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-c", COMMANDS[name]], cwd=clone, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
