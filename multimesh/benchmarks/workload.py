"""The work that is measured: one training step of a small transformer, as one SPMD program and as a MultiMesh pipeline.

Both use the same devices, the same microbatches and the same arithmetic (adam, float32). The SPMD program uses the axis
of the stages as one more data axis and accumulates its gradients over the microbatches with ``lax.scan``.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")  # fewer threads than device programs in flight: collectives wait for ever
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HEADS, VOCAB = 4, 64
OPTIMIZER = optax.adam(1e-3)
SPECS = {
    "gain": P(),
    "qkv": P(None, "model"),
    "out": P("model"),
    "up": P(None, "model"),
    "down": P("model"),
}
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes of one measurement; ``rows`` sequences a microbatch, ``stages`` submeshes of ``chunks`` pieces each."""

    name: str
    width: int
    sequence: int
    stages: int
    layers: int = 8
    microbatches: int = 8
    rows: int = 4
    tensor: int = 2
    devices: int = 8
    chunks: int = 1

    @property
    def pieces(self) -> int:
        """Stages of the model; submeshes take them in turn."""
        return self.stages * self.chunks

    @property
    def data(self) -> int:
        """Data-parallel devices of one submesh."""
        return self.devices // self.stages // self.tensor

    def grid(self, devices: Sequence[jax.Device] | None = None) -> np.ndarray:
        """Devices by stage, data and model: the first of all, or of these."""
        return np.array((devices or jax.devices())[: self.devices]).reshape(self.stages, self.data, self.tensor)

    def submeshes(self) -> list[Mesh]:
        return [Mesh(d, ("data", "model")) for d in self.grid()]

    def piece_of(self, layer: int) -> int:
        return layer * self.pieces // self.layers


TINY = Size("tiny", width=8, sequence=4, stages=4)
SMALL_2 = Size("small", width=64, sequence=32, stages=2)
SMALL_4 = Size("small", width=64, sequence=32, stages=4)


def init(size: Size) -> dict[str, Any]:
    """Parameters as NumPy arrays."""
    rng = np.random.default_rng(0)
    d, inner, head = size.width, 4 * size.width, size.width // HEADS

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(d)).astype(np.float32)

    def layer() -> dict[str, np.ndarray]:
        return {
            "gain": np.ones(d, np.float32),
            "qkv": normal(d, HEADS, 3 * head),
            "out": normal(HEADS, head, d),
            "up": normal(d, inner),
            "down": normal(inner, d),
        }

    layers = [layer() for _ in range(size.layers)]
    return {"embed": normal(VOCAB, d), "layers": layers, "head": normal(d, VOCAB)}


def batch(size: Size) -> dict[str, np.ndarray]:
    rows = size.rows * size.microbatches
    tokens = np.random.default_rng(1).integers(0, VOCAB, (rows, size.sequence + 1)).astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def block(p: Any, x: Any) -> Any:
    """Pre-norm attention and feed-forward."""
    h = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["gain"]
    q, k, v = jnp.split(jnp.einsum("btd,dhe->bthe", h, p["qkv"]), 3, -1)
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
    x = x + jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def loss_fn(size: Size, stage: Callable[[int, Step], Step]) -> Step:
    """Loss of one microbatch; ``stage(s, fn)`` runs ``fn`` as stage ``s``."""

    def loss(params: Any, b: Any) -> Any:
        x = b["x"]
        for s in range(size.pieces):
            layers = [p for i, p in enumerate(params["layers"]) if size.piece_of(i) == s]
            first, last = s == 0, s == size.pieces - 1

            def run(ends: Any, layers: Any, x: Any, y: Any, first: bool = first, last: bool = last) -> Any:
                x = ends["embed"][x] if first else x
                for p in layers:
                    x = block(p, x)
                return cross_entropy(x @ ends["head"], y) if last else x

            ends = ({"embed": params["embed"]} if first else {}) | ({"head": params["head"]} if last else {})
            x = stage(s, run)(ends, layers, x, b["y"] if last else None)
        return x

    return loss


def train_step(grads_of: Step, microbatches: int) -> Step:
    def step(params: Any, state: Any, b: Any) -> Any:
        loss, grads = grads_of(params, b)
        updates, state = OPTIMIZER.update(jax.tree.map(lambda g: g / microbatches, grads), state, params)
        return optax.apply_updates(params, updates), state, loss / microbatches

    return step


def spmd(size: Size, devices: Sequence[jax.Device] | None = None) -> tuple[Step, tuple[Any, Any, Any]]:
    """One program over all devices, and its arguments in place."""
    mesh = Mesh(size.grid(devices), ("stage", "data", "model"))
    replicated = NamedSharding(mesh, P())
    rows = NamedSharding(mesh, P(("stage", "data")))
    params = init(size)

    def shard(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    layers = [{k: shard(SPECS[k]) for k in p} for p in params["layers"]]
    layouts = {"embed": replicated, "layers": layers, "head": replicated}
    loss = loss_fn(size, lambda _, fn: fn)

    def grads_of(params: Any, b: Any) -> Any:
        count = size.microbatches

        def cut(x: Any) -> Any:
            x = jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)
            return lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, ("stage", "data"))))

        def one(total: Any, piece: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, piece)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        return lax.scan(one, zero, jax.tree.map(cut, b))[0]

    placed = jax.device_put(params, layouts)
    state = jax.jit(OPTIMIZER.init, out_shardings=state_shardings(layouts, replicated))(placed)
    step = jax.jit(train_step(grads_of, size.microbatches), donate_argnums=(0, 1))
    return step, (placed, state, jax.device_put(batch(size), rows))


def state_shardings(layouts: Any, scalar: NamedSharding) -> Any:
    """Moments lie where their parameters do."""
    return (optax.ScaleByAdamState(count=scalar, mu=layouts, nu=layouts), optax.EmptyState())


def pipeline(size: Size, schedule: str, place: Callable[[Any, Any], Any] = jax.device_put) -> tuple[Any, Any]:
    """The same step over the submeshes, and its arguments (parameters, state, batch), where ``place`` puts them."""
    import multimesh as mm  # the peers of peers.py run where MultiMesh does not

    meshes = size.submeshes()
    params = init(size)

    def shard(s: int, spec: P) -> NamedSharding:
        return NamedSharding(meshes[s % size.stages], spec)

    layouts = {
        "embed": shard(0, P()),
        "layers": [{k: shard(size.piece_of(i), SPECS[k]) for k in p} for i, p in enumerate(params["layers"])],
        "head": shard(size.stages - 1, P()),
    }
    loss = loss_fn(size, lambda s, fn: mm.task(fn, name=f"stage{s}", mesh=meshes[s % size.stages]))
    grads_of = mm.microbatch(jax.value_and_grad(loss), size=size.rows, argnum=1, schedule=schedule)
    placed = place(params, layouts)
    zeros = jax.tree.map(lambda x, w: place(np.zeros_like(x), w), params, layouts)
    variances = jax.tree.map(lambda x, w: place(np.zeros_like(x), w), params, layouts)
    count = place(np.int32(0), shard(0, P()))
    state = (optax.ScaleByAdamState(count=count, mu=zeros, nu=variances), optax.EmptyState())
    b = batch(size)
    data = {
        "x": place(b["x"], shard(0, P("data"))),
        "y": place(b["y"], shard(size.stages - 1, P("data"))),
    }
    step = mm.jit(train_step(grads_of, size.microbatches), donate_argnums=(0, 1))
    return step, (placed, state, data)
