"""Rates of devices and stages: products, copies, collectives of a stage, programs of all stages at once."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from multimesh.check.steps import Bench
from multimesh.check.verdicts import ABSENT, NOTE, OK, Row, make_failure
from multimesh.errors import MissingPartError
from multimesh.hardware import devices as known
from multimesh.processes.initialize import name_process

SLOW, SLOW_CPU = 0.85, 0.4  # of the usual device: one that is slower than that is named; CPU devices share cores
BELOW = 0.6  # of what the table expects: less is worth a look
FLIGHT = 3  # programs in flight


def look_up_device(kind: str) -> known.Device | None:
    """Return the device of the table whose name a device's kind has, such as "NVIDIA H100 80GB HBM3"; None if none."""
    words = re.findall(r"[a-z0-9]+", kind.lower())
    names = [name for name in known.device_names() if name in words]
    if "40gb" in words and names == ["a100"]:
        names = ["a100-40gb"]
    return known.device(max(names, key=len)) if names else None


def look_up_rate(bench: Bench, *, near: bool) -> tuple[float, str]:
    """Return the bytes a second that the link or the network of the devices reaches, and words for it; 0 if unknown."""
    table = look_up_device(bench.meshes[0].devices.flat[0].device_kind)
    if table is None:
        return 0.0, ""
    rate = table.link * table.rates.link if near else table.network * table.rates.network
    return rate, f"{rate / 1e9:.0f} GB/s by the {'link' if near else 'network'} of {table.name}"


def seconds_of(run: Callable[[], Any], turns: int, repeats: int) -> float:
    """Return the seconds of one call: the least mean of ``repeats`` calls in flight, over some turns."""
    jax.block_until_ready(run())
    found = []
    for _ in range(turns):
        begun = time.perf_counter()
        for _ in range(repeats):
            last = run()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - begun) / repeats)
    return min(found)


def products(bench: Bench) -> list[dict[str, float]]:
    """Return operations a second of a product, and bytes a second of a copy, of each device of this process."""
    fast = bench.accelerated
    size = (4096 if bench.quick else 8192) if fast else 512
    count = 2**27 if fast else 2**21
    dtype = jnp.bfloat16 if fast else jnp.float32
    found = []
    for device in jax.local_devices():
        bench.doing = f"a product of {size} x {size} on {device}"
        with jax.default_device(device):
            square, line = jnp.full((size, size), 1 / size, dtype), jnp.ones(count, jnp.float32)
            product, copy = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1)
            turns, repeats = (3, 10 if fast else 20)  # long enough to be interrupted, where others use the device
            product_s = seconds_of(partial(product, square), turns, repeats)
            copy_s = seconds_of(partial(copy, line), turns, repeats)
        found.append({"product": 2 * size**3 / product_s, "copy": 8 * count / copy_s})
    return found


def judge_products(bench: Bench, every: Sequence[Sequence[dict[str, float]]]) -> list[Row]:
    """Name the slowest device if it is far slower than the usual one. CPU devices of a process share its cores."""
    if not bench.accelerated:
        every = [[max(devices, key=lambda each: each["product"])] for devices in every]
    rates = [each["product"] for devices in every for each in devices]
    places = [(rank, number) for rank, devices in enumerate(every) for number in range(len(devices))]
    usual, least = statistics.median_high(rates), min(rates)
    rank, number = places[rates.index(least)]
    copies = min(each["copy"] for devices in every for each in devices)
    device = bench.meshes[0].devices.flat[0]
    table = look_up_device(device.device_kind)
    text = f"{usual / 1e12:.3g} TFLOP/s; slowest {least / 1e12:.3g}, device {number} of {name_process(rank)}"
    wanted = f"{table.matmul_rate('bf16') / 1e12:.0f} of {table.name}" if table else ""
    numbers = {"product": least, "copy": copies}
    if least < (SLOW if bench.accelerated else SLOW_CPU) * usual:
        remedy = "a pipeline is as slow as its slowest device: see the rows of GPUs, what else runs there, its cooling"
        more = {"expected": wanted, "numbers": numbers, "processes": [rank]}
        return [make_failure("products", text, remedy, MissingPartError.exit_code, **more)]
    low = table is not None and usual < BELOW * table.matmul_rate("bf16")
    remedy = "clocks, power limits (nvidia-smi -q -d PERFORMANCE), or others on the same GPUs" if low else ""
    return [Row("products", NOTE if low else OK, text, wanted, remedy, numbers=numbers)]


def make_sum(bench: Bench, stage: int, count: int) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return a function that sums over the devices of a stage, and its argument: ``count`` floats on each device."""
    mesh = bench.meshes[stage]
    rows_, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    make = jax.jit(lambda: jnp.ones((mesh.size, count), jnp.float32), out_shardings=rows_)
    return jax.jit(lambda x: x.sum(0), out_shardings=whole), make()


def collectives(bench: Bench) -> dict[str, dict[str, float]]:
    """Return seconds of a small sum and bytes a second of a large one, of each stage of this process."""
    found = {}
    for stage in bench.own_stages() if bench.per_stage > 1 else ():
        bench.doing = f"a sum over the {bench.per_stage} devices of stage {stage}"
        count = (2**24 if bench.accelerated else 2**18) // (4 if bench.quick else 1)
        small, large = make_sum(bench, stage, 256), make_sum(bench, stage, count)
        turns = 2 if bench.quick else 5
        small_s = seconds_of(partial(small[0], small[1]), turns, 4)
        large_s = seconds_of(partial(large[0], large[1]), turns, 2)
        crossed = 2 * (bench.per_stage - 1) / bench.per_stage * 4 * count
        found[str(stage)] = {"seconds": small_s, "rate": crossed / large_s}
    return found


def judge_collectives(bench: Bench, every: Sequence[dict[str, dict[str, float]]]) -> list[Row]:
    """Compare the stages with each other and with the link of the table."""
    stages = {int(stage): each for found in every for stage, each in found.items()}
    if not stages:
        return [Row("collectives in stages", ABSENT, "a stage has one device")]
    slowest = min(stages, key=lambda stage: stages[stage]["rate"])
    least = stages[slowest]["rate"]
    text = (
        f"{max(each['seconds'] for each in stages.values()) * 1e6:.0f} us small; {least / 1e9:.3g} GB/s large, "
        f"slowest in stage {slowest}"
    )
    near = all(len({bench.job.hosts[d.process_index] for d in mesh.devices.flat}) == 1 for mesh in bench.meshes)
    rate, wanted = look_up_rate(bench, near=near)
    low = least < BELOW * rate
    remedy = "NCCL_DEBUG=INFO says which way it takes; nccl-tests measure it alone" if low else ""
    return [Row("collectives in stages", NOTE if low else OK, text, wanted, remedy, numbers={"collective": least})]


def programs(bench: Bench) -> dict[str, float]:
    """Compile other programs on each stage at once, with a plain ``jax.jit``, and run kernels of different sizes."""
    begun, flying = time.monotonic(), []
    for stage in bench.own_stages():
        bench.doing = f"compiling a program that only stage {stage} has, with jax.jit"
        total, x = make_sum(bench, stage, 1024 * (stage + 1))
        program = jax.jit(lambda x, stage=stage, total=total: jnp.tanh(total(x * (stage + 1))) * 2)
        flying.append(program(x))
        bench.doing = f"running {FLIGHT} programs of stage {stage} in flight"
        flying += [program(x) for _ in range(FLIGHT)]
    jax.block_until_ready(flying)
    return {"seconds": time.monotonic() - begun}


def judge_programs(bench: Bench, every: Sequence[dict[str, float]]) -> list[Row]:
    """Say how long the last process needed."""
    slowest = max(each["seconds"] for each in every)
    return [Row("a program of its own on each stage", OK, f"compiled at once, {FLIGHT} in flight, {slowest:.1f} s")]
