"""A decoder with mixtures of experts: expert parallelism by ``shard_map`` inside a mesh with Explicit axes.

    python examples/moe.py

Two stages of four devices each (data 2, expert 2). Types say where each array lies: products name their layout
(``out_sharding=``), tokens go to their experts and back by ``lax.all_to_all``, and parameters that are typed
``reduced=`` have gradients that are summed up once a step. It prints the losses of a pipeline over microbatches,
and those of the same code under plain ``jax.jit`` on the first four devices.
"""

import functools
import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import multimesh as mm

VOCAB, WIDTH, HIDDEN, EXPERTS, LAYERS = 32, 16, 32, 4, 4
ROWS, SIZE, LENGTH, STEPS, RATE = 16, 4, 8, 5, 4.0
COUNT = ROWS // SIZE  # of microbatches
TOKENS = P(("data", "expert"))  # outside of the experts both axes divide the tokens
ONCE = P(reduced={"data", "expert"})  # a gradient is summed up over these once a step
LAYER = {"router": ONCE, "up": P("expert"), "down": P("expert")}
SPECS = {"embed": ONCE, "layers": [LAYER] * LAYERS}


def experts(chosen, up, down, x):
    """On each device: send tokens to the devices of their experts, apply these, and send the results back."""
    slots = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)  # [tokens, experts]
    sent = jnp.einsum("te,td->etd", slots, x)  # one row for each token and expert, zero but for the chosen
    received = jax.lax.all_to_all(sent, "expert", split_axis=0, concat_axis=1, tiled=True)
    outputs = jnp.einsum("etf,efd->etd", jax.nn.gelu(jnp.einsum("etd,edf->etf", received, up)), down)
    returned = jax.lax.all_to_all(outputs, "expert", split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("te,etd->td", slots, returned)


def layer(w, x):
    """A mixture of experts, one for each token. ``x`` has shape [tokens, width]."""
    gates = jax.nn.softmax(jnp.einsum("td,de->te", x, w["router"], out_sharding=TOKENS))
    chosen = jnp.argmax(gates, -1)
    run = jax.shard_map(experts, in_specs=(TOKENS, P("expert"), P("expert"), TOKENS), out_specs=TOKENS)
    return x + gates.max(-1, keepdims=True) * run(chosen, w["up"], w["down"], x)


def embed(table, tokens):
    """Rows of the embedding, in the layout of the tokens."""
    return table.at[tokens].get(out_sharding=TOKENS)


def score(table, x, labels):
    """The mean cross entropy of the next tokens."""
    logits = jax.nn.log_softmax(jnp.einsum("td,vd->tv", x, table, out_sharding=TOKENS))
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


def loss(params, batch):
    """The loss of a batch of sequences, [rows, length + 1]."""
    flat = reshard(batch[:, :-1], P(None)).reshape(-1), reshard(batch[:, 1:], P(None)).reshape(-1)
    tokens, labels = (reshard(x, TOKENS) for x in flat)
    x = embed(params["embed"], tokens)
    for w in params["layers"]:
        x = layer(w, x)
    return score(params["embed"], x, labels)


def train(gradients, params, batch):
    """A step of gradient descent."""
    value, grads = gradients(params, batch)

    def update(p, g):
        spec = jax.typeof(p).sharding.spec
        replicated = spec.update(reduced=frozenset())
        return reshard(reshard(p, replicated) - RATE / COUNT * reshard(g, replicated), spec)

    return value / COUNT, jax.tree.map(update, params, grads)


def in_turn(fn):
    """The sums over microbatches that `mm.microbatch` takes, in plain JAX."""

    def call(params, batch):
        parts = [fn(params, batch[k::COUNT]) for k in range(COUNT)]
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)

    return call


def main():
    """Train twice, and compare."""
    grids = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    kinds = (AxisType.Explicit,) * 2
    meshes = [jax.sharding.Mesh(grid, ("data", "expert"), axis_types=kinds) for grid in grids]
    draw = np.random.default_rng(0)

    def weights(*shape):
        return (draw.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    initial = {"embed": weights(VOCAB, WIDTH), "layers": []}
    for _ in range(LAYERS):
        up, down = weights(EXPERTS, WIDTH, HIDDEN), weights(EXPERTS, HIDDEN, WIDTH)
        initial["layers"].append({"router": weights(WIDTH, EXPERTS), "up": up, "down": down})
    batch = draw.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)

    def place(mesh_of):
        stages = {"embed": 0, "layers": [dict.fromkeys(w, n * 2 // LAYERS) for n, w in enumerate(initial["layers"])]}
        layouts = jax.tree.map(lambda spec, stage: NamedSharding(mesh_of(stage), spec), SPECS, stages)
        return jax.device_put(initial, layouts), jax.device_put(batch, NamedSharding(meshes[0], P()))

    params, rows = place(lambda stage: meshes[stage])
    gradients = mm.microbatch(jax.value_and_grad(mm.pipeline(loss, meshes)), size=SIZE, argnum=1)
    step = mm.jit(functools.partial(train, gradients), donate_argnums=0)
    pipelined = []
    for _ in range(STEPS):
        value, params = step(params, rows)
        pipelined.append(float(value))

    params, rows = place(lambda stage: meshes[0])
    plain = []
    with jax.set_mesh(meshes[0]):
        single_program = jax.jit(functools.partial(train, in_turn(jax.value_and_grad(loss))))
        for _ in range(STEPS):
            value, params = single_program(params, rows)
            plain.append(float(value))

    print("step  pipeline  jax.jit")
    for number, pair in enumerate(zip(pipelined, plain, strict=True)):
        print(f"{number:4}  {pair[0]:8.5f}  {pair[1]:7.5f}")
    if not np.allclose(pipelined, plain, rtol=1e-5):
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
