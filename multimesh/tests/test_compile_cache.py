"""A second process finds every program in the persistent cache of JAX, also those that differ in their submesh only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import collections, functools, json, sys
import conftest, jax, jax.monitoring, jax.numpy as jnp, optax
import multimesh as mm
from models import MLP
from pipelines import Split, gradient, submeshes

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

split, optimizer = Split(submeshes(4), "context"), optax.adam(0.1)
grads_of = gradient(MLP, split, size=2, rows=8, wrap=jax.checkpoint)

@functools.partial(mm.jit, donate_argnums=(0, 1))
def step(params, state, batch):
    loss, grads = grads_of(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

params, batch = MLP.init(4), MLP.batch(8, 0)
*_, loss = step(params, optimizer.init(params), batch)
print(json.dumps({"loss": float(loss), **{name.rpartition("/")[2]: n for name, n in events.items()}}))
"""


def run(cache: Path, seed: str) -> dict[str, float]:
    argv = [sys.executable, "-c", PROGRAM, str(cache)]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed, "JAX_ENABLE_COMPILATION_CACHE": "1"}
    process = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.longer
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = run(tmp_path, "1"), run(tmp_path, "2")
    assert first["cache_misses"] == first["compile_requests_use_cache"] > 6
    assert second["cache_hits"] == second["compile_requests_use_cache"] == first["compile_requests_use_cache"]
    assert "cache_misses" not in second
    assert second["loss"] == first["loss"]
