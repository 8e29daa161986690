"""A pipeline over two processes, each on a core of its own: what is lost to waiting, and what calls and transfers cost.

Two stages of linear layers with tanh, by schedule, take turns with one SPMD program over both processes
(dp 2), with the whole in one process, and with halves: what each process has to compute, without a word between them.
A step takes as long as the slower process. Ratios to halves are that of the minima and that of the medians; ``ideal``
is what an ideal schedule's bubble leaves. The forecast is that of the plan with its measured times.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import report

from multimesh import launch

SCHEDULES = ("1f1b", "eager-1f1b", "gpipe")
LAYERS = 8  # of a stage


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    options.add_argument("--rows", type=int, default=128, help="of a microbatch (default 128)")
    options.add_argument("--width", type=int, default=512, help="of a layer (default 512)")
    options.add_argument("--rounds", type=int, default=11, help="runs of each contender that count (default 11)")
    options.add_argument("--svg", metavar="FILE", help="draw the measured 1f1b run of the first number of microbatches")
    args = options.parse_args()
    rank = os.environ.get("PROCESS")
    if rank is not None:
        measure(args, int(rank), int(os.environ["PROCESSES"]))
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        options.error("two processes need two cores")
    load = os.getloadavg()[0]
    two, (one,) = start_processes(cores[:2], devices=1), start_processes(cores[:1], devices=2)
    cpu = [{"processes": processes, **row} for processes, rows in ((1, one["own"]), (2, two[0]["own"])) for row in rows]
    tables = {f"{m} microbatches (load {load:.1f})": rows for m, rows in two[0]["steps"].items()}
    report.show(tables | {"CPU us of the calling thread of process 0, least; median (times a step)": cpu}, args.json)


def start_processes(cores: Sequence[int], devices: int) -> list[dict[str, Any]]:
    """Run this script in a process for each core; what they print."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "4", "PROCESSES": str(len(cores))}
    env |= launch.job_variables()
    envs = [env | {"PROCESS": str(rank), "CORE": str(core)} for rank, core in enumerate(cores)]
    children = [subprocess.Popen([sys.executable, *sys.argv], env=values, stdout=subprocess.PIPE) for values in envs]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(1)
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def measure(args: argparse.Namespace, rank: int, count: int) -> None:
    """Be one of the processes; print what was measured as a JSON object."""
    os.sched_setaffinity(0, [int(os.environ["CORE"])])
    import multimesh as mm

    if count > 1:
        mm.distributed.initialize(num_processes=count, process_id=rank)
    tables: dict[str, Any] = {"steps": {}, "own": []}
    for m in args.microbatches if count > 1 else ():
        tables["steps"][m] = compare_steps(Work(args.width, args.rows, m), args.rounds, args.svg)
        args.svg = None
    work = Work(args.width, args.rows, args.microbatches[0])
    tables["own"].append({"transport": "pull" if count > 1 else "copy", **dispatched(work, args.rounds)})
    print(json.dumps(tables), flush=True)


class Work:
    """The arrays of a step, as NumPy has them, and the step in each of its forms."""

    def __init__(self, width: int, rows: int, microbatches: int) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        self.rows, self.microbatches = rows, microbatches
        self.params = [
            [(rng.normal(size=(width, width)) / width**0.5).astype(np.float32) for _ in range(LAYERS)] for _ in range(2)
        ]
        self.batch = rng.normal(size=(microbatches * rows, width)).astype(np.float32)

    def pipeline(self, schedule: str) -> tuple[Any, Any]:
        """A jitted step over two submeshes, and its arguments."""
        import jax
        import numpy as np

        import multimesh as mm

        meshes = [jax.sharding.Mesh(np.array([d]), "data") for d in jax.devices()[:2]]

        def loss(params: Any, x: Any) -> Any:
            x = mm.task(stage, "first", mesh=meshes[0])(params[0], x)
            return mm.task(lambda p, x: jax.numpy.mean(stage(p, x) ** 2), "second", mesh=meshes[1])(params[1], x)

        def step(params: Any, x: Any) -> Any:
            total = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=self.rows, schedule=schedule)(params, x)
            return jax.tree.map(lambda y: y / self.microbatches, total)

        placed = mm.jit(lambda p: [mm.task(lambda x: x * 1, mesh=m)(x) for m, x in zip(meshes, p, strict=True)])
        return mm.jit(step), (placed(self.params), self.batch)

    def one_process(self, microbatches: int) -> Callable[[], Any]:
        """So many microbatches in this process alone."""
        import jax

        device = jax.local_devices()[0]
        pieces = self.batch.reshape(-1, self.rows, self.batch.shape[1])[:microbatches]
        params, x = jax.device_put((self.params, pieces), device)
        jitted = jax.jit(accumulated)
        return lambda: jitted(params, x)

    def spmd(self) -> Callable[[], Any]:
        """One program over both processes, each with half of the rows."""
        import jax
        import numpy as np
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "data")

        def place(x: Any, spec: Any) -> Any:
            return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

        def local(params: Any, x: Any) -> Any:
            varying = jax.tree.map(lambda w: jax.lax.pcast(w, "data", to="varying"), params)
            return jax.tree.map(lambda y: jax.lax.psum(y, "data") / 2, accumulated(varying, x))

        params = jax.tree.map(lambda w: place(w, P()), self.params)
        pieces = self.batch.reshape(self.microbatches // 2, 2 * self.rows, -1)
        x = place(pieces, P(None, "data"))
        jitted = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P()))
        return lambda: jitted(params, x)


def stage(params: Any, x: Any) -> Any:
    import jax

    for w in params:
        x = jax.numpy.tanh(x @ w)
    return x


def accumulated(params: Any, pieces: Any) -> Any:
    """Mean loss and gradients over microbatches, one after another."""
    import jax
    from jax import numpy as jnp

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(stage(params[1], stage(params[0], x)) ** 2)

    def one(total: Any, x: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, x)), None

    first = jax.value_and_grad(loss)(params, pieces[0])
    total, _ = jax.lax.scan(one, first, pieces[1:])
    return jax.tree.map(lambda y: y / pieces.shape[0], total)


def compare_steps(work: Work, rounds: int, svg: str | None) -> list[report.Row]:
    """Every form of the step in turns."""
    import jax
    from multimesh.processes import agree

    import multimesh as mm

    m, rank = work.microbatches, jax.process_index()
    contenders: dict[str, Callable[[], Any]] = {}
    profiles: dict[str, Any] = {}

    for schedule in SCHEDULES:
        step, args = work.pipeline(schedule)
        profiles[schedule] = step.profile(*args)
        contenders[schedule] = functools.partial(step, *args)
    halves, one_process = work.one_process(m // 2), work.one_process(m)
    contenders |= {"SPMD dp 2": work.spmd(), "halves": halves}
    contenders["one process"] = lambda: one_process() if rank == 0 else None
    if svg and rank == 0:
        profiles["1f1b"].measured.to_svg(svg)
    losses = {name: float(mm.distributed.gather(contenders[name]()[0])) for name in (*profiles, "SPMD dp 2")}
    if max(losses.values()) - min(losses.values()) > 1e-5 * abs(max(losses.values())):
        raise SystemExit(f"the losses differ: {losses}")
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for n in range(rounds + 1):
        for name, call in contenders.items():
            mm.distributed.barrier(f"{m} {n} {name}")
            start, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            if n:
                samples[name].append((time.perf_counter() - start, time.process_time() - cpu))
    texts = agree.decide_together(f"{m}", json.dumps(samples).encode(), lambda every: b"\n".join(every))
    every = [json.loads(text) for text in texts.splitlines()]
    rounds_of = {name: list(zip(*(member[name] for member in every), strict=True)) for name in samples}
    wall = {name: [max(w for w, _ in pair) for pair in pairs] for name, pairs in rounds_of.items()}
    base = wall["halves"]
    ideal = dict.fromkeys(profiles, (m + 1) / m) | {"SPMD dp 2": 1.0, "halves": 1.0, "one process": 2.0}

    def row(name: str) -> report.Row:
        times, forecast = wall[name], profiles[name].simulated.makespan if name in profiles else None
        cpu = [statistics.median(c for _, c in member[name]) for member in every]
        return {
            "step": name,
            "min ms": 1e3 * min(times),
            "median ms": 1e3 * statistics.median(times),
            "CPU ms": " + ".join(f"{1e3 * seconds:.0f}" for seconds in cpu),
            "ideal": ideal[name],
            "x halves": f"{min(times) / min(base):.2f}; {statistics.median(times) / statistics.median(base):.2f}",
            "forecast": f"{1e3 * forecast:.0f}" if forecast else "",
            "x forecast": f"{min(times) / forecast:.2f}; {statistics.median(times) / forecast:.2f}" if forecast else "",
        }

    return [row(name) for name in contenders]


def dispatched(work: Work, rounds: int) -> report.Row:
    """CPU time of the calling thread, least and median, in a call of a kernel, and of a transfer where it takes part.

    In one process a transfer is one call.
    """
    import jax
    from multimesh.runtime.actions import processes
    from multimesh.runtime.between import exchange
    from multimesh.runtime.runner import watch_calls

    step, args = work.pipeline("1f1b")
    runner, leaves = step.lower(*args).compile().runner, jax.tree.leaves(args)
    owners, seconds_of = processes(runner.compiled.plan), {"a kernel": [], "a send": [], "a receive": []}

    def observe(action: Any, call: Any) -> Any:
        sends = jax.process_index() in owners[action.submeshes[0]]
        times = seconds_of["a kernel" if action.kernel is not None else "a send" if sends else "a receive"]

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            results = call(*args)
            times.append(1e6 * (time.thread_time() - start))
            return results

        return timed

    for calls in (runner.calls, *[watch_calls(runner.calls, observe)] * rounds):
        with exchange.turn:
            env = runner.staged(leaves)
            runner.run(env, calls)
            jax.block_until_ready(env)
    return {
        name: f"{min(times):.0f}; {statistics.median(times):.0f} ({len(times) // rounds})" if times else ""
        for name, times in seconds_of.items()
    }


if __name__ == "__main__":
    main()
