"""Compiles the kernels of many small MaxText pipelines for CPUs: a script that test_collectives.py starts.

``python kernels.py CASES RESULTS``: CASES is that of trainings.py. RESULTS gets a JSON line a case: of each kernel its
name, its runs in a step and its collectives, and the shapes of the parameters. Nothing is trained.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


class _CompiledError(Exception):
    """Ends a training that has told its kernels."""


def kernels(case: dict[str, Any]) -> dict[str, Any]:
    """Compile the train step of a case; return its kernels and the shapes of its parameters."""
    import jax
    from maxtext.trainers.pre_train import train as trainer

    import multimesh
    from multimesh.observe.kernel_text import read_kernel
    from multimesh_maxtext.trainer import hooks, step

    os.environ["MULTIMESH_RUN"] = case["handoff"]
    hooks._config.cache_clear()
    found: dict[str, Any] = {}

    def lower(self: step.StepFunction, state: Any, batch: Any) -> Any:
        if not self._trains:
            return step.Ahead()
        with multimesh.context(autoshard=True):
            compiled = self._jitted.lower(state, batch).compile()
        runs = collections.Counter(run.kernel for run in compiled.plan.runs)
        found["kernels"] = [
            {
                "name": kernel.name,
                "submesh": kernel.submesh,
                "runs": runs[number],
                "looped": any(run.cell for run in compiled.plan.runs if run.kernel == number),
                "collectives": [
                    {
                        "kind": each.kind,
                        "shapes": [shape for _, shape in each.arrays],
                        "bytes": each.nbytes * each.times,
                        "axes": each.axes(compiled.plan.submeshes[kernel.submesh]),
                    }
                    for each in read_kernel(program.as_text()).collectives
                ],
            }
            for number, (kernel, program) in enumerate(
                zip(compiled.plan.kernels, compiled.compiled_plan.executables, strict=True)
            )
        ]
        leaves = [x for x in jax.tree.leaves(state["model"]) if x.ndim > 1]
        found["parameters"] = sorted({tuple(x.shape) for x in leaves})
        raise _CompiledError

    step.StepFunction.lower = lower  # type: ignore[method-assign]
    try:
        trainer.run(*trainer.initialize(["", *case["argv"]]))
    except _CompiledError:
        return found
    finally:
        jax.clear_caches()
    raise RuntimeError("the training did not compile its step")


def main(cases: Path, results: Path) -> None:
    """Compile all cases, whatever becomes of each."""
    with results.open("w", encoding="utf-8") as out:
        for case in json.loads(cases.read_text(encoding="utf-8")):
            record: dict[str, Any] = {"name": case["name"], "error": None}
            try:
                record |= kernels(case)
            except Exception as error:  # noqa: BLE001 - the next case is to run whatever this one did
                traceback.print_exc()
                record["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
