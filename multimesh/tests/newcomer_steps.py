"""Training steps that someone new to the library tries first; see test_newcomer.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from newcomer_layers import (
    BATCHES,
    BLOCKS,
    ROWS,
    SIZE,
    WIDTH,
    dense,
    descend,
    layer,
    loss_of,
    normal,
    of_block,
    of_optimizer,
    per_stage,
    regression,
    squared_error,
    trained,
)


def unet(stage, loop):
    """Down through the stages and up again, with a skip at each."""

    def loss(params, batch):
        x, skips = batch["x"], []
        for s in range(3):
            x, skip = stage(s, lambda p, x: (jnp.tanh(x @ p["down"]), x))(params[f"s{s}"], x)
            skips.append(skip)
        for s in reversed(range(3)):
            x = stage(s, lambda p, x, skip: jnp.tanh(x @ p["up"]) + skip)(params[f"s{s}"], x, skips[s])
        return squared_error(x, batch["y"])

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch)
        return descend(params, grads), value

    init = per_stage(3, lambda s: {"down": normal(s, WIDTH, WIDTH), "up": normal(s + 9, WIDTH, WIDTH)})
    return step, init, regression()


def encoder_decoder(stage, loop):
    """Two stages encode, two decode, and both of these attend to what was encoded."""

    def attend(p, x, memory):
        weights = jax.nn.softmax(jnp.einsum("btd,de,bse->bts", x, p["w"], memory))
        return x + weights @ memory + p["b"]

    def loss(params, batch):
        memory, x = batch["source"], batch["target"]
        for s in (0, 1):
            memory = stage(s, lambda p, x: attend(p, x, x))(params[f"s{s}"], memory)
        for s in (2, 3):
            x = stage(s, attend)(params[f"s{s}"], x, memory)
        return jnp.mean(jnp.square(x - batch["y"]))

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch)
        return descend(params, grads), value

    batch = {"source": normal(1, ROWS, 3, WIDTH), "target": normal(2, ROWS, 5, WIDTH), "y": normal(3, ROWS, 5, WIDTH)}
    return step, per_stage(4), batch


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


def loss_scale(first, choose):
    """A dynamic loss scale; ``first`` overflows or does not, and ``choose`` skips the update if it does."""

    def case(stage, loop):
        def step(state, batch):
            params, scale, good = state
            value, grads = trained(lambda p, b: scale * loss_of(stage)(p, b), loop, params, batch)
            finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
            new = choose(finite, params, jax.tree.map(lambda g: g / scale, grads))
            state = new, jnp.where(finite, 2 * scale, scale / 2), jnp.where(finite, good + 1, 0)
            return state, jnp.where(finite, value / scale, 0.0)

        return step, (per_stage(2), np.float32(first), np.int32(3)), regression()

    return case


def with_where(finite, params, grads):
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), descend(params, grads), params)


def with_cond(finite, params, grads):
    return lax.cond(finite, descend, lambda params, grads: params, params, grads)


def low_rank(stage, loop):
    """Only small factors beside frozen weights learn; these pass through."""

    def block(frozen, p, x):
        return x + jnp.tanh(x @ (frozen["w"] + p["a"] @ p["c"]) + frozen["b"])

    def step(state, batch):
        frozen, factors = state

        def loss(factors, batch):
            x = batch["x"]
            for s in range(2):
                x = stage(s, block)(frozen[f"s{s}"], factors[f"s{s}"], x)
            return squared_error(x, batch["y"])

        value, grads = trained(loss, loop, factors, batch)
        return (frozen, descend(factors, grads)), value

    factors = per_stage(2, lambda s: {"a": normal(s, WIDTH, 2), "c": normal(s + 3, 2, WIDTH)})
    return step, (per_stage(2), factors), regression()


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


def experts(stage, loop):
    """Top-1 routing in every stage; losses of balance and loads of experts are stacked outside of tasks."""

    def block(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 3)
        y = x + jnp.einsum("bd,edf,be->bf", x, p["experts"], gates * chosen)
        return y, {"balance": 3 * jnp.sum(chosen.mean(0) * gates.mean(0)), "load": chosen.sum(0)}

    def loss(params, batch):
        x, given = batch["x"], []
        for s in range(3):
            x, one = stage(s, block)(params[f"s{s}"], x)
            given.append(one)
        given = jax.tree.map(lambda *a: jnp.stack(a), *given)
        return squared_error(x, batch["y"]) + 0.01 * given["balance"].sum(), given["load"]

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch, has_aux=True)
        return descend(params, grads), value

    return (
        step,
        per_stage(3, lambda s: {"router": normal(s, WIDTH, 3), "experts": normal(s, 3, WIDTH, WIDTH)}),
        regression(),
    )


def hessian_vector(stage, loop):
    """Forward over reverse around a loop, then reverse over reverse."""

    def step(params, batch):
        def gradient(params):
            return trained(loss_of(stage), loop, params, batch)[1]

        ones = jax.tree.map(jnp.ones_like, params)
        return descend(params, jax.jvp(gradient, (params,), (ones,))[1], 0.01), jax.grad(
            lambda p: sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient(p)))
        )(params)

    return step, per_stage(2), regression()


def gradient_penalty(stage, loop):
    """The loss holds the gradient by its input."""

    def loss(params, batch):
        of_input = jax.grad(lambda x: loss_of(stage)(params, batch | {"x": x}))(batch["x"])
        return loss_of(stage)(params, batch) + jnp.mean(of_input**2)

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch)
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


def dropout(stage, loop):
    """A key in the state, split each step, folded with the number of the microbatch and of the stage."""

    def step(state, batch):
        params, key = state
        key, now = jax.random.split(key)

        def loss(params, batch):
            x, mine = batch["x"], jax.random.fold_in(now, batch["number"][0])
            for s in range(2):

                def dropped(p, x, key, s=s):
                    return layer(p, x) * jax.random.bernoulli(jax.random.fold_in(key, s), 0.7, x.shape)

                x = stage(s, dropped)(params[f"s{s}"], x, mine)
            return squared_error(x, batch["y"])

        value, grads = trained(loss, loop, params, batch)
        return (descend(params, grads), key), value

    return step, (per_stage(2), jax.random.PRNGKey(0)), regression() | {"number": np.arange(ROWS) % BATCHES}


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


def ensemble(stage, loop):
    """Three models at once."""

    def step(params, batch):
        each = jax.vmap(jax.value_and_grad(loss_of(stage)), (0, None))
        value, grads = loop(each, size=SIZE, argnum=1)(params, batch)
        return descend(params, grads), value

    return step, per_stage(2, lambda s: {"w": normal(s, 3, WIDTH, WIDTH), "b": normal(s, 3, WIDTH)}), regression()


def labels_outside_of_tasks(stage, loop):
    """The batch is what the first stage reads, and what the loss outside of tasks compares with."""

    def loss(params, batch):
        return jnp.mean(jnp.square(stage(1, layer)(params["s1"], stage(0, layer)(params["s0"], batch)) - batch))

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch)
        return descend(params, grads), value

    return step, per_stage(2), regression()["x"]


def images(stage, loop):
    """Bytes and small integers as the batch."""

    def loss(params, batch):
        x = stage(0, lambda p, x: layer(p, x.astype(jnp.float32) / 255))(params["s0"], batch["x"])
        x = jax.nn.log_softmax(stage(1, layer)(params["s1"], x))
        return -jnp.mean(x[jnp.arange(SIZE), batch["y"]]), (jnp.argmax(x, -1) == batch["y"]).sum()

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch, has_aux=True)
        return descend(params, grads), value

    pixels = np.arange(ROWS * WIDTH, dtype=np.uint8).reshape(ROWS, WIDTH)
    return step, per_stage(2), {"x": pixels, "y": np.arange(ROWS, dtype=np.int8)}


def complex_weights(stage, loop):
    def loss(params, batch):
        x = batch["x"].astype(jnp.complex64)
        for s in range(2):
            x = stage(s, lambda p, x: x + jnp.tanh(x @ p["w"]))(params[f"s{s}"], x)
        return jnp.mean(jnp.abs(x) ** 2)

    def step(params, batch):
        value, grads = trained(loss, loop, params, batch)
        return descend(params, jax.tree.map(jnp.conj, grads)), value

    init = per_stage(2, lambda s: {"w": (normal(s, WIDTH, WIDTH) + 1j * normal(s + 4, WIDTH, WIDTH)).astype("c8")})
    return step, init, regression()


def odd_leaves(s):
    return dense(s) | {"none": None, "empty": (), "no rows": np.zeros((0, WIDTH), np.float32)}


CASES = {name: of_block(block) for name, block in BLOCKS.items()} | {
    "none and empty leaves": of_block(lambda p, x: layer(p, x) + p["no rows"].sum(), odd_leaves),
    "1 microbatch on 8": of_block(layer, stages=8, rows=SIZE),
    "3 microbatches on 8": of_block(layer, stages=8, rows=3 * SIZE),
    "U-Net": unet,
    "encoder-decoder": encoder_decoder,
    "running statistics": running_statistics,
    "moving average": moving_average_teacher,
    "scaled loss": loss_scale(2.0**8, with_where),
    "scaled loss that overflows": loss_scale(2.0**127, with_where),
    "scaled loss with cond": loss_scale(2.0**8, with_cond),
    "scaled loss with cond that overflows": loss_scale(2.0**127, with_cond),
    "low rank": low_rank,
    "None where frozen": none_where_frozen,
    "has_aux": aux,
    "experts": experts,
    "Hessian": hessian_vector,
    "gradient penalty": gradient_penalty,
    "adversaries": adversaries,
    "decoding": decoding,
    "dropout": dropout,
    "per example": per_example,
    "ensemble": ensemble,
    "labels outside of tasks": labels_outside_of_tasks,
    "images": images,
    "complex": complex_weights,
    "apply_if_finite": of_optimizer(lambda: optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3)),
    "lion": of_optimizer(lambda: optax.lion(0.01)),
    "noise": of_optimizer(lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))),
    "inject_hyperparams": of_optimizer(lambda: optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)),
}
STAGES = {"U-Net": 3, "encoder-decoder": 4, "experts": 3, "1 microbatch on 8": 8, "3 microbatches on 8": 8}
TELLING = {
    *("while", "pure_callback", "none and empty leaves", "running statistics", "scaled loss with cond"),
    *("None where frozen", "has_aux", "decoding"),
}
