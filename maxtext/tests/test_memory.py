"""Forecasts of memory: sizes, layouts read off constraints, and a pipeline's need against what XLA compiled."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import multimesh as mm
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.forecasting import check_fits, show_size, sum_costs, tabulate_programs, tabulate_stages
from multimesh_maxtext.command.job import Model, make_job
from multimesh_maxtext.command.values import parse_size
from multimesh_maxtext.errors import DoesNotFitError
from multimesh_maxtext.handoff import (
    CompiledStages,
    Forecast,
    HostCalls,
    Need,
    read_forecast,
    write_forecast,
)
from multimesh_maxtext.trainer.foresight import needs

GIB = 2**30
SIZES = Model("", {}, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("1.5gib", 3 * GIB // 2), ("512MiB", GIB // 2), ("7", 7)],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1e9", "3 apples"])
def test_what_is_no_size(text: str):
    with pytest.raises(ArgumentTypeError, match=r".* is no size; write e.g. 80GiB or 24GB"):
        parse_size(text)


def test_sizes_are_shown_with_three_digits():
    assert [show_size(size) for size in (17, 2000, 3 * GIB, 2000 * GIB)] == ["17 B", "1.95 KiB", "3 GiB", "1.95 TiB"]


@pytest.mark.parametrize(
    ("need", "remedy"),
    [
        (Need(9 * GIB, 4 * GIB, 0, 0, 0, 0), "more --pp, --tp or --fsdp"),
        (
            Need(GIB, 0, 0, 0, 12 * GIB, 0),
            "--remat full or a smaller --microbatch-size or --schedule 1f1b",
        ),
        (Need(GIB, 0, 0, 0, 0, 12 * GIB), "a smaller --microbatch-size or more --tp"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(need: Need, remedy: str):
    small, job = Need(1, 1, 1, 1, 1, 1), make_job(Flags(pp=2, microbatch_size=2, schedule="zb-h1"), SIZES)
    check_fits([small, need], 13 * GIB, job)
    with pytest.raises(
        DoesNotFitError, match=rf"stage 1 needs 13 GiB on each device .* a device has 12 GiB; use {remedy}"
    ):
        check_fits([small, need], 12 * GIB, job)


def test_no_remedy_is_set_already():
    job = make_job(Flags(pp=2, remat="full", device="h100"), SIZES)
    with pytest.raises(DoesNotFitError, match=r"; use more --tp or --fbmem 66561 \(MiB\)$"):
        check_fits([Need(0, 0, 0, 0, 65 * GIB, 0)], 60 * GIB, job)
    experts = make_job(Flags(pp=2), Model("", {}, {"num_experts": 8, "sparse_matmul": True}))
    with pytest.raises(DoesNotFitError, match="use sparse_matmul=false"):
        check_fits([Need(0, 0, 0, 0, 65 * GIB, 0)], 60 * GIB, experts)


def test_parameters_and_moments_are_told_apart():
    stages = [Mesh(np.array(devices), ("model",)) for devices in np.array(jax.devices()[:4]).reshape(2, 2)]

    def matrix(number: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(stages[number], P("model")))

    def loss(model: Any, y: jax.Array) -> jax.Array:
        for number in range(2):
            y = mm.task(jnp.matmul, f"layer{number}", mesh=stages[number])(y, model[number])
        return jnp.sum(y**2)

    def step(state: Any, batch: jax.Array) -> Any:
        grads = mm.microbatch(lambda rows: jax.grad(loss)(state["model"], rows), size=2)(batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["optimizer"], grads)
        return {"model": jax.tree.map(lambda w, m: w - m, state["model"], moments), "optimizer": moments}

    model = [matrix(0), matrix(1)]
    state = {"model": model, "optimizer": model}
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(stages[0], P()))
    lowered = mm.jit(step, donate_argnums=0).lower(state, batch)
    found = needs(lowered, state, lowered.memory_estimate())
    held, rows = 16 * 16 * 4 // 2, 8 * 16 * 4
    assert [(need.parameters, need.optimizer, need.gradients) for need in found] == [(held, held, held)] * 2
    assert found[0].batch == pytest.approx(rows, abs=64)  # microbatch numbers


def held(workspace: int) -> Need:
    return Need(10, 20, 5, 10, 15, workspace)


COSTS = {
    "flops": 8e12,
    "bytes accessed": 2**31,
    "copies": 3.0,
    "bytes copied": 2**20,
    "all-gather": 5.0,
    "all-reduce": 7,
}
STAGES = CompiledStages((held(30), held(50)), 9, 4, 12.5, ({"__cublas$lt$matmul": 3}, {}), (COSTS, COSTS))


def test_a_forecast_is_read_as_it_was_written(tmp_path: Path):
    for stages in (None, STAGES):
        written = Forecast((held(1), held(2)), 0.25, (HostCalls(3, 40, 2), HostCalls(4, 50, 2)), stages)
        write_forecast(written, tmp_path / "forecast.json")
        assert read_forecast(tmp_path / "forecast.json") == written


def test_compiled_stages_are_shown_beside_their_forecast():
    console = Console(width=200, record=True)
    console.print(tabulate_stages((held(30), held(29)), STAGES, 100))
    heads, first, second = console.export_text().splitlines()
    assert "off" in heads
    assert first.split()[-4:] == ["+0.0", "%", "yes", "workspace"]
    assert "-19.1 %" in second
    assert "no" in second.split()
    with pytest.raises(DoesNotFitError, match="stage 1 needs 110 B"):
        check_fits(STAGES.needs, 100, make_job(Flags(), SIZES))


def test_a_step_is_shown_beside_maxtexts_own_programs():
    one = sum_costs([{**COSTS, "peak": 110, "seconds": 12.5}, {**COSTS, "peak": 90, "seconds": 3}])
    assert one["flops"] == 16e12
    console = Console(width=80, record=True)
    console.print(tabulate_programs({"multimesh": one, "program": sum_costs([one] * 3)}))
    heads, operations, collectives, *others = console.export_text().splitlines()
    assert heads.split() == ["multimesh", "program"]
    assert operations.split()[-2:] == ["1.6e+13", "4.8e+13"]
    assert collectives.split()[-4:] == ["24", "B", "72", "B"]
    assert [line.split()[-4:] for line in others[-2:]] == [["110", "B", "110", "B"], ["12", "s", "12", "s"]]
