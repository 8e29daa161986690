"""Every schedule over 2, 4 and 8 submeshes and m in {p, 2p, 4p}: published and simulated idle time, numerics, memory.

Each trains one step of a chain of ``2 p`` layers on single devices, beside plain ``jax.jit``. ``error`` is the largest
difference of the loss and of a gradient, relative to the largest element. ``plan`` is the idle time of the plan that
ran, in the simulator, and ``simulated`` that of the table. ``live`` is the most that each device holds in the step
beyond its arguments, measured from the live arrays, and ``peaks`` what the simulated peak of activations comes to: the
input of each stage that is held, and the result of each layer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import peak_bytes
from multimesh.commands import forecast

import multimesh as mm
from multimesh import schedules

WIDTH, ROWS = 16, 256
NAMES = tuple(name for name in schedules.names() if name != "fill-drain")
SIZES = (2, 4, 8)


def grid(submeshes: tuple[int, ...] = SIZES) -> list[tuple[int, int]]:
    """Submeshes and microbatches of the cases."""
    return [(p, turns * p) for p in submeshes for turns in (1, 2, 4)]


def measure(name: str, p: int, m: int) -> dict[str, Any]:
    """One step of a schedule."""
    schedule = schedules.get(name)
    chunks, placement = schedule.usual, schedule.placement(p)
    found = forecast.simulate_schedule(name, forecast.Shape(p, chunks, m))
    meshes = [Mesh(np.array([d]), ("data",)) for d in jax.devices()[:p]]
    homes = [meshes[placement[s % len(placement)]] for s in range(p * chunks)]
    draw = np.random.default_rng(0)
    weights = [(draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(2 * p)]
    x = draw.normal(size=(m * ROWS, WIDTH)).astype(np.float32)
    layers = 2 // chunks

    def loss(weights: Any, x: Any) -> Any:
        def stage(own: Any, x: Any) -> Any:
            for w in own:
                x = jnp.tanh(x @ w)
            return x

        for s, mesh in enumerate(homes):
            x = mm.task(stage, f"stage{s}", mesh=mesh)(weights[s * layers : (s + 1) * layers], x)
        return mm.task(lambda x: jnp.mean(x**2), "loss", mesh=homes[-1])(x)

    step = mm.jit(mm.microbatch(jax.value_and_grad(loss), size=ROWS, argnum=1, schedule=schedule, reduce="mean"))
    placed = [jax.device_put(w, NamedSharding(homes[n // layers], P())) for n, w in enumerate(weights)]
    x = jax.device_put(x, NamedSharding(homes[0], P()))
    got = jax.block_until_ready(step(placed, x))
    want = jax.jit(jax.value_and_grad(loss))(weights, np.asarray(x))
    peaks = peak_bytes(lambda: jax.block_until_ready(step(placed, x)), every=max(10, p * m // 8))
    plan = step.plan(placed, x).simulate(dict.fromkeys("FBW", 1 / chunks))
    in_a_row = found.published is not None and found.published.in_a_row
    one = ROWS * WIDTH * 4 * (1 + layers) * chunks
    return {
        "agrees": found.agrees,
        "simulated": found.in_a_row if in_a_row else found.idle,
        "plan": plan.period - max(plan.busy) if in_a_row else max(plan.idle),
        "error": max(map(_error, jax.tree.leaves(got), jax.tree.leaves(want))),
        "live": [peaks[mesh.devices.flat[0]] for mesh in meshes],
        "peaks": [peak * one for peak in found.peaks],
    }


def _error(got: Any, want: Any) -> float:
    return float(np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max())
