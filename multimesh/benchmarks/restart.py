"""What a start costs whose kernels are in JAX's compilation cache: could a plan on disk save much of it?

``restart.py [--stages S] [--layers L] [--microbatches M]`` starts a process twice; the first fills the cache. Seconds
of CPU time of the second, up to the end of its first step. It has all stages, where one of many processes has its own:
``of a stage`` divides what each process does for its own kernels only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import report

OWN = ("load the kernels", "first step")  # of what a process does for its own stages only


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--stages", type=int, default=16)
    options.add_argument("--layers", type=int, default=80)
    options.add_argument("--microbatches", type=int, default=64)
    options.add_argument("--schedule", default="1f1b")
    options.add_argument("--cache", help="be one such process, with this cache")
    args = options.parse_args()
    if args.cache:
        print(json.dumps(measured(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, *sys.argv, "--cache", folder]
        env = os.environ | {"NPROC": str(args.stages), "MULTIMESH_CACHE": f"{folder}/searches"}
        _, again = [json.loads(subprocess.check_output(line, env=env).splitlines()[-1]) for _ in range(2)]
    rows = [
        {"part": part, "CPU s": used, "of a stage, s": used / args.stages if part in OWN else used}
        for part, used in again.items()
    ]
    report.show({f"{args.stages} stages, {args.layers} layers, {args.microbatches} microbatches": rows}, args.json)


def measured(args: Any) -> dict[str, float]:
    """Be one process; CPU seconds of the parts of its start."""
    found: dict[str, float] = {}

    def part(name: str, call: Callable[[], Any]) -> Any:
        begun = time.process_time()
        result = call()
        found[name] = time.process_time() - begun
        return result

    import jax
    from workload import TINY, pipeline

    import multimesh as mm

    found["import"] = time.process_time()
    mm.virtual_devices(args.stages)
    jax.config.update("jax_compilation_cache_dir", args.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    size = dataclasses.replace(
        TINY, stages=args.stages, layers=args.layers, microbatches=args.microbatches, devices=args.stages, tensor=1
    )
    step, given = part("make the arrays", lambda: pipeline(size, args.schedule))
    part("trace", lambda: step.trace(*given))
    lowered = part("plan", lambda: step.lower(*given))
    found["plan"] -= found["trace"]  # it traces too
    part("fingerprint", lowered.plan.fingerprint)
    compiled = part("load the kernels", lowered.compile)
    part("first step", lambda: jax.block_until_ready(compiled(*given)))
    return found


if __name__ == "__main__":
    main()
