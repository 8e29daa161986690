"""Forecasts of memory: sizes, layouts read off constraints, and a pipeline's need against what XLA compiled."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import multimesh as mm
from multimesh import planner
from multimesh_maxtext.command.flags import Flags, parse_size
from multimesh_maxtext.command.forecasting import (
    check_fits,
    forecast_step,
    show_size,
    sum_costs,
    tabulate_needs,
    tabulate_programs,
)
from multimesh_maxtext.command.job import Model, make_job
from multimesh_maxtext.errors import DoesNotFitError
from multimesh_maxtext.trainer.foresight import needs

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("1.5gib", 3 * GIB // 2), ("512MiB", GIB // 2), ("7", 7)],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


def test_sizes_are_shown_with_three_digits():
    assert [show_size(size) for size in (17, 2000, 3 * GIB, 2000 * GIB)] == ["17 B", "1.95 KiB", "3 GiB", "1.95 TiB"]


def need(*sizes: int) -> dict[str, int]:
    """Bytes on each device of a stage."""
    parts = ("parameters", "optimizer", "batch", "gradients", "activations", "workspace")
    return {**dict(zip(parts, sizes, strict=True)), "total": sum(sizes)}


JOB = Flags(pp=2, microbatch_size=2, schedule="zb-h1")
SMALL, WORKSPACE = need(1, 1, 1, 1, 1, 1), need(0, 0, 0, 0, 65 * GIB, 0)


@pytest.mark.parametrize(
    ("flags", "model", "needs", "limit", "remedy"),
    [
        (JOB, {}, need(9 * GIB, 4 * GIB, 0, 0, 0, 0), 12, "more --pp, --tp or --fsdp"),
        (JOB, {}, need(GIB, 0, 0, 0, 12 * GIB, 0), 12, "--remat full or a smaller --microbatch-size or --schedule 1f"),
        (JOB, {}, need(GIB, 0, 0, 0, 0, 12 * GIB), 12, "a smaller --microbatch-size or more --tp"),
        (Flags(pp=2, remat="full", device="h100"), {}, WORKSPACE, 60, r"more --tp or --fbmem 66561 \(MiB\)$"),
        (Flags(pp=2), {"num_experts": 8, "sparse_matmul": True}, WORKSPACE, 60, "sparse_matmul=false"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_and_what_is_not_set_already(
    flags: Flags, model: dict[str, Any], needs: dict[str, int], limit: int, remedy: str
):
    job, total = make_job(flags, Model("", {}, model)), needs["total"]
    check_fits([SMALL, needs], total, job)
    message = rf"^stage 1 needs {total // GIB} GiB on each device \(.*\), but a device has {limit} GiB; use {remedy}"
    with pytest.raises(DoesNotFitError, match=message):
        check_fits([SMALL, needs], limit * GIB, job)


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
    table = needs(lowered, state, lowered.memory_estimate())
    nbytes, rows = 16 * 16 * 4 // 2, 8 * 16 * 4
    assert [(stage["parameters"], stage["optimizer"], stage["gradients"]) for stage in table] == [(nbytes,) * 3] * 2
    assert table[0]["batch"] == pytest.approx(rows, abs=64)  # microbatch numbers
    assert all(2 * stage["total"] == sum(stage.values()) for stage in table)


COSTS = {
    "flops": 8e12,
    "bytes accessed": 2**31,
    "copies": 3.0,
    "bytes copied": 2**20,
    "all-gather": 5.0,
    "all-reduce": 7,
}


def lines_of(table: Table) -> list[str]:
    console = Console(width=200, record=True, quiet=False, file=io.StringIO())
    console.print(table)
    return console.export_text().splitlines()


def test_compiled_stages_are_shown_beside_their_forecast():
    compiled, forecast = ([need(10, 20, 5, 10, 15, size) for size in sizes] for sizes in ((30, 50), (30, 29)))
    heads, first, second = lines_of(tabulate_needs(compiled, forecast, 100))
    assert heads.split()[:2] == ["stage", "gradients"]
    assert first.split()[-4:] == ["+0.0", "%", "yes", "workspace"]
    assert "-19.1 %" in second
    assert "no" in second.split()
    assert lines_of(tabulate_needs(forecast))[0].split()[1:4] == ["parameters", "optimizer", "batch"]


def test_a_step_is_shown_beside_maxtexts_own_programs():
    one = sum_costs([{**COSTS, "peak": 110, "seconds": 12.5}, {**COSTS, "peak": 90, "seconds": 3}])
    assert one["flops"] == 16e12
    heads, operations, collectives, *others = lines_of(
        tabulate_programs({"multimesh": one, "program": sum_costs([one] * 3)})
    )
    assert heads.split() == ["multimesh", "program"]
    assert operations.split()[-2:] == ["1.6e+13", "4.8e+13"]
    assert collectives.split()[-4:] == ["24", "B", "72", "B"]
    assert [line.split()[-4:] for line in others[-2:]] == [["110", "B", "110", "B"], ["12", "s", "12", "s"]]


def test_kernels_slower_than_the_forecast_correct_it(job: Any):
    pipeline = job(["--gpus", "8", "--pp", "2", "--tp", "4", "--forecast", "--device", "h100"])
    slow = COSTS | {"flops": 2 * planner.device("h100").bf16}
    base, slower = forecast_step(pipeline), forecast_step(pipeline, [COSTS, slow])
    assert slower["seconds"] == pytest.approx(2.0)
    assert slower["bound"] == "kernels as compiled"
    tokens = [step["seconds"] * step["tokens_per_second"] for step in (base, slower)]
    assert tokens[0] == pytest.approx(tokens[1])
