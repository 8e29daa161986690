"""Grug MoE of marin-community/marin as a pipeline, beside plain ``jax.jit``. Its model is not changed.

    git clone https://github.com/marin-community/marin
    git -C marin checkout d18f8305eb34a7073f6962c127d443c5cf413d43
    python multimesh/benchmarks/grug.py marin

Takes the folder of a clone, in an environment that has the packages that its ``levanter`` and ``haliax`` import. The
model has eight layers of width 32 and four experts in two groups; routing, expert parallelism, checkpointing by names
and the fused cross entropy are those of the repository. It is cut for four submeshes of two devices. ``gradients``,
``state`` and ``restored`` are the largest relative L2 difference of a leaf: of gradients of the first step; of
parameters, router biases and moments of AdamW after three steps; of all results of the fourth step on two submeshes of
four devices, which a checkpoint of the first grid was restored on. Each is compared with plain ``jax.jit`` on the
devices of one submesh.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import report
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

AXES = ("replica_dcn", "data", "expert", "model")
ROWS_SPEC = P(("replica_dcn", "data", "expert"))
LAYERS, LENGTH, VOCAB, ROWS, MICRO, STEPS = 8, 16, 64, 16, 4, 3
OPTIMIZER = optax.adamw(1e-3)
Loop = Callable[[Callable[..., Any]], Callable[..., Any]]


def clone(text: str) -> Path:
    """Return the folder of a clone, and let Python import from it."""
    folder = Path(text)
    if not (folder / "experiments/grug/moe/model.py").is_file():
        raise argparse.ArgumentTypeError(f"{folder} has no experiments/grug/moe/model.py; give a clone of marin")
    sys.path[:0] = [str(folder), *(str(part) for part in sorted(folder.glob("lib/*/src")))]
    return folder


def grid(stages: int, experts: int) -> list[Mesh]:
    """Return submeshes with Explicit axes, as the model wants them."""
    devices = np.array(jax.devices()[: stages * experts]).reshape(stages, 1, 1, experts, 1)
    return [Mesh(part, AXES, axis_types=(AxisType.Explicit,) * len(AXES)) for part in devices]


class Grug:
    """The model with its weights, its loss, and a training step."""

    def __init__(self) -> None:
        from experiments.grug.moe import model as peer  # type: ignore[import-not-found]

        config = peer.GrugModelConfig(
            vocab_size=VOCAB,
            hidden_dim=32,
            intermediate_dim=16,
            shared_expert_intermediate_dim=32,
            num_experts=4,
            num_experts_per_token=2,
            num_layers=LAYERS,
            num_heads=4,
            num_kv_heads=2,
            max_seq_len=LENGTH,
            sliding_window=8,
            router_z_loss_coef=0.001,
            capacity_factor=2.0,
            moe_implementation="ring",
            remat_mode="save_moe",
        )
        with jax.set_mesh(grid(1, 2)[0]):
            model = jax.jit(lambda key: peer.Transformer.init(config, key=key))(jax.random.key(0))
        params, self.rest = eqx.partition(model, eqx.is_inexact_array)
        self.specs = jax.tree.map(lambda x: x.sharding.spec, params)
        self.weights = jax.device_get(params)
        draw = np.random.default_rng(0)
        self.batch = draw.integers(0, VOCAB, (ROWS, LENGTH)).astype("int32"), np.ones((ROWS, LENGTH), "float32")

    def loss(self, params: Any, batch: Any) -> Any:
        """Return the loss of their training loop, and the new thresholds of each router."""
        model = eqx.combine(params, self.rest)
        value, metrics = model.next_token_loss(*batch, return_router_metrics=True)
        return value, metrics["qb_beta_per_layer"]

    def step_of(self, loss: Callable[..., Any], loop: Loop) -> Callable[..., Any]:
        """Return a training step: AdamW, and router biases from the thresholds, as in their training loop."""

        def step(params: Any, state: Any, batch: Any) -> Any:
            (value, betas), grads = loop(jax.value_and_grad(loss, has_aux=True))(params, batch)
            updates, state = OPTIMIZER.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            for n in range(LAYERS):
                params = eqx.tree_at(bias_of(n), params, betas[n].mean() - betas[n])
            return params, state, value, grads

        return step

    def piped(self, meshes: Sequence[Mesh], schedule: str) -> tuple[Any, Any]:
        """Return the pipeline, and its jitted step."""
        table = mm.schedules.get(schedule)
        halves = 2 if schedule == "dualpipe-v" else 1
        route = table.placement(len(meshes)) if halves > 1 else None
        loss = mm.pipeline(self.loss, meshes, interleave=halves, placement=route)
        step = self.step_of(loss, lambda fn: mm.microbatch(fn, size=MICRO, argnum=1, schedule=schedule, reduce="mean"))
        return loss, mm.jit(step, donate_argnums=(0, 1))

    def plain(self, params: Any, state: Any, mesh: Mesh, steps: int) -> list[Any]:
        """Return the results of each step under ``jax.jit`` on one submesh."""

        def loop(fn: Callable[..., Any]) -> Callable[..., Any]:
            def run(params: Any, batch: Any) -> Any:
                cut = (MICRO, ROWS // MICRO)
                rows = [x.reshape(*cut, *x.shape[1:], out_sharding=ROWS_SPEC).swapaxes(0, 1) for x in batch]
                found = jax.lax.scan(lambda _, row: (None, fn(params, row)), None, tuple(rows))[1]
                return jax.tree.map(lambda x: x.mean(0), found)

            return run

        found, batch = [], self.on(mesh, self.batch)
        with jax.set_mesh(mesh):
            params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, self.specs)
            state = OPTIMIZER.init(params) if state is None else self.moments(state, mesh)
            step = jax.jit(self.step_of(self.loss, loop))
            for _ in range(steps):
                params, state, value, grads = step(params, state, batch)
                found.append(jax.device_get((params, state, value, grads)))
        return found

    def moments(self, state: Any, mesh: Mesh) -> Any:
        """Put a state of the optimizer on a submesh, with the layouts of the weights."""
        empty = jax.eval_shape(OPTIMIZER.init, self.weights)
        specs = optax.tree.map_params(
            OPTIMIZER, lambda _, spec: spec, empty, self.specs, transform_non_params=lambda _: P()
        )
        return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), state, specs)

    def on(self, mesh: Mesh, batch: Any) -> Any:
        """Put rows on a submesh."""
        return jax.device_put(batch, NamedSharding(mesh, ROWS_SPEC))

    def start(self, mesh: Mesh) -> tuple[Any, Any]:
        """Return weights on the first submesh, from where the first call takes them, and moments."""
        params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), self.weights, self.specs)
        return params, OPTIMIZER.init(params)


def bias_of(layer: int) -> Callable[[Any], Any]:
    """Return a function that takes the router bias of a layer."""
    return lambda params: params.blocks[layer].mlp.router_bias


def distance(got: Any, want: Any) -> float:
    """Return the largest relative L2 difference of a leaf."""

    def one(a: Any, b: Any) -> float:
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1))

    return max(jax.tree.leaves(jax.tree.map(one, got, want)))


def measure(grug: Grug, schedule: str, want: Sequence[Any]) -> report.Row:
    """Train three steps on four submeshes; save, and go on on two."""
    four, two = grid(4, 2), grid(2, 4)
    loss, step = grug.piped(four, schedule)
    batch, state = grug.on(four[0], grug.batch), grug.start(four[0])
    cuts = loss.cuts(state[0], grug.on(four[0], [x[:MICRO] for x in grug.batch]))
    values, gradients = [], []
    for _ in range(STEPS):
        *state, value, grads = step(*state, batch)
        values.append(float(value))
        gradients.append(grads)
    row = {
        "schedule": schedule,
        "slowest": cuts.slowest,
        "bytes": int(cuts.sent),
        "losses": max(abs(a - float(b[2])) / abs(float(b[2])) for a, b in zip(values, want, strict=True)),
        "gradients": distance(gradients[0], want[0][3]),
        "state": distance(jax.device_get(tuple(state)), want[-1][:2]),
    }
    _, other = grug.piped(two, schedule)
    rows = grug.on(two[0], grug.batch)
    like = grug.start(two[0])
    where = other.lower(*like, rows).compile().input_shardings[0][:2]
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s or x.sharding),
        like,
        where,
        is_leaf=lambda x: x is None,
    )
    with tempfile.TemporaryDirectory() as folder:
        mm.distributed.save(Path(folder, "state"), tuple(state))
        restored = mm.distributed.restore(Path(folder, "state"), like)
    weights, moments = jax.device_get(tuple(state))
    again = grug.plain(weights, moments, two[0], 1)[0]
    row["restored"] = distance(jax.device_get(other(*restored, rows)), again)
    return row


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("folder", type=clone, help="a clone of marin")
    parser.add_argument("--schedules", nargs="+", default=["zb-h1", "dualpipe-v"], metavar="NAME")
    args = parser.parse_args()
    mm.virtual_devices(8)
    grug = Grug()
    want = grug.plain(grug.weights, None, grid(1, 2)[0], STEPS)
    title = f"Grug MoE, {report.commit_of(args.folder) or args.folder}"
    report.show({title: [measure(grug, schedule, want) for schedule in args.schedules]}, args.json)


if __name__ == "__main__":
    main()
