"""Rates of devices and stages: products on each device, sums over the devices of each stage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from multimesh.commands.check.steps import Bench
from multimesh.commands.check.verdicts import ABSENT, OK, Row, make_failure
from multimesh.errors import MissingPartError
from multimesh.processes.initialize import name_process

SLOW, SLOW_CPU = 0.85, 0.4  # of the usual device: one that is slower than that is named; CPU devices share cores


def seconds_of(run: Callable[[], Any], turns: int, repeats: int) -> float:
    """Return the seconds of one call: the least mean of ``repeats`` calls in flight, over some turns."""
    jax.block_until_ready(run())
    means = []
    for _ in range(turns):
        begun = time.perf_counter()
        for _ in range(repeats):
            last = run()
        jax.block_until_ready(last)
        means.append((time.perf_counter() - begun) / repeats)
    return min(means)


def products(bench: Bench) -> list[float]:
    """Return the operations a second of a product on each device of this process."""
    fast = bench.accelerated
    size, dtype = (4096 if bench.quick else 8192, jnp.bfloat16) if fast else (512, jnp.float32)
    rates = []
    for device in jax.local_devices():
        bench.doing = f"a product of {size} x {size} on {device}"
        with jax.default_device(device):
            square, product = jnp.full((size, size), 1 / size, dtype), jax.jit(lambda a: a @ a)
            # long enough to be interrupted, where others use the device
            rates.append(2 * size**3 / seconds_of(partial(product, square), 3, 10 if fast else 20))
    return rates


def judge_products(bench: Bench, every: Sequence[Sequence[float]]) -> list[Row]:
    """Name the slowest device if it is far slower than the usual one. CPU devices of a process share its cores."""
    rates_of = every if bench.accelerated else [[max(rates)] for rates in every]
    places = [(rate, rank, number) for rank, rates in enumerate(rates_of) for number, rate in enumerate(rates)]
    least, rank, number = min(places)
    usual = statistics.median_high(rate for rate, _, _ in places)
    text = f"{usual / 1e12:.3g} TFLOP/s; slowest {least / 1e12:.3g}, device {number} of {name_process(rank)}"
    if least < (SLOW if bench.accelerated else SLOW_CPU) * usual:
        remedy = "a pipeline is as slow as its slowest device: see the rows of GPUs, what else runs there, its cooling"
        return [make_failure("products", text, remedy, MissingPartError.exit_code, processes=[rank])]
    return [Row("products", OK, text)]


def make_sum(bench: Bench, stage: int, count: int) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return a function that sums over the devices of a stage, and its argument: ``count`` floats on each device."""
    mesh = bench.meshes[stage]
    rows, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    make = jax.jit(lambda: jnp.ones((mesh.size, count), jnp.float32), out_shardings=rows)
    return jax.jit(lambda x: x.sum(0), out_shardings=replicated), make()


def collectives(bench: Bench) -> dict[str, float]:
    """Return the bytes a second of a large sum over the devices of each stage of this process."""
    rates = {}
    for stage in bench.own_stages() if bench.per_stage > 1 else ():
        bench.doing = f"a sum over the {bench.per_stage} devices of stage {stage}"
        count = (2**24 if bench.accelerated else 2**18) // (4 if bench.quick else 1)
        total, x = make_sum(bench, stage, count)
        crossed = 2 * (bench.per_stage - 1) / bench.per_stage * 4 * count
        rates[str(stage)] = crossed / seconds_of(partial(total, x), 2 if bench.quick else 5, 2)
    return rates


def judge_collectives(bench: Bench, every: Sequence[dict[str, float]]) -> list[Row]:
    """Name the stage whose sums are slowest."""
    rates = [(rate, stage) for answer in every for stage, rate in answer.items()]
    if not rates:
        return [Row("collectives in stages", ABSENT, "a stage has one device")]
    least, stage = min(rates)
    return [Row("collectives in stages", OK, f"sums of {least / 1e9:.3g} GB/s, slowest in stage {stage}")]
