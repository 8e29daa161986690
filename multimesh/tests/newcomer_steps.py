"""Training steps that someone new to the library tries first; see test_newcomer.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

WIDTH, ROWS, SIZE = 6, 4, 2
DEVICES = np.array(jax.devices())
BATCHES = ROWS // SIZE


def normal(seed, *shape):
    return (np.random.default_rng(seed).normal(size=shape) / 2).astype(np.float32)


def dense(s):
    return {"w": normal(s, WIDTH, WIDTH), "b": normal(s + 50, WIDTH)}


def per_stage(stages, init=dense):
    return {f"s{s}": init(s) for s in range(stages)}


def regression(rows=ROWS):
    return {"x": normal(90, rows, WIDTH), "y": normal(91, rows)}


def layer(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"])


def squared_error(x, y):
    return jnp.mean(jnp.square(x.sum(-1) - y))


def loss_of(stage, stages=2, block=layer):
    def loss(params, batch):
        x = batch["x"]
        for s in range(stages):
            x = stage(s, block)(params[f"s{s}"], x)
        return squared_error(x, batch["y"])

    return loss


def descend(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def trained(loss, loop, *state, **options):
    return loop(jax.value_and_grad(loss, **options), size=SIZE, argnum=len(state) - 1)(*state)


def of_block(block, init=dense, stages=2, rows=ROWS):
    """Each stage is one ``block(params, x)``."""

    def case(stage, loop):
        def step(params, batch):
            value, grads = trained(loss_of(stage, stages, block), loop, params, batch)
            return descend(params, grads), value

        return step, per_stage(stages, init), regression(rows)

    return case


def of_optimizer(make):
    """A step with an optimizer of optax."""

    def case(stage, loop):
        optimizer = make()

        def step(state, batch):
            params, moments = state
            value, grads = trained(loss_of(stage), loop, params, batch)
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        params = per_stage(2)
        return step, (params, jax.device_get(optimizer.init(params))), regression()

    return case


def running_statistics(stage, loop):
    """As batch norm: each stage normalizes by its rows and keeps a mean over all of them, beside a counter."""

    def block(p, kept, x):
        mean = x.mean(0)
        kept = {"mean": 0.9 * kept["mean"] + 0.1 * mean, "count": kept["count"] + 1}
        return jnp.tanh((x - mean) / jnp.sqrt(x.var(0) + 0.1) @ p["w"] + p["b"]), kept

    def loss(params, kept, batch):
        x, new = batch["x"], {}
        for s in params:
            x, new[s] = stage(int(s[1:]), block)(params[s], kept[s], x)
        return squared_error(x, batch["y"]), new

    def step(state, batch):
        params, kept = state
        (value, kept), grads = trained(loss, loop, params, kept, batch, has_aux=True)
        kept = jax.tree.map(lambda x: (x / BATCHES).astype(x.dtype), kept)
        return (descend(params, grads), kept), value

    kept = per_stage(2, lambda s: {"mean": np.zeros(WIDTH, np.float32), "count": np.int32(0)})
    return step, (per_stage(2), kept), regression()


def moving_average_teacher(stage, loop):
    """Weights learn to do as their exponential moving average does."""

    def loss(params, average, batch):
        x, target = batch["x"], batch["x"][::-1]
        for s in range(2):
            x, target = stage(s, layer)(params[f"s{s}"], x), stage(s, layer)(average[f"s{s}"], target)
        return jnp.mean(jnp.square(x - lax.stop_gradient(target)))

    def step(state, batch):
        params, average = state
        value, grads = trained(loss, loop, params, average, batch)
        params = descend(params, grads)
        return (params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)), value

    return step, (per_stage(2), per_stage(2, lambda s: dense(s + 7))), regression()


def none_where_frozen(stage, loop):
    """What learns and what does not in two trees, each with None where the other has a leaf."""

    def step(state, batch):
        learns, frozen = state

        def loss(learns, batch):
            merged = jax.tree.map(lambda a, b: b if a is None else a, learns, frozen, is_leaf=lambda x: x is None)
            return loss_of(stage)(merged, batch)

        value, grads = trained(loss, loop, learns, batch)
        return (descend(learns, grads), frozen), value

    learns = per_stage(2, lambda s: {"w": normal(s, WIDTH, WIDTH), "b": None})
    return step, (learns, per_stage(2, lambda s: {"w": None, "b": normal(s, WIDTH)})), regression()


def aux(stage, loop):
    """Metrics of several kinds, of both stages, beside the loss."""

    def loss(params, batch):
        hidden = stage(0, layer)(params["s0"], batch["x"])
        out = stage(1, layer)(params["s1"], hidden)
        metrics = {"hits": jnp.sum(jnp.argmax(out, -1) == 0), "s0": jnp.abs(hidden).max(), "s1": out.mean(), "no": None}
        return squared_error(out, batch["y"]), metrics

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch, has_aux=True)
        return descend(params, grads), value

    return step, per_stage(2), regression()


def adversaries(stage, loop):
    """Two losses, two loops, each with the gradient of its own stage."""

    def made(params, z):
        return stage(0, layer)(params["s0"], z)

    def judged(params, x):
        return stage(1, layer)(params["s1"], x).sum(-1)

    def step(params, batch):
        def of_judge(s1, batch):
            p = params | {"s1": s1}
            fake = jax.nn.softplus(judged(p, made(p, batch["z"])))
            return jnp.mean(fake + jax.nn.softplus(-judged(p, batch["x"])))

        def of_maker(s0, batch):
            p = params | {"s0": s0}
            return jnp.mean(jax.nn.softplus(-judged(p, made(p, batch["z"]))))

        judge, g1 = trained(of_judge, loop, params["s1"], batch)
        maker, g0 = trained(of_maker, loop, params["s0"], batch)
        return {"s0": descend(params["s0"], g0), "s1": descend(params["s1"], g1)}, (judge, maker)

    return step, per_stage(2), {"x": normal(1, ROWS, WIDTH), "z": normal(2, ROWS, WIDTH)}


def decoding(stage, loop):
    """One step of decoding with a cache of keys in every stage."""

    def block(p, cache, x, position):
        keys = lax.dynamic_update_slice(cache["keys"], (x @ p["w"])[:, None], (0, position, 0))
        scores = jnp.where(jnp.arange(6) <= position, jnp.einsum("bd,btd->bt", x, keys), -1e9)
        return x + jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), keys) + p["b"], {"keys": keys}

    def step(state, batch):
        params, caches, position = state
        x, new = batch["x"], {}
        for s in params:
            x, new[s] = stage(int(s[1:]), block)(params[s], caches[s], x, position)
        return (params, new, position + 1), jnp.argmax(x, -1)

    caches = per_stage(2, lambda s: {"keys": np.zeros((ROWS, 6, WIDTH), np.float32)})
    return step, (per_stage(2), caches, np.int32(0)), regression()


def per_example(stage, loop):
    """Gradients of single rows, clipped one by one."""

    def clipped(params, batch):
        grads = jax.vmap(jax.grad(loss_of(stage)), (None, 0))(params, jax.tree.map(lambda x: x[:, None], batch))
        norms = jnp.sqrt(sum(jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 0.1 / norms), g, 1), grads), norms.sum()

    def step(params, batch):
        grads, norms = loop(clipped, size=SIZE, argnum=1)(params, batch)
        return descend(params, grads), norms

    return step, per_stage(2), regression()


def labels_outside_of_tasks(stage, loop):
    """The batch is what the first stage reads, and what the loss outside of tasks compares with."""

    def loss(params, batch):
        return jnp.mean(jnp.square(stage(1, layer)(params["s1"], stage(0, layer)(params["s0"], batch)) - batch))

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch)
        return descend(params, grads), value

    return step, per_stage(2), regression()["x"]


def odd_leaves(s):
    return dense(s) | {"none": None, "empty": (), "no rows": np.zeros((0, WIDTH), np.float32)}


CASES = {
    "none and empty leaves": of_block(lambda p, x: layer(p, x) + p["no rows"].sum(), odd_leaves),
    "1 microbatch on 8": of_block(layer, stages=8, rows=SIZE),
    "3 microbatches on 8": of_block(layer, stages=8, rows=3 * SIZE),
    "running statistics": running_statistics,
    "moving average": moving_average_teacher,
    "None where frozen": none_where_frozen,
    "has_aux": aux,
    "adversaries": adversaries,
    "decoding": decoding,
    "per example": per_example,
    "labels outside of tasks": labels_outside_of_tasks,
    "noise": of_optimizer(lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))),
    "inject_hyperparams": of_optimizer(lambda: optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)),
}
STAGES = {"1 microbatch on 8": 8, "3 microbatches on 8": 8}
TELLING = {"none and empty leaves", "running statistics", "None where frozen", "has_aux", "decoding"}
