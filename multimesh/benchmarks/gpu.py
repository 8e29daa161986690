"""All that a machine with GPUs can tell of MultiMesh, in one table: each piece of work against its single program.

    multimesh/benchmarks/gpu.py             on the visible GPUs, or a power of two of them; ten minutes on one
    multimesh/benchmarks/gpu.py --cpu       the same on eight virtual CPU devices, with small sizes: a rehearsal

It trains MaxText (``validate-gpu.sh``, then a pipeline with a stage on each GPU against one program), runs a training
step of a transformer as a pipeline and as one SPMD program, and solves and transforms sharded arrays. Times are wall
times until the result is there, of contenders that take turns. The table also goes to ``build/gpu.md``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before jax is imported, and before what would choose virtual CPU devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu" if "--cpu" in sys.argv else "cuda")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8" if "--cpu" in sys.argv else "")

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.scipy.linalg import cho_factor, cho_solve
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from step import Training
from workload import Size, pipeline, spmd

import multimesh as mm

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = "--cpu" in sys.argv


def seconds(ours: Callable[[], Any], single: Callable[[], Any], runs: int) -> tuple[float, float]:
    """Median wall seconds of both, which take turns, after a round that is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs + 1):
        for call, seconds_of in zip((ours, single), times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds_of.append(time.perf_counter() - start)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def row(work: str, ours: float, single: float | None = None, difference: float | None = None) -> report.Row:
    """One line of the table; what was not measured is a dash."""
    return {
        "work": work,
        "ours ms": 1e3 * ours,
        "single program ms": "-" if single is None else 1e3 * single,
        "ratio": "-" if single is None else ours / single,
        "largest relative difference": "-" if difference is None else difference,
    }


def training(size: Size, schedule: str, runs: int) -> report.Row:
    """A step of a transformer, as a pipeline and as one SPMD program.

    Their losses are compared after an update, in full precision: TF32 and many updates of adam make rounding large.
    """
    with jax.default_matmul_precision("highest"):
        many, one = Training(*pipeline(size, schedule)), Training(*spmd(size))
        for _ in range(2):
            many()
            one()
    difference = abs(float(many.loss) - float(one.loss)) / float(one.loss)
    times = seconds(Training(*pipeline(size, schedule)), Training(*spmd(size)), runs)
    return row(f"step, d {size.width}, {schedule}, pp {size.stages}", *times, difference)


def numerics(count: int, order: int, edge: int, runs: int) -> list[report.Row]:
    """A Cholesky solve and two transforms over several devices against one of them."""
    devices = jax.devices()[:count]
    mesh, rng = Mesh(np.array(devices), ("x",)), np.random.default_rng(0)
    spread = NamedSharding(mesh, P("x"))

    def compare(work: str, ours: Callable[[], Any], single: Callable[[], Any]) -> report.Row:
        result, reference = np.asarray(ours()), np.asarray(single())
        return row(work, *seconds(ours, single, runs), float(np.max(abs(result - reference)) / np.max(abs(reference))))

    a = rng.standard_normal((order, order), dtype=np.float32)
    a = a @ a.T / order + np.eye(order, dtype=np.float32)
    b = rng.standard_normal((order, 1), dtype=np.float32)
    matrix, right = jax.device_put((a, b), devices[0])
    shards, copies = jax.device_put(a, spread), jax.device_put(b, NamedSharding(mesh, P()))
    tile = max(order // len(devices) // 16, 1)
    solve = jax.jit(lambda a, b: mm.linalg.potrs(a, b, tile, mesh, P("x")))
    solve_on_one = jax.jit(lambda a, b: cho_solve(cho_factor(a), b))
    rows = [compare(f"potrs, N {order}", lambda: solve(shards, copies), lambda: solve_on_one(matrix, right))]

    cube = (rng.standard_normal((edge,) * 3) + 1j * rng.standard_normal((edge,) * 3)).astype(np.complex64)
    for name, values, ours, theirs in (
        ("fftn", cube, mm.fft.fftn, jnp.fft.fftn),
        ("rfftn", cube.real, mm.fft.rfftn, jnp.fft.rfftn),
    ):
        run, x = functools.partial(ours, jax.device_put(values, spread)), jax.device_put(values, devices[0])
        rows.append(compare(f"{name}, {edge}^3", run, functools.partial(jax.jit(theirs), x)))
    return rows


def maxtext(count: int) -> list[report.Row]:
    """MaxText trained as one program, and as a pipeline with a stage on each device against that."""
    launcher = [sys.executable, str(ROOT / "maxtext" / "run.py"), "dtype=float32"]
    devices = ["--cpus" if ON_CPU else "--gpus", str(count)]
    small = ["--num-steps", "5", "--attention", "dot_product", "--sequence-length", "128", "--batch-size", str(count)]
    script = "validate-cpu.sh" if ON_CPU else "validate-gpu.sh"
    commands = {f"MaxText: {script}": [str(ROOT / "maxtext" / script)]}
    if count > 1:
        sizes = ["--pp", str(count), "--num-layers", str(count), *small]
        commands["MaxText: run.py --pp"] = [*launcher, *devices, *sizes, "--verify"]
    rows = []
    for work, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.run([*command, "--output", f"{folder}/out", "--json"], capture_output=True, text=True)
        if process.returncode:
            message = (process.stderr.strip().splitlines() or ["no word"])[-1]
            sys.exit(f"error: {work} failed ({process.returncode}): {message}")
        rows.append(verified(work, json.loads(process.stdout)))
    return rows


def straight_line(compiled: Any, args: Sequence[Any]) -> Callable[..., list[Any]]:
    """The same calls of kernels and transfers, written out as a function without slots, loops or decisions."""
    names: dict[str, Any] = {"put": jax.device_put}
    runner = compiled.runner
    layouts = compiled.plan.layouts
    moves = [slot for arg, slot in compiled.plan.inputs if args[arg].sharding != layouts[slot]]
    lines = ["def bare(args):"]
    lines += [f"    v{slot} = args[{arg}]" for arg, slot in compiled.plan.inputs]
    if moves:
        names["elsewhere"] = [layouts[slot] for slot in moves]
        slots = "".join(f"v{slot}, " for slot in moves)
        lines.append(f"    {slots}= put([{slots}], elsewhere)")
    for slot, array in enumerate(runner.blank):
        if array is None:
            continue
        names[f"c{slot}"] = array
        lines.append(f"    v{slot} = c{slot}")
    for n, (call, ins, outs, frees, _) in enumerate(runner.calls):
        names[f"call{n}"] = call
        results = "".join(f"v{o}, " for o in outs)
        assign = f"{results}= " if outs else ""
        lines.append(f"    {assign}call{n}({', '.join(f'v{i}' for i in ins)})")
        lines += [f"    del v{slot}" for slot in frees]
    lines.append(f"    return [{', '.join(f'v{slot}' for _, slot in compiled.plan.outputs)}]")
    exec("\n".join(lines), names)
    return names["bare"]


def own_cost(size: Size, schedule: str, steps: int) -> float:
    """Return microseconds of the calling thread that MultiMesh adds for each kernel, over ``steps`` warm steps."""
    step, args = pipeline(size, schedule)
    training = Training(step, args)
    for _ in range(3):
        jax.block_until_ready(training())
    (compiled,) = step.compiled
    call = straight_line(compiled, jax.tree.leaves((training.params, training.state, training.batch)))
    runs = sum(i.kind == "RUN" for i in compiled.plan.instructions)
    ours, calls = [], []
    for _ in range(steps):
        start = time.thread_time()
        training()
        ours.append(time.thread_time() - start)
        jax.block_until_ready(training.params)
        leaves = jax.tree.leaves((training.params, training.state, training.batch))
        training.params = training.state = None
        start = time.thread_time()
        results = call(leaves)
        calls.append(time.thread_time() - start)
        state = jax.tree.unflatten(compiled.lowered.out_tree, jax.block_until_ready(results))
        training.params, training.state, training.loss = state
    return 1e6 * (statistics.median(ours) - statistics.median(calls)) / runs


def machine(count: int) -> report.Row:
    """Return the machine and software that the figures belong to."""
    device = jax.devices()[0]
    driver = "-"
    if not ON_CPU:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    versions = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    cuda = [f"{name}-cu{number}" for number in (12, 13) for name in ("nvidia-cudnn", "nvidia-nccl")]
    names = [name for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", *cuda) if name in versions]
    return {
        "devices": f"{count} of {len(jax.devices())} x {device.device_kind}",
        "driver": driver,
        "python": platform.python_version(),
        **{name: versions[name] for name in names},
    }


def verified(work: str, document: dict[str, Any]) -> report.Row:
    """The line of a run of MaxText: the last steps, of the run and of its reference where it has one."""

    def pace(which: str) -> float:
        return statistics.median(step["seconds"] for step in document[which][-3:])

    return row(work, pace("steps"), pace("reference") if "reference" in document else None, document.get("difference"))


def table(about: report.Row, rows: list[report.Row]) -> str:
    """The same as Markdown."""
    lines = [", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    for row in rows:
        lines.append(f"| {' | '.join(f'{v:.3g}' if isinstance(v, float) else str(v) for v in row.values())} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--cpu", action="store_true", help="rehearse on virtual CPU devices")
    options.add_argument("--runs", type=int, default=10, help="timed runs of each contender (default 10)")
    args = options.parse_args()
    try:
        count = 1 << (len(jax.devices()).bit_length() - 1)
    except (RuntimeError, AssertionError) as error:  # JAX asserts where its plugin finds no driver
        sys.exit(f"error: JAX sees no GPU ({str(error) or 'no driver'}); ./bootstrap.sh --group cuda12, or give --cpu")
    shape = {"width": 64, "sequence": 32} if args.cpu else {"width": 1024, "sequence": 512}
    layers, rows = (max(least, count) for least in (8, 4))
    size = Size("gpu", stages=count, tensor=1, devices=count, layers=layers, rows=rows, **shape)
    lines = maxtext(count)
    schedules = ("1f1b", "zb-h1") if count > 1 else ("1f1b",)
    lines += [training(size, schedule, args.runs) for schedule in schedules]
    lines += numerics(count, *((1024, 64) if args.cpu else (8192, 256)), args.runs)
    about = machine(count)
    if count > 1:
        costs = [own_cost(size, schedule, args.runs) for schedule in schedules]
        about |= {"the runtime's own cost per kernel": f"{max(costs):.0f} us"}
    out = ROOT / "build" / "gpu.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text(table(about, lines), encoding="utf-8")
    report.show({"machine": [about], "work": lines} if args.json else {"": lines}, args.json)
    if not args.json:
        print("\n".join(f"{name}: {value}" for name, value in about.items()), f"written to {out}", sep="\n")


if __name__ == "__main__":
    main()
