"""A pipeline on one GPU that its processes share, a stage in each, against one program on that GPU.

    multimesh/benchmarks/one_gpu.py           four processes on the first GPU; two minutes
    multimesh/benchmarks/one_gpu.py --cpu     the same on CPU devices

NCCL refuses two processes on one GPU, so arrays go by ``transport="pull"``. The step is that of ``workload.py``, with
matrix products in full precision. Both start from the same parameters and train for a few steps: the table has the
largest relative difference of their losses. The stages share one GPU, so the times say nothing of several.
"""

from __future__ import annotations

import argparse
import dataclasses
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
    """Be the process of one stage: losses and times of the pipelines beside those of one program in this process."""
    import jax
    from workload import Size, pipeline, spmd

    import multimesh as mm

    job = mm.distributed.initialize()
    size = Size("one", width=args.width, sequence=args.sequence, stages=1, tensor=1, devices=1)
    stages = dataclasses.replace(size, stages=args.processes, devices=args.processes)
    rows = []
    with jax.default_matmul_precision("highest"):
        single, pace = train(*spmd(size, jax.local_devices()), args.steps, float)
        for schedule in SCHEDULES:
            step, arguments = pipeline(stages, schedule, lambda host, where: host)
            losses, seconds = train(step, arguments, args.steps, lambda loss: float(mm.distributed.gather(loss)))
            gaps = [abs(ours - its) / its for ours, its in zip(losses, single, strict=True)]
            row = {"schedule": schedule, "processes": args.processes, "device": jax.devices()[0].device_kind}
            rows.append(row | {"step ms": 1e3 * seconds, "one program ms": 1e3 * pace, "losses differ by": max(gaps)})
            if args.svg and schedule == "1f1b":
                profile = step.profile(*arguments)
                if job.rank == 0:
                    profile.measured.to_svg(args.svg)
    return rows


def train(step: Any, arguments: Any, steps: int, read: Callable[[Any], float]) -> tuple[list[float], float]:
    """Losses of the first steps, and the median seconds of a step after the first."""
    from step import Training

    training, losses, times = Training(step, arguments), [], []
    for _ in range(steps):
        start = time.perf_counter()
        training()
        losses.append(read(training.loss))
        times.append(time.perf_counter() - start)
    return losses, statistics.median(times[1:])


if __name__ == "__main__":
    main()
