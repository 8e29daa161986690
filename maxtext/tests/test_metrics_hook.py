"""A function of the user's gets the records of a run, whatever it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multimesh_maxtext.command import metrics_hook
from multimesh_maxtext.errors import FileError, LauncherError, UsageError

SMALL = "--cpus 2 --pp 2 --num-layers 2 --model-dims 32 --mlp-dims 32 --sequence-length 32 --attention dot_product"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("json", UsageError, r"--metrics-hook json: write MODULE:FUNCTION, such as my_hooks:log"),
        ("json:no-name", UsageError, r"write MODULE:FUNCTION"),
        ("json:nothing", UsageError, r"json has no function nothing; write its name"),
        ("no_such_module:log", FileError, r"no_such_module cannot be imported \(ModuleNotFoundError: No module named"),
    ],
)
def test_a_hook_that_is_not_there_is_named(name: str, kind: type[LauncherError], message: str):
    with pytest.raises(kind, match=message):
        metrics_hook.load(name)


def test_what_a_hook_raises_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]):
    given = []

    def log(record: Any) -> None:
        given.append(record)
        raise RuntimeError(f"no network for {record.pop('step')}")

    hook = metrics_hook.MetricsHook("mine:log", log)
    record = {"step": 3, "learning/loss": 1.0}
    hook(record)
    hook(record)
    hook.end()
    assert record == {"step": 3, "learning/loss": 1.0}
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "warning: --metrics-hook mine:log: RuntimeError at step 3: no network for 3; training goes on"
    )
    assert last == "warning: --metrics-hook mine:log failed for 2 of 2 records; they are in the metrics file"


def with_packages(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ":".join(map(str, folders))}


def run_the_page(run: Callable[..., Any], folder: Path, package: str, **environment: str) -> Any:
    """Train three steps with the hook that maxtext/README.md shows for `package`, installed for this run alone."""
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-input", "--target", str(packages), package]
    subprocess.run(install, check=True)
    page = (Path(__file__).parents[1] / "README.md").read_text()
    (hook,) = [block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if package.split("-")[0] in block]
    (folder / "mine.py").write_text(hook)
    flags = [*SMALL.split(), "--num-steps", "3", "--metrics-hook", "mine:log", "--json"]
    done = run(*flags, env=with_packages(folder, packages) | environment)
    assert (done.code, done.stderr.count("--metrics-hook")) == (0, 0), done.stderr
    return done


@pytest.mark.full
def test_mlflow_has_the_losses_of_a_run(run: Callable[..., Any], tmp_path: Path):
    store = tmp_path / "store"
    environment = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = run_the_page(run, tmp_path, "mlflow-skinny", **environment)
    (file,) = store.rglob("metrics/learning/loss")
    losses = [float(line.split()[1]) for line in file.read_text().splitlines()]
    assert losses == pytest.approx([step["loss"] for step in done.json["steps"]])


@pytest.mark.full
def test_wandb_writes_a_run_without_a_network(run: Callable[..., Any], tmp_path: Path):
    run_the_page(run, tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    (written,) = tmp_path.rglob("run-*.wandb")
    assert b"learning/loss" in written.read_bytes()
