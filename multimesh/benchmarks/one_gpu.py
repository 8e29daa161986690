"""A pipeline on one GPU that its processes share, a stage in each, against one program on that GPU.

    multimesh/benchmarks/one_gpu.py           four processes on the first GPU; two minutes
    multimesh/benchmarks/one_gpu.py --cpu     the same on CPU devices

NCCL refuses two processes on one GPU, so arrays go by ``transport="pull"``. The step is that of ``workload.py``, with
matrix products in full precision. Both start from the same parameters and train for a few steps: the table has the
largest relative difference of their losses. The stages share one GPU, so the times say nothing of several.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import report

SCHEDULES = ("1f1b", "zb-h1", "prefetch-wavefront")


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--cpu", action="store_true", help="rehearse on CPU devices")
    options.add_argument("--processes", type=int, default=4, help="stages, each in a process (default 4)")
    options.add_argument("--width", type=int, default=64, help="of the model (default 64)")
    options.add_argument("--sequence", type=int, default=64, help="tokens of a sequence (default 64)")
    options.add_argument("--steps", type=int, default=4, help="steps of each program (default 4)")
    options.add_argument("--svg", metavar="FILE", help="draw a measured step of 1f1b")
    args = options.parse_args()
    if "MULTIMESH_PROCESS" not in os.environ:
        start(args.processes, on_cpu=args.cpu)
    rows = measure(args)
    if os.environ["MULTIMESH_PROCESS"] == "0":
        report.show({"": rows}, args.json)


def start(processes: int, *, on_cpu: bool) -> NoReturn:
    """Run this script once for each stage, in place of this process."""
    env = os.environ | {"MULTIMESH_TRANSPORT": "pull"}
    if on_cpu:
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    else:
        # Several processes that try kernels at once would measure each other.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
        env |= {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": "0", "XLA_FLAGS": flags}
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    spawn = [sys.executable, "-m", "multimesh", "spawn", "-n", str(processes)]
    os.execve(sys.executable, [*spawn, *sys.argv], env)


def measure(args: argparse.Namespace) -> list[report.Row]:
    """Be the process of one stage; train with each schedule and with one program."""
    import jax

    import multimesh as mm

    job = mm.distributed.initialize()
    with jax.default_matmul_precision("highest"):
        return compared(args, job.rank)


def compared(args: argparse.Namespace, rank: int) -> list[report.Row]:
    """Losses and times of the pipelines beside those of one program in this process."""
    import jax
    import numpy as np
    from workload import Size, batch, init, loss_fn, train_step

    import multimesh as mm

    count = args.processes
    size = Size("one", width=args.width, sequence=args.sequence, stages=count, tensor=1, devices=count)
    data, params = batch(size), init(size)
    meshes = [jax.sharding.Mesh(np.array([device]), "data") for device in jax.devices()]
    rows = []

    def pipeline(schedule: str) -> Any:
        loss = loss_fn(size, lambda s, fn: mm.task(fn, f"stage{s}", mesh=meshes[s]))
        grads = mm.microbatch(jax.value_and_grad(loss), size=size.rows, argnum=1, schedule=schedule)
        return mm.jit(train_step(grads, size.microbatches), donate_argnums=(0, 1))

    single, alone = trained(jax.jit(train_step(accumulated(size), size.microbatches)), params, data, args.steps, float)
    for schedule in SCHEDULES:
        step = pipeline(schedule)
        losses, seconds = trained(step, params, data, args.steps, lambda loss: float(mm.distributed.gather(loss)))
        gaps = [abs(ours - its) / its for ours, its in zip(losses, single, strict=True)]
        row = {"schedule": schedule, "processes": count, "device": jax.devices()[0].device_kind}
        rows.append(row | {"step ms": 1e3 * seconds, "one program ms": 1e3 * alone, "losses differ by": max(gaps)})
        if args.svg and schedule == "1f1b":
            profile = step.profile(params, zeros(params), data)
            if rank == 0:
                profile.measured.to_svg(args.svg)
    return rows


def trained(
    step: Callable[..., Any], params: Any, data: Any, steps: int, read: Callable[[Any], float]
) -> tuple[list[float], float]:
    """Losses of the first steps, and the median seconds of a step after the first."""
    state, losses, times = zeros(params), [], []
    for _ in range(steps):
        start = time.perf_counter()
        params, state, loss = step(params, state, data)
        losses.append(read(loss))
        times.append(time.perf_counter() - start)
    return losses, statistics.median(times[1:])


def zeros(params: Any) -> Any:
    """The state of the optimizer before the first step, on the host."""
    import jax
    import numpy as np
    import optax

    def nothing() -> Any:
        return jax.tree.map(np.zeros_like, params)

    return optax.ScaleByAdamState(np.int32(0), nothing(), nothing()), optax.EmptyState()


def accumulated(size: Any) -> Callable[..., Any]:
    """Sums of losses and gradients over the microbatches, one after another, in one program."""
    import jax
    from workload import unmarked

    def grads(params: Any, data: Any) -> Any:
        pieces = jax.tree.map(lambda x: x.reshape(size.microbatches, size.rows, *x.shape[1:]), data)
        first = jax.value_and_grad(unmarked)(params, jax.tree.map(lambda x: x[0], pieces))

        def one(total: Any, piece: Any) -> tuple[Any, None]:
            return jax.tree.map(jax.numpy.add, total, jax.value_and_grad(unmarked)(params, piece)), None

        return jax.lax.scan(one, first, jax.tree.map(lambda x: x[1:], pieces))[0]

    return grads


if __name__ == "__main__":
    main()
