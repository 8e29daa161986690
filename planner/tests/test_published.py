"""Forecasts of published runs: nobody here measured them, and no constant belongs to a row."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import fit
import held_out
import published
import pytest
import rows
from multimesh_planner import bands
from multimesh_planner.step import Step, step_time

RUNS = rows.RUNS / "dense.csv"


@functools.cache
def steps() -> dict[rows.Run, Step]:
    return {run: step_time(run.model, run.how, run.device, run.software) for run in rows.read(*rows.FILES)[0]}


@functools.cache
def rankings() -> tuple[published.Ranking, ...]:
    return tuple(published.rankings(steps(), lambda run: steps()[run].seconds))


def table(title: str) -> dict[str, dict[str, float]]:
    return {row["runs"]: row for row in json.loads(held_out.HELD_OUT.read_text(encoding="utf-8"))["tables"][title]}


def test_bands_hold_as_they_are_printed_for_sources_that_no_constant_was_fitted_to():
    inside = {name: row["inside %"] for name, row in table("By class").items()}
    assert {name.split(",")[0] for name in inside} == {"nvidia", "maxtext", "pytorch", "unknown"}
    assert {name: share for name, share in inside.items() if share < 85} == {}


def test_at_most_25_constants_are_fitted_and_three_sources_tell_each():
    sources = json.loads(fit.FITTED.read_text(encoding="utf-8"))["sources"]
    assert len(sources) <= 25
    assert all(len(names) >= 3 for names in sources.values())


def test_the_table_of_bands_is_small_and_of_the_runs():
    assert len((Path(bands.__file__).parent / "bands.csv").read_text().splitlines()) <= 40
    errors = json.loads(held_out.HELD_OUT.read_text(encoding="utf-8"))["errors"]
    assert set(errors) == {run.id for run in rows.read(*rows.FILES)[0]}


def test_nanotron_ends_a_stage_where_it_exceeds_its_share():
    layers = {run.id: run.how.layers for run in rows.read(RUNS)[0] if rows.prefix(run) == "nanotron"}
    assert layers["nanotron-011"] == (7, 7, 6, 4)
    assert layers["nanotron-004"] == (4, 3, 3, 4, 3, 3, 4, 0)
    assert sum(layers["nanotron-006"]) == 24
    assert layers["nanotron-005"] == ()


@pytest.mark.longer
def test_most_of_what_ran_fits():
    shares = [step.bytes / run.device.memory for run, step in steps().items()]
    assert statistics.mean(share > 1 for share in shares) <= 0.1


def test_models_with_experts_are_read_or_refused_with_a_reason():
    runs, others = rows.read(rows.RUNS / "moe.csv")
    assert {run.model.experts > 0 for run in runs} == {True}
    assert len(runs) > 50
    reasons = ("experts are not stated", "a fault that its source knows")
    assert {text for text in others.values() if not any(word in text for word in reasons)} <= {
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


@pytest.mark.parametrize(
    ("source", "spearman", "behind"),
    [("bs", 0.6, 0.0), ("nanotron", 0.5, 0.0), ("mpt", 0.98, 0.011), ("intern", 0.83, 0.006), ("titan2", 0.95, 0.06)],
)
def test_forecasts_rank_the_ways_to_run_a_model(source: str, spearman: float, behind: float):
    """BigScience, nanotron, MosaicML, InternEvo and torchtitan published them; ``behind``: the choice's distance."""
    ranked = [ranking for ranking in rankings() if ranking.name.startswith(source)]
    assert statistics.mean(ranking.spearman for ranking in ranked) >= spearman
    assert statistics.mean(ranking.behind for ranking in ranked) <= behind


def test_the_best_by_forecast_is_the_best_measured():
    """BigScience's 181B on 384 GPUs, after their fix of NUMA: tp, pp, dp and the microbatch vary."""
    after = {f"bs-{number:03d}" for number in range(57, 74)}
    ranking = published.rank("bs", [run for run in steps() if run.id in after], published.forecast_seconds)
    assert ranking.number >= 8
    assert ranking.spearman >= 0.85
    assert ranking.behind <= 0.03


def test_the_script_prints_one_json_object(tmp_path: Path):
    file = tmp_path / "few.csv"
    file.write_text("\n".join(RUNS.read_text(encoding="utf-8").splitlines()[:6]), encoding="utf-8")
    process = subprocess.run(
        [sys.executable, published.__file__, "--runs", str(file), "--json"], check=True, capture_output=True, text=True
    )
    runs = json.loads(process.stdout)["runs"]
    assert {"id", "forecast_s", "measured_s", "forecast_gb"} <= set(runs[0])
    assert all(0.5 < run["forecast_s"] / run["measured_s"] < 2 for run in runs)
