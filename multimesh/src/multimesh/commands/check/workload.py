"""A training step of 1F1B over all stages, against one program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import multimesh as mm
from multimesh.commands.check.steps import Bench
from multimesh.commands.check.verdicts import ABSENT, OK, Row, make_failure
from multimesh.errors import DisagreementError

WIDTH, TOLERANCE = 32, 1e-4


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the next activations, rows over the devices of the stage."""
    return mm.with_sharding_constraint(jnp.tanh(x @ w), PartitionSpec("data"))


def try_training(bench: Bench) -> Any:
    """Run a step; returns how far its loss and gradients are from those of one program, relatively, and its seconds."""
    if bench.stages < 2:
        return "there is one stage"
    bench.doing, begun = "compiling a plan of 1f1b", time.monotonic()
    draw = np.random.default_rng(0).normal
    weights = [(draw(size=(WIDTH, WIDTH)) / 6).astype(np.float32) for _ in bench.meshes]
    size = 2 * bench.per_stage
    x = draw(size=(size * 2 * bench.stages, WIDTH)).astype(np.float32)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, (mesh, w) in enumerate(zip(bench.meshes, weights, strict=True)):
            last = number == bench.stages - 1
            x = mm.task((lambda w, x: (layer(w, x) ** 2).sum()) if last else layer, f"stage{number}", mesh=mesh)(w, x)
        return x

    with mm.context(ignore_transforms=True):
        want = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(weights, x))
    step = mm.jit(mm.microbatch(jax.value_and_grad(loss), argnum=1, size=size, schedule="1f1b"))
    jax.block_until_ready(step(weights, x))
    bench.doing = "running a plan of 1f1b"
    pairs = zip(*map(jax.tree.leaves, (mm.distributed.gather(step(weights, x)), want)), strict=True)
    far = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return {"far": far, "seconds": time.monotonic() - begun}


def judge_training(bench: Bench, every: Sequence[Any]) -> list[Row]:
    """Compare the step with one program."""
    if isinstance(every[0], str):
        return [Row("plans", ABSENT, every[0])]
    far, seconds = every[0]["far"], max(answer["seconds"] for answer in every)
    text = f"1f1b: loss and gradients differ from one program by at most {far:.1e}; {seconds:.1f} s"
    if not far <= TOLERANCE:  # NaN too
        remedy = "report it with --report; the products or transfers of a device may be wrong"
        return [make_failure("plans", text, remedy, DisagreementError.exit_code)]
    return [Row("plans", OK, text)]
