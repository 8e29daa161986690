"""The runtime's own cost: CPU time of the calling thread in a warm step, less that of the bare calls that it makes.

The bare calls are the step's kernels, batched transfers and frees, written out as one straight Python function.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import report
from step import SCHEDULES, Training
from workload import SMALL_2, SMALL_4, TINY, Size, pipeline

CASES = [(TINY, "1f1b"), *((size, s) for size in (SMALL_2, SMALL_4) for s in SCHEDULES)]
LIMIT_US = 25.0


def straight_line(compiled: Any, args: Sequence[Any]) -> Callable[..., list[Any]]:
    """The same calls of kernels and transfers, written out as a function without slots, loops or decisions."""
    names: dict[str, Any] = {"put": jax.device_put}
    runner = compiled.runner
    layouts = compiled.plan.layouts
    given = {slot: f"args[{arg}]" for arg, slot in compiled.plan.inputs}
    moved = [slot for arg, slot in compiled.plan.inputs if args[arg].sharding != layouts[slot]]
    lines = ["def bare(args):"]
    lines += [f"    v{slot} = {source}" for slot, source in given.items()]
    if moved:
        names["elsewhere"] = [layouts[slot] for slot in moved]
        slots = "".join(f"v{slot}, " for slot in moved)
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


def measure(size: Size, schedule: str, steps: int) -> report.Row:
    """Medians over ``steps`` warm steps of either kind, in turns."""
    step, args = pipeline(size, schedule)
    training = Training(step, args)
    for _ in range(3):
        jax.block_until_ready(training())
    (compiled,) = step.compiled
    bare = straight_line(compiled, jax.tree.leaves((training.params, training.state, training.batch)))
    runs = sum(i.kind == "RUN" for i in compiled.plan.instructions)
    whole, calls = [], []
    for _ in range(steps):
        start = time.thread_time()
        training()
        whole.append(time.thread_time() - start)
        jax.block_until_ready(training.params)
        leaves = jax.tree.leaves((training.params, training.state, training.batch))
        training.params = training.state = None
        start = time.thread_time()
        results = bare(leaves)
        calls.append(time.thread_time() - start)
        state = jax.tree.unflatten(compiled.lowered.out_tree, jax.block_until_ready(results))
        training.params, training.state, training.loss = state
    total, bare_s = statistics.median(whole), statistics.median(calls)
    return {
        "size": size.name,
        "pp": size.stages,
        "schedule": schedule,
        "RUN": runs,
        "transfers": len(compiled.runner.calls) - runs,
        "step ms": 1e3 * total,
        "bare calls ms": 1e3 * bare_s,
        "own us per RUN": 1e6 * (total - bare_s) / runs,
        "limit": LIMIT_US,
    }


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=30, help="warm steps of each case (default 30)")
    args = options.parse_args()
    rows = [measure(size, schedule, args.steps) for size, schedule in CASES]
    report.show({"The runtime's own cost (thread time)": rows}, args.json)


if __name__ == "__main__":
    main()
