"""Metrics of a run as Prometheus reads them, alerts as lines, and the dashboard that shows them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from multimesh_maxtext.command.exposition import GAUGES, Exposition, Watch
from multimesh_maxtext.handoff import MEMORY, SECONDS, TIME, UTILIZATION


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


def scraped(file: Path) -> dict[str, float]:
    """Values by name, as Prometheus would read them: each has its help and its type before it."""
    found, lines = {}, file.read_text().splitlines()
    for help_, kind, line in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, value = line.split(" ")
        assert re.fullmatch("[a-z_]+", name)
        assert help_.startswith(f"# HELP {name} ")
        assert kind == f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
        found[name] = float(value)
    return found


def test_the_newest_step_is_scraped(tmp_path: Path):
    watch = Watch()
    tell = Exposition(tmp_path / "run.prom", wanted=100, restarts=2, watch=watch)
    for step in range(4):
        tell(record(step))
    tell({"step": 3, "eval/total_loss": 1.0})
    found = scraped(tmp_path / "run.prom")
    assert set(found) == set(GAUGES)
    assert found["multimesh_step"] == 3
    assert found["multimesh_tokens_per_second"] == 32
    assert found["multimesh_mfu_ratio"] == 0.25
    assert found["multimesh_goodput_ratio"] == pytest.approx(8 / 14)  # four steps of 2 s in 14 s
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]


def test_what_is_not_known_is_left_out_and_a_loss_that_is_no_number_is_there(tmp_path: Path):
    tell = Exposition(tmp_path / "run.prom", wanted=100, restarts=0, watch=Watch())
    known = record(0, math.nan)
    del known[UTILIZATION]
    tell(known)
    found = scraped(tmp_path / "run.prom")
    assert "multimesh_mfu_ratio" not in found
    assert math.isnan(found["multimesh_loss"])


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture):
    tell = Exposition(tmp_path / "none/run.prom", wanted=100, restarts=0, watch=Watch())
    tell(record(0))
    tell(record(1))
    assert capsys.readouterr().err.count("run.prom: No such file or directory; training goes on") == 1


def test_alerts_are_lines_of_a_stable_shape(capsys: pytest.CaptureFixture):
    watch = Watch()
    losses = [9.0, 5.0, *[3.0] * 18, 4.6, 3.0, math.nan, 3.0, math.inf]
    for step, loss in enumerate(losses):
        watch(record(step, loss))
    assert capsys.readouterr().err.splitlines() == [
        "alert: loss-spike step=20 loss=4.6000 median=3.0000",
        "alert: loss-not-finite step=22 loss=nan",
        "alert: loss-not-finite step=24 loss=inf",
    ]
    assert (watch.spikes, watch.not_finite) == (1, 2)


def test_the_dashboard_shows_metrics_that_there_are(root: Path):
    dashboard = json.loads((root / "maxtext/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {name for query in queries for name in re.findall(r"multimesh_\w+", query)} == set(GAUGES)
