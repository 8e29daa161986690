"""Forecasts of published runs: nobody here measured them, and no constant belongs to a row."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import published
import pytest
import rows
from multimesh.planner import footprint

RUNS = rows.RUNS / "dense.csv"


@functools.cache
def compared() -> tuple[published.Compared, ...]:
    return published.compare(rows.read(*rows.FILES)[0])


@pytest.mark.longer
@pytest.mark.parametrize(("name", "keep", "median", "last"), published.GOALS)
def test_forecasts_are_near(name, keep, median, last):
    found = published.errors(name, [each for each in compared() if keep(each)])
    assert found["median %"] <= median
    assert found["p90 %"] <= last


@pytest.mark.longer
def test_memory_is_near():
    errors = [abs(e) for each in compared() if (e := each.memory_error) is not None]
    assert len(errors) > 30
    assert statistics.median(errors) <= 0.10


@pytest.mark.parametrize(
    ("source", "number", "median", "most"),
    [("bs", 32, 0.04, 0.35), ("nanotron", 11, 0.02, 0.03), ("titan2", 30, 0.06, 0.57)],
)
def test_memory_of_each_source_is_near(source, number, median, most):
    runs = [run for run in rows.read(*rows.FILES)[0] if run.memory and rows.prefix(run) == source]
    errors = [abs(run.held(footprint.peak_bytes(run.model, run.how, run.stack)) / run.memory - 1) for run in runs]
    assert len(errors) >= number
    assert statistics.median(errors) <= median
    assert max(errors) <= most


def test_nanotron_ends_a_stage_where_it_exceeds_its_share():
    layers = {run.id: run.how.layers for run in rows.read(RUNS)[0] if rows.prefix(run) == "nanotron"}
    assert layers["nanotron-011"] == (7, 7, 6, 4)
    assert layers["nanotron-004"] == (4, 3, 3, 4, 3, 3, 4, 0)
    assert sum(layers["nanotron-006"]) == 24
    assert layers["nanotron-005"] == ()


def test_what_ran_fits():
    used = [each.step.bytes / each.run.device.memory for each in compared()]
    assert max(used) <= 1.1
    assert statistics.mean(share > 1 for share in used) <= 0.04


def test_models_with_experts_are_read_or_refused_with_a_reason():
    runs, others = rows.read(rows.RUNS / "moe.csv")
    assert {run.model.experts > 0 for run in runs} == {True}
    assert len(runs) > 50
    known = ("experts are not stated", "a fault that its source knows")
    assert {text for text in others.values() if not any(word in text for word in known)} <= {
        "not stated: mbs, tp",
        "configuration: ep 64 x etp 1 does not divide the 32 devices of a submesh",
    }


def test_every_run_of_other_devices_has_a_forecast():
    runs, others = rows.read(rows.RUNS / "others.csv")
    assert not others
    assert {run.device.name for run in runs} == {"tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7", "mi350x", "mi355x", "b300"}
    slices = [run for run in runs if run.device.name == "tpu-v5e"]
    assert {run.device.domain for run in slices} == {256}
    assert {run.how.dp for run in slices} == {1, 2, 4, 8, 16, 32}
    assert all(run.how.saved or run.how.recompute != "full" or run.model.experts for run in runs)


def test_most_rows_that_are_complete_have_a_forecast():
    runs, others = rows.read(*rows.FILES)
    complete = len(runs) + sum("not stated" not in reason for reason in others.values())
    assert len(runs) >= 0.85 * complete


def test_the_best_by_forecast_is_the_best_measured():
    """BigScience's 181B on 384 GPUs, after their fix of NUMA: tp, pp, dp and the microbatch vary."""
    block = [each for each in compared() if each.run.id in {f"bs-{number:03d}" for number in range(57, 74)}]
    found = published.ranking("bs", block)
    assert found.number >= 8
    assert found.spearman >= 0.85
    assert found.behind <= 0.03


def test_the_script_prints_one_json_object(tmp_path: Path):
    few = tmp_path / "few.csv"
    few.write_text("\n".join(RUNS.read_text(encoding="utf-8").splitlines()[:6]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, published.__file__, "--runs", str(few), "--json"], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)["runs"]
    assert {"id", "forecast_s", "measured_s", "forecast_gb"} <= set(found[0])
    assert all(0.5 < run["forecast_s"] / run["measured_s"] < 2 for run in found)
