"""Rates of devices, stages and transfers, and a training step: each small, and compared with what is expected."""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import multimesh as mm
from multimesh.commands.check.steps import ABSENT, FAILED, OK, Bench, Row
from multimesh.core import _compat
from multimesh.errors import DisagreementError, MissingPartError, MultiMeshError
from multimesh.processes.arrays import place
from multimesh.processes.liveness import name_process
from multimesh.runtime.actions import owner

SLOW, SLOW_CPU = 0.85, 0.4  # of the usual device: one that is slower than that is named; CPU devices share cores
SMALL = 1024  # floats that each device sends
WIDTH, TOLERANCE = 32, 1e-4  # of the training step


def seconds_of(run: Callable[[], Any], turns: int, repeats: int) -> float:
    """Return the seconds of one call: the least mean of ``repeats`` calls in flight, over some turns."""
    jax.block_until_ready(run())
    means = []
    for _ in range(turns):
        start = time.perf_counter()
        results = [run() for _ in range(repeats)]
        jax.block_until_ready(results)
        means.append((time.perf_counter() - start) / repeats)
    return min(means)


def products(bench: Bench) -> list[float]:
    """Return the operations a second of a product on each device of this process."""
    size, dtype = (4096 if bench.quick else 8192, jnp.bfloat16) if bench.accelerated else (512, jnp.float32)
    rates = []
    for device in jax.local_devices():
        bench.doing = f"a product of {size} x {size} on {device}"
        with jax.default_device(device):
            run = partial(jax.jit(lambda a: a @ a), jnp.full((size, size), 1 / size, dtype))
            # long enough to be interrupted, where others use the device
            rates.append(2 * size**3 / seconds_of(run, 3, 10 if bench.accelerated else 20))
    return rates


def judge_products(bench: Bench, every: Sequence[Sequence[float]]) -> Row:
    """Name the slowest device if it is far slower than the usual one. CPU devices of a process share its cores."""
    rates_of = every if bench.accelerated else [[max(rates)] for rates in every]
    places = [(rate, rank, number) for rank, rates in enumerate(rates_of) for number, rate in enumerate(rates)]
    least, rank, number = min(places)
    median = statistics.median_high(rate for rate, _, _ in places)
    text = f"{median / 1e12:.3g} TFLOP/s; slowest {least / 1e12:.3g}, device {number} of {name_process(rank)}"
    if least < (SLOW if bench.accelerated else SLOW_CPU) * median:
        remedy = "a pipeline is as slow as its slowest device: see the row of GPUs, what else runs there, its cooling"
        return Row(FAILED, text, remedy, MissingPartError.exit_code, [rank])
    return Row(OK, text)


def collectives(bench: Bench) -> dict[str, float]:
    """Return the bytes a second of a large sum over the devices of each stage of this process."""
    rates = {}
    count = (2**24 if bench.accelerated else 2**18) // (4 if bench.quick else 1)
    for stage in filter(bench.is_here, range(bench.stages if bench.per_stage > 1 else 0)):
        bench.doing = f"a sum over the {bench.per_stage} devices of stage {stage}"
        rows, replicated = (
            NamedSharding(bench.meshes[stage], spec) for spec in (PartitionSpec("data"), PartitionSpec())
        )
        x = jax.jit(lambda: jnp.ones((bench.per_stage, count), jnp.float32), out_shardings=rows)()
        run = partial(jax.jit(lambda x: x.sum(0), out_shardings=replicated), x)
        crossed = 2 * (bench.per_stage - 1) / bench.per_stage * 4 * count
        rates[str(stage)] = crossed / seconds_of(run, 2 if bench.quick else 5, 2)
    return rates


def judge_collectives(bench: Bench, every: Sequence[dict[str, float]]) -> Row:
    """Name the stage whose sums are slowest."""
    rates = [(rate, stage) for answer in every for stage, rate in answer.items()]
    if not rates:
        return Row(ABSENT, "a stage has one device")
    least, stage = min(rates)
    return Row(OK, f"sums of {least / 1e9:.3g} GB/s, slowest in stage {stage}")


def _receive(*arrays: jax.Array) -> jax.Array:
    return jnp.stack([jnp.stack([x.min(1), x.max(1)]) for x in arrays])


def _work_and_receive(x: jax.Array, *arrays: jax.Array) -> Any:
    """Run products, and a sum over the devices of the stage, beside what arrives."""
    square = jnp.tanh(x[:, : 2**14].reshape(-1, 128, 128))
    return _receive(*arrays), (square @ square).sum() + x.sum()


def make_exchange(bench: Bench, ways: Sequence[tuple[int, int]], count: int, busy: bool = False) -> Callable[[], Any]:
    """Return a function that sends ``count`` floats of each device from stage to stage, by a plan that all call.

    ``ways`` are pairs of stages, source and target. All stages compute meanwhile if they are ``busy``. Every fourth
    call compares what arrived with what was sent.
    """
    layouts = [NamedSharding(mesh, PartitionSpec("data")) for mesh in bench.meshes]
    rows = {s: np.broadcast_to(np.float32(s), (bench.per_stage, count)) for way in ways for s in way}
    arrays = {stage: place(x, layouts[stage]) for stage, x in rows.items()}
    sources = {target: [source for source, end in ways if end == target] for _, target in ways}

    def send(arrays: dict[int, jax.Array]) -> dict[int, Any]:
        results = {}
        for target, stages in sources.items():
            task = mm.task(_work_and_receive if busy else _receive, f"stage{target}", mesh=bench.meshes[target])
            results[target] = task(*([arrays[target]] if busy else []), *(arrays[stage] for stage in stages))
        return results

    jitted, calls = mm.jit(send), itertools.count()

    def run() -> Any:
        received = {target: jax.tree.leaves(results)[0] for target, results in jitted(arrays).items()}
        if next(calls) % 4:
            return received
        for target, x in received.items():
            expected = np.broadcast_to(np.array(sources[target], np.float32)[:, None, None], x.shape)
            if any((np.asarray(shard.data) != expected[shard.index]).any() for shard in x.addressable_shards):
                raise MultiMeshError(f"other values arrived at stage {target} than stages {sources[target]} sent")
        return received

    return run


def measure_transfers(transport: str, bench: Bench) -> Any:
    """Measure each pair of neighboring stages by a transport, both ways; then all pairs, while all stages compute.

    Return seconds and rate of each pair whose first stage is here, and what a turn beside kernels took; or why there is
    nothing to try.
    """
    if bench.stages < 2:
        return "there is one stage"
    one_process = len({owner(device) for mesh in bench.meshes for device in mesh.devices.flat}) == 1
    if one_process and transport == "pull":
        return "one process has all stages"
    if not one_process and transport == "device_put" and not bench.accelerated and not _compat.device_put_address():
        return "on CPUs it needs jax_cross_host_transfer_socket_address"
    turns, large = 20 if bench.quick else 1000, (2**24 if bench.accelerated else 2**20) // (4 if bench.quick else 1)
    pairs: dict[str, tuple[float, float]] = {}
    last = bench.stages - 1
    rounds = [[*range(0, last, 2)], [*range(1, last, 2)], [last] if last > 1 else []]  # pairs that share no stage
    with mm.context(transport=transport), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"arrays\[\d+\] ")  # moving its arguments is its purpose
        for stages in filter(None, rounds):
            ends = [(stage, (stage + 1) % bench.stages) for stage in stages]
            bench.doing = f"transfers by {transport} between stages {', '.join(f'{a} and {b}' for a, b in ends[:3])}"
            ways = [*ends, *((b, a) for a, b in ends)]
            seconds = seconds_of(make_exchange(bench, ways, SMALL), turns, 1)
            bench.doing += f", of {4 * large >> 20} MiB"
            rate = 4 * large / seconds_of(make_exchange(bench, ways, large), 2, 3 if bench.quick else 10)
            pairs |= {str(stage): (seconds, rate) for stage in stages if bench.is_here(stage)}
        bench.doing = f"transfers by {transport} beside kernels and sums"
        ways = [(a, b) for a in range(bench.stages) for b in {(a - 1) % bench.stages, (a + 1) % bench.stages}]
        turn = seconds_of(make_exchange(bench, ways, 2**16, busy=True), 1, turns)
    return {"pairs": pairs, "turn": turn, "turns": turns}


def judge_transfers(bench: Bench, every: Sequence[Any]) -> Row:
    """Name the slowest pair of stages."""
    if isinstance(every[0], str):
        return Row(ABSENT, every[0])
    pairs = {int(stage): pair for answer in every for stage, pair in answer["pairs"].items()}
    least, stage = min((rate, stage) for stage, (_, rate) in pairs.items())
    ends = (bench.meshes[at % bench.stages].devices.flat[0] for at in (stage, stage + 1))
    text = (
        f"{len(pairs)} pair{'s' * (len(pairs) > 1)} of stages, both ways: "
        f"{max(seconds for seconds, _ in pairs.values()) * 1e6:.0f} us small; {least / 1e9:.3g} GB/s large, slowest "
        f"between {' and '.join(name_process(owner(device)) for device in ends)}; {every[0]['turns']} turns of all "
        f"beside kernels, {max(answer['turn'] for answer in every) * 1e3:.1f} ms each"
    )
    return Row(OK, text)


def try_training(bench: Bench) -> Any:
    """Run a step of 1F1B over all stages; return how far it is from one program, relatively, and its seconds."""
    if bench.stages < 2:
        return "there is one stage"
    bench.doing, start = "compiling a plan of 1f1b", time.monotonic()
    draw = np.random.default_rng(0).normal
    weights = [(draw(size=(WIDTH, WIDTH)) / 6).astype(np.float32) for _ in bench.meshes]
    size = 2 * bench.per_stage
    x = draw(size=(size * 2 * bench.stages, WIDTH)).astype(np.float32)

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return mm.with_sharding_constraint(jnp.tanh(x @ w), PartitionSpec("data"))

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, (mesh, w) in enumerate(zip(bench.meshes, weights, strict=True)):
            last = number == bench.stages - 1
            x = mm.task((lambda w, x: (layer(w, x) ** 2).sum()) if last else layer, f"stage{number}", mesh=mesh)(w, x)
        return x

    with mm.context(ignore_transforms=True):
        expected = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(weights, x))
    step = mm.jit(mm.microbatch(jax.value_and_grad(loss), argnum=1, size=size, schedule="1f1b"))
    jax.block_until_ready(step(weights, x))
    bench.doing = "running a plan of 1f1b"
    pairs = zip(*map(jax.tree.leaves, (mm.distributed.gather(step(weights, x)), expected)), strict=True)
    far = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return {"far": far, "seconds": time.monotonic() - start}


def judge_training(bench: Bench, every: Sequence[Any]) -> Row:
    """Compare the step with one program."""
    if isinstance(every[0], str):
        return Row(ABSENT, every[0])
    far, seconds = every[0]["far"], max(answer["seconds"] for answer in every)
    text = f"1f1b: loss and gradients differ from one program by at most {far:.1e}; {seconds:.1f} s"
    if not far <= TOLERANCE:  # NaN too
        remedy = "report it with --report; the products or transfers of a device may be wrong"
        return Row(FAILED, text, remedy, DisagreementError.exit_code)
    return Row(OK, text)
