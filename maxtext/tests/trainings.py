"""Many small MaxText trainings in one process: a script that parity.py starts.

``python trainings.py train CASES RESULTS``: CASES is a JSON list of `{"name", "argv", "handoff"}`, MaxText's own
arguments and the hand-over to the hooks (null: MaxText alone, which may be unpatched). RESULTS gets a JSON line a case,
with the norm of every parameter after every step. ``compile`` trains nothing, and tells of each kernel its name, its
runs in a step and its collectives, and the shapes of the parameters.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_STACK = re.compile(r"\['layers(?:_(\d+)_\d+)?'\]")
_FUSED = "['qkv_proj']['bias']"  # of queries, keys and values; see parity.GRADIENTLESS for the keys
_SCAN_AXIS = 1  # base.yml's param_scan_axis


def norms(state: Any) -> dict[str, float]:
    """Norm of every parameter; those of a stack layer by layer, under the names of unrolled layers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    sums = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state["model"]):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        name, value = jax.tree_util.keystr(path), np.asarray(x, np.float64)
        stack = _STACK.search(name)
        layers = np.moveaxis(value, _SCAN_AXIS, 0) if stack else [value]
        for i, layer in enumerate(layers):
            if _FUSED in name:
                layer = np.delete(layer, 1, axis=0)
            one = f"['layers_{int(stack[1] or 0) + i}']" if stack else ""
            sums[_STACK.sub(one, name)] = float(np.linalg.norm(layer))
    return sums


def run_trainer(case: dict[str, Any]) -> None:
    """Run MaxText's trainer."""
    import jax
    from maxtext.trainers.pre_train import train as trainer

    if case["handoff"]:
        from multimesh_maxtext.trainer import hooks

        os.environ["MULTIMESH_RUN"] = case["handoff"]
        hooks._config.cache_clear()
    try:
        trainer.run(*trainer.initialize(["", *case["argv"]]))
    finally:
        jax.clear_caches()


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train; return the norms after each step."""
    from maxtext.utils import train_utils

    history = []
    make_steps = train_utils.jit_train_and_eval_step

    def recording(*args: Any, **kwargs: Any) -> Any:
        step, evaluate = make_steps(*args, **kwargs)

        def record_call(*args: Any) -> Any:
            results = step(*args)
            history.append(norms(results[0]))
            return results

        record_call.lower = step.lower  # type: ignore[attr-defined]
        return record_call, evaluate

    train_utils.jit_train_and_eval_step = recording
    try:
        run_trainer(case)
    finally:
        train_utils.jit_train_and_eval_step = make_steps
    return {"parameters": history}


class _CompiledError(Exception):
    """Ends a training that has told its kernels."""


def compile_kernels(case: dict[str, Any]) -> dict[str, Any]:
    """Compile the train step of a case for CPUs; return its kernels and the shapes of its parameters."""
    import jax

    import multimesh
    from multimesh.observe.kernel_text import read_kernel
    from multimesh_maxtext.trainer import step

    document: dict[str, Any] = {}
    leave = step.StepFunction.lower

    def lower(self: step.StepFunction, state: Any, batch: Any) -> Any:
        if not self._trains:
            return leave(self, state, batch)
        with multimesh.context(autoshard=True):
            compiled = self._jitted.lower(state, batch).compile()
        runs = collections.Counter(run.kernel for run in compiled.plan.runs)
        document["kernels"] = [
            {
                "name": kernel.name,
                "submesh": kernel.submesh,
                "runs": runs[number],
                "looped": any(run.cell for run in compiled.plan.runs if run.kernel == number),
                "collectives": [
                    {
                        "kind": collective.kind,
                        "shapes": [shape for _, shape in collective.arrays],
                        "bytes": collective.nbytes * collective.times,
                        "axes": collective.axes(compiled.plan.submeshes[kernel.submesh]),
                    }
                    for collective in read_kernel(program.as_text()).collectives
                ],
            }
            for number, (kernel, program) in enumerate(
                zip(compiled.plan.kernels, compiled.compiled_plan.executables, strict=True)
            )
        ]
        leaves = [x for x in jax.tree.leaves(state["model"]) if x.ndim > 1]
        document["parameters"] = sorted({tuple(x.shape) for x in leaves})
        raise _CompiledError

    step.StepFunction.lower = lower  # type: ignore[method-assign]
    try:
        run_trainer(case)
    except _CompiledError:
        return document
    raise RuntimeError("the training did not compile its step")


def main(kind: str, cases: Path, results: Path) -> None:
    """Run all cases, whatever becomes of each."""
    do = {"train": train, "compile": compile_kernels}[kind]
    with results.open("w", encoding="utf-8") as out:
        for case in json.loads(cases.read_text(encoding="utf-8")):
            start = time.monotonic()
            record: dict[str, Any] = {"name": case["name"], "error": None, "parameters": []}
            try:
                record |= do(case)
            except Exception as error:  # noqa: BLE001 - the next case is to run whatever this one did
                traceback.print_exc()
                record["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            record["seconds"] = time.monotonic() - start
            print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
