"""Many small MaxText trainings in one process: a script that parity.py starts.

``python trainings.py CASES RESULTS``: CASES is a JSON list of `{"name", "argv", "handoff"}`, MaxText's own arguments
and the hand-over to the hooks (null: MaxText alone, which may be unpatched). RESULTS gets a JSON line a case, with the
norm of every parameter after every step.
"""

from __future__ import annotations

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

    found = {}
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
            found[_STACK.sub(one, name)] = float(np.linalg.norm(layer))
    return found


def train(case: dict[str, Any]) -> list[dict[str, float]]:
    """Run MaxText's trainer; return the norms after each step."""
    import jax
    from maxtext.trainers.pre_train import train as trainer
    from maxtext.utils import train_utils

    if case["handoff"]:
        from multimesh_maxtext.trainer import hooks

        os.environ["MULTIMESH_RUN"] = case["handoff"]
        hooks._config.cache_clear()
    history = []
    make_steps = train_utils.jit_train_and_eval_step

    def recording(*args: Any, **kwargs: Any) -> Any:
        step, evaluate = make_steps(*args, **kwargs)

        def recorded(*args: Any) -> Any:
            results = step(*args)
            history.append(norms(results[0]))
            return results

        recorded.lower = step.lower  # type: ignore[attr-defined]
        return recorded, evaluate

    train_utils.jit_train_and_eval_step = recording
    try:
        trainer.run(*trainer.initialize(["", *case["argv"]]))
    finally:
        train_utils.jit_train_and_eval_step = make_steps
        jax.clear_caches()
    return history


def main(cases: Path, results: Path) -> None:
    """Run all cases, whatever becomes of each."""
    with results.open("w", encoding="utf-8") as out:
        for case in json.loads(cases.read_text(encoding="utf-8")):
            started = time.monotonic()
            record: dict[str, Any] = {"name": case["name"], "error": None, "parameters": []}
            try:
                record["parameters"] = train(case)
            except Exception as error:  # noqa: BLE001 - the next case is to run whatever this one did
                traceback.print_exc()
                record["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            record["seconds"] = time.monotonic() - started
            print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
