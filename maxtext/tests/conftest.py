"""The repository's door and its patched MaxText, as a user has them after a bootstrap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.hooks import *  # noqa: F403
from tests.xla_flags import QUICK, add_flags

from multimesh_maxtext.command.check_flags import check_job
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.job import Job, Paths, find_maxtext
from multimesh_maxtext.errors import MissingPartError

# As in multimesh/tests/conftest.py: eight virtual devices, programs that compile fast; before jax is imported.
os.environ |= {"NPROC": "64", "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", **os.environ}
add_flags("--xla_force_host_platform_device_count=8", *QUICK)

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds no folder
ROOT = Path(__file__).resolve().parents[2]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell started pytest in the background; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Result:
    """A command that ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout)


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let trainers find what those of other tests have compiled, as a user's do, and nothing of another test run."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def maxtext() -> Path:
    """The folder on PYTHONPATH with the patched MaxText; without it these tests fail rather than pass by skipping."""
    try:
        return find_maxtext(ROOT)
    except MissingPartError as missing:
        pytest.fail(str(missing))


@pytest.fixture(scope="session")
def run(maxtext: Path) -> Callable[..., Result]:
    """Run a script of ``maxtext/`` to its end."""

    def command(*arguments: str | Path, script: str = "run.py", env: dict[str, str] | None = None) -> Result:
        line = [str(ROOT / "maxtext" / script), *map(str, arguments)]
        line = line if script.endswith(".sh") else [sys.executable, *line]
        process = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
        return Result(process.returncode, process.stdout, process.stderr)

    return command


@pytest.fixture(scope="session")
def job(maxtext: Path) -> Callable[[Sequence[str]], Job]:
    """Check a command line and return the job it describes."""

    def check_argv(argv: Sequence[str]) -> Job:
        return check_job(read(argv), maxtext / "maxtext")

    return check_argv


@pytest.fixture
def paths(maxtext: Path, tmp_path: Path) -> Paths:
    return Paths(python="python", maxtext=maxtext, output=tmp_path, metrics=tmp_path / "metrics.jsonl")
