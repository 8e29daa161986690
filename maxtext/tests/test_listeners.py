"""Records of a run as Prometheus reads them, alerts as lines, the dashboard, and a function of the user's."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multimesh_maxtext.command.job import Paths
from multimesh_maxtext.command.listeners import GAUGES, Monitor, load_hook
from multimesh_maxtext.command.steps import Run
from multimesh_maxtext.errors import FileError, FlagError, LauncherError
from multimesh_maxtext.handoff import MEMORY, SECONDS, TIME, UTILIZATION

GOES_ON = "training goes on with its next record"
SMALL = "--cpus 2 --pp 2 --num-layers 2 --model-dims 32 --mlp-dims 32 --sequence-length 32 --attention dot_product"


def record(step: int, loss: float = 3.0, **more: float) -> dict[str, Any]:
    times = {SECONDS: 2.0, TIME: 1000.0 + 4 * step, MEMORY: 5e9, UTILIZATION: 0.25}
    return {
        "step": step,
        "learning/loss": loss,
        "learning/grad_norm": 1.5,
        "learning/total_weights": 64,
        **times,
        **more,
    }


def scrape(file: Path) -> dict[str, float]:
    """Values by name, as Prometheus would read them: each has its help and its type before it."""
    samples, lines = {}, file.read_text().splitlines()
    for help_, kind, line in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, value = line.split(" ")
        assert re.fullmatch("[a-z_]+", name)
        assert help_.startswith(f"# HELP {name} ")
        assert kind == f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
        samples[name] = float(value)
    return samples


def test_the_newest_step_is_scraped(tmp_path: Path):
    tell = Monitor(100, tmp_path / "run.prom")
    for step in range(4):
        tell(record(step))
    tell({"step": 3, "eval/total_loss": 1.0})
    metrics = scrape(tmp_path / "run.prom")
    assert set(metrics) == set(GAUGES)
    assert metrics["multimesh_step"] == 3
    assert metrics["multimesh_tokens_per_second"] == 32
    assert metrics["multimesh_mfu_ratio"] == 0.25
    assert metrics["multimesh_goodput_ratio"] == pytest.approx(8 / 14)  # four steps of 2 s in 14 s
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]


def test_what_is_not_known_is_left_out_and_a_loss_that_is_no_number_is_there(tmp_path: Path):
    tell = Monitor(100, tmp_path / "run.prom")
    sample = record(0, math.nan)
    del sample[UTILIZATION]
    tell(sample)
    metrics = scrape(tmp_path / "run.prom")
    assert "multimesh_mfu_ratio" not in metrics
    assert math.isnan(metrics["multimesh_loss"])


def test_alerts_are_lines_of_a_stable_shape_one_for_steps_that_follow_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    watch = Monitor(100, tmp_path / "run.prom")
    losses = [9.0, 5.0, *[3.0] * 18, 4.6, 4.7, 4.8, 3.0, math.nan, math.nan, 3.0, math.inf]
    for step, loss in enumerate(losses):
        watch(record(step, loss))
    assert capsys.readouterr().err.splitlines() == [
        "alert: loss-spike step=20 loss=4.6000 median=3.0000",
        "alert: loss-not-finite step=24 loss=nan",
        "alert: loss-not-finite step=27 loss=inf",
    ]
    metrics = scrape(tmp_path / "run.prom")
    assert (metrics["multimesh_loss_spikes_total"], metrics["multimesh_losses_not_finite_total"]) == (1, 2)


def test_the_dashboard_shows_metrics_that_there_are(root: Path):
    dashboard = json.loads((root / "maxtext/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {name for query in queries for name in re.findall(r"multimesh_\w+", query)} == set(GAUGES)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("json", FlagError, r"--metrics-hook json: write MODULE:FUNCTION, such as my_hooks:log"),
        ("json:no-name", FlagError, r"write MODULE:FUNCTION"),
        ("json:nothing", FlagError, r"json has no function nothing; write its name"),
        ("no_such_module:log", FileError, r"no_such_module cannot be imported \(ModuleNotFoundError: No module named"),
    ],
)
def test_a_hook_that_is_not_there_is_named(name: str, kind: type[LauncherError], message: str):
    with pytest.raises(kind, match=message):
        load_hook(name)


def test_what_a_listener_raises_is_told_once_and_ends_nothing(paths: Paths, capsys: pytest.CaptureFixture[str]):
    def log(record: Any) -> None:
        raise RuntimeError(f"no network for {record.pop('step')}")

    name = f"--prometheus {paths.output / 'none/run.prom'}"
    run = Run(paths, listeners={"--metrics-hook mine:log": log, name: Monitor(9, paths.output / "none/run.prom")})
    paths.metrics.write_text("".join(f"{json.dumps(record(step))}\n" for step in (3, 4)))
    assert [step.number for step in run.read()] == [3, 4]
    hook, missing = capsys.readouterr().err.splitlines()
    assert hook == "warning: --metrics-hook mine:log: RuntimeError at step 3: no network for 3; " + GOES_ON
    assert missing.startswith(f"warning: {name}: FileNotFoundError at step 3: ")
    assert missing.endswith(GOES_ON)


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
    result = run(*flags, env=with_packages(folder, packages) | environment)
    assert (result.code, result.stderr.count("--metrics-hook")) == (0, 0), result.stderr
    return result


@pytest.mark.full
def test_mlflow_has_the_losses_of_a_run(run: Callable[..., Any], tmp_path: Path):
    store = tmp_path / "store"
    environment = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    result = run_the_page(run, tmp_path, "mlflow-skinny", **environment)
    (file,) = store.rglob("metrics/learning/loss")
    losses = [float(line.split()[1]) for line in file.read_text().splitlines()]
    assert losses == pytest.approx([step["loss"] for step in result.json["steps"]])


@pytest.mark.full
def test_wandb_writes_a_run_without_a_network(run: Callable[..., Any], tmp_path: Path):
    run_the_page(run, tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    (file,) = tmp_path.rglob("run-*.wandb")
    assert b"learning/loss" in file.read_bytes()
