"""Forecasts of steps from a model's sizes."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from multimesh.errors import UsageError
from multimesh.hardware.devices import device
from multimesh.planner import bands, loop
from multimesh.planner.configuration import Configuration
from multimesh.planner.layer import Times
from multimesh.planner.step import forecast
from multimesh.planner.transformer import Transformer
from multimesh.schedules.costs import StageCosts
from multimesh.schedules.simulate import simulate

from multimesh import schedules

LLAMA = Transformer("llama3-8b", 32, 4096, 14336, 32, 8, 128256)


def how(**fields: object) -> Configuration:
    return Configuration(batch=64, sequence=8192, tp=4, pp=2, sharded="optimizer").changed(**fields)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zb-h1", "zb-v", "eager-1f1b"])
@pytest.mark.parametrize("microbatches", [4, 7, 12, 40])
def test_a_loop_takes_as_long_as_the_simulator_says(name: str, microbatches: int):
    chunks, p = schedules.get(name).usual, 4
    try:
        table = schedules.get(name).table(p, chunks, microbatches, True)
    except UsageError:
        pytest.skip(f"{name} has no table of {microbatches} microbatches")
    stages = [Times(1 + 0.1 * s, 1.5 - 0.05 * s, 0.7 + 0.02 * s) for s in range(p * chunks)]
    times = tuple((s.forward, s.backward, s.weights) for s in stages)
    expected = simulate(table, StageCosts(times, (0.25,) * (len(stages) - 1))).makespan
    assert loop.seconds(name, p, microbatches, stages, 0.25) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v", "eager-1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_a_loop_of_unequal_stages_is_never_shorter_than_its_table(name: str, seed: int):
    draw = random.Random(seed)
    p, chunks, microbatches = draw.choice((2, 4, 6)), schedules.get(name).usual, draw.choice((33, 48, 61))
    stages = [Times(*(draw.uniform(0.5, 1.5) for _ in range(3))) for _ in range(p * chunks)]
    stages[draw.randrange(len(stages))] *= 2.5
    times = tuple((s.forward, s.backward, s.weights) for s in stages)
    table = schedules.get(name).table(p, chunks, microbatches, True)
    whole = simulate(table, StageCosts(times, (0.25,) * (len(stages) - 1))).makespan
    found = loop.seconds(name, p, microbatches, stages, 0.25)
    busiest = microbatches * max(loop.row_seconds(schedules.get(name).placement(p), stages))
    assert found >= busiest * (1 - 1e-9)
    assert loop.least_seconds(name, p, microbatches, stages, 0.25) <= whole * (1 + 1e-9)
    assert whole * (1 - 1e-9) <= found <= 1.03 * whole


def test_no_bubble_is_negative():
    uneven = (1, 1, 1, 20, 1, 1, 1, 6)
    for name in ("eager-1f1b", "1f1b", "zb-h1"):
        step = forecast(LLAMA, how(tp=1, pp=8, batch=128, layers=uneven, schedule=name), "h100")
        assert 0 <= step.bubble < 1


def test_more_of_a_resource_is_never_slower():
    fast = device("h100")
    base = forecast(LLAMA, how(), "h100").seconds
    for name in ("bandwidth", "bf16", "link", "network"):
        better = dataclasses.replace(fast, **{name: 2 * getattr(fast, name)})
        assert forecast(LLAMA, how(), better).seconds <= base


def test_parameters_are_those_of_the_model():
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=0.01)


def test_shares_add_up_to_the_step():
    for pp, recompute in itertools.product((1, 2), ("none", "full")):
        step = forecast(LLAMA, how(pp=pp, recompute=recompute), "h100")
        assert sum(seconds for _, seconds in step.shares) == pytest.approx(step.seconds)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="whole microbatches of 3"):
        how(microbatch=3)
    with pytest.raises(UsageError, match="there is no 'h101'; known are cpu, a100"):
        forecast(LLAMA, how(), "h101")
    with pytest.raises(UsageError, match="device a100 computes no fp8"):
        forecast(LLAMA, how(precision="fp8"), "a100")


@pytest.mark.parametrize(
    ("device", "tp", "band"), [("h100", 8, 0.1), ("gb200", 8, 0.2), ("h100", 1, 0.3), ("h200", 8, 0.3)]
)
def test_a_band_is_narrow_only_where_published_runs_were_compared(device: str, tp: int, band: float):
    model = Transformer("llama3-8b", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocabulary=128256)
    assert bands.band(forecast(model, Configuration(batch=8, sequence=4096, tp=tp), device)) == band
