"""What someone new to the library would try first: one step of training each, with the values and homes of plain jit.

A case is ``case(stage, loop) -> (step, state, batch)`` and is written once: ``stage`` places a part and ``loop``
cuts the batch, or both are plain JAX. In the state and the results what lies below the key ``"s1"`` belongs to stage 1.
"""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from pipelines import Split, assert_same, microbatched, submeshes

import multimesh as mm

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


def while_loop(p, x):
    rest = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.9 * c[1]), (0, lax.stop_gradient(x)))[1]
    return layer(p, x) + rest


def reversed_scan(p, x):
    def body(carry, r):
        return carry * 0.5 + r, jnp.sin(carry) @ p["w"]

    carry, ys = lax.scan(body, x, jnp.arange(3.0), reverse=True)
    return carry + ys.sum(0) + p["b"]


@jax.custom_vjp
def rounded(x, scale):
    return jnp.round(x * scale) / scale


rounded.defvjp(
    lambda x, scale: (rounded(x, scale), (x, scale)), lambda r, g: (g * (jnp.abs(r[0]) < 2), jnp.zeros_like(r[1]))
)


@jax.custom_jvp
def twice_as_steep(x):
    return jnp.tanh(x)


twice_as_steep.defjvp(lambda primals, tangents: (twice_as_steep(*primals), 2.0 * tangents[0]))


@jax.custom_vjp
def sine_on_host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


sine_on_host.defvjp(
    lambda x: (sine_on_host(x), x),
    lambda x, g: (g * jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x),),
)

TABLE = normal(3, 64, WIDTH)
TABLE_ELSEWHERE = jax.device_put(TABLE, DEVICES[5])

BLOCKS = {
    "scan": lambda p, x: lax.scan(lambda x, _: (layer(p, x), x.sum()), x, None, length=3)[0],
    "reversed scan": reversed_scan,
    "cond": lambda p, x: lax.cond(x.sum() > 0, lambda x: layer(p, x), lambda x: x * p["b"], x),
    "switch": lambda p, x: lax.switch(jnp.argmax(p["b"]) % 2, [lambda x: layer(p, x), lambda x: x @ p["w"]], x),
    "while": while_loop,
    "fori": lambda p, x: lax.fori_loop(0, 3, lambda i, x: layer(p, x) * (i + 1) / 3, x),
    "associative scan": lambda p, x: lax.associative_scan(jnp.multiply, 1 + 0.1 * x @ p["w"]) + p["b"],
    "solve": lambda p, x: jnp.linalg.solve(jnp.eye(WIDTH) + 0.1 * p["w"] @ p["w"].T, x.T).T + p["b"],
    "svd": lambda p, x: x @ p["w"] * jnp.linalg.svd(p["w"], compute_uv=False)[0] + p["b"],
    "fft": lambda p, x: jnp.fft.irfft(2 * jnp.fft.rfft(x @ p["w"])) + p["b"],
    "sort and scatter": lambda p, x: jnp.sort(x @ p["w"], -1).at[jnp.array([0, 1]), 1].add(p["b"][0]) + p["b"],
    "custom_vjp": lambda p, x: rounded(layer(p, x), 8.0),
    "custom_jvp": lambda p, x: twice_as_steep(layer(p, x)),
    "pure_callback": lambda p, x: layer(p, sine_on_host(x)),
    "large constants": lambda p, x: layer(p, x) + (x @ TABLE.T) @ TABLE_ELSEWHERE / 64,
}


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
    *("while", "pure_callback", "none and empty leaves", "U-Net", "encoder-decoder", "running statistics"),
    *("scaled loss that overflows", "scaled loss with cond", "None where frozen", "has_aux", "adversaries"),
    *("labels outside of tasks", "decoding", "apply_if_finite"),
}


def home(path):
    """Stage of the innermost key like ``"s1"`` in a path of a pytree."""
    found = re.findall(r"\['s(\d)'\]", jax.tree_util.keystr(path))
    return int(found[-1]) if found else None


def put(split, tree):
    def at_home(path, x):
        s = home(path)
        return x if s is None else jax.device_put(x, NamedSharding(split.mesh(s), P()))

    return jax.tree.map_with_path(at_home, tree)


def assert_all_at_home(split, tree):
    for path, x in jax.tree.flatten_with_path(tree)[0]:
        s = home(path)
        assert s is None or set(x.devices()) == split.devices(s), f"{jax.tree_util.keystr(path)}: {x.devices()}"


def check(case, split, compilations, rtol=1e-5):
    """Two steps: values, homes, donation; the second compiles nothing."""
    step, want, batch = case(plain, microbatched)
    reference = jax.jit(step)
    step, state, _ = case(split, mm.microbatch)
    placed, got = mm.jit(step, donate_argnums=0), put(split, state)
    for i in range(2):
        want, expected = reference(want, batch)
        before = len(compilations)
        got, result = placed(got, batch)
        assert i == 0 or len(compilations) == before
        assert_same((jax.tree.map(jnp.copy, got), result), (want, expected), rtol)
        assert_all_at_home(split, (got, result))
    return placed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in TELLING else pytest.mark.full) for n in CASES])
def test_a_step(name, compilations):
    check(CASES[name], Split(submeshes(STAGES.get(name, 2), (1,))), compilations)


def mesh(*devices, shape=None):
    return Mesh(DEVICES[list(devices)].reshape(shape or -1), ("data", "model")[: len(shape or "1")])


@pytest.mark.parametrize(
    "meshes",
    [
        (mesh(0, 2, 4, 6), mesh(1, 3, 5, 7)),
        pytest.param((mesh(7, 3), mesh(6, 0)), marks=pytest.mark.full),
        pytest.param((mesh(0, 3, 5, 6, shape=(2, 2)), mesh(1, 2, 4, 7, shape=(2, 2))), marks=pytest.mark.full),
        pytest.param((mesh(5, 6, 7), mesh(0, 1, 2, 3, 4)), marks=pytest.mark.full),
    ],
    ids=["every other", "backwards", "scattered", "3 to 5"],
)
def test_devices_in_any_order(meshes, compilations):
    check(of_block(layer), Split(meshes), compilations)


@pytest.mark.full
def test_double_precision(compilations):
    """The same function with 32 bits, with 64, and with 32 again."""
    split = Split(submeshes(2, (1,)))
    single = check(of_block(layer), split, compilations)
    with jax.enable_x64(True):

        def case(stage, loop):
            step, params, batch = of_block(layer)(stage, loop)
            return step, *jax.tree.map(lambda x: x.astype(np.float64), (params, batch))

        check(case, split, compilations, rtol=1e-13)
        _, params, batch = case(plain, None)
        assert single(params, batch)[1].dtype == jnp.float64
    before = len(compilations)
    _, params, batch = of_block(layer)(plain, None)
    assert single(put(split, params), batch)[1].dtype == jnp.float32
    assert len(compilations) == before


def test_functions_that_share_arrays(compilations):
    """One makes the parameters in tasks, one trains and donates them, one evaluates."""
    split = Split(submeshes(2, (1,)))
    step, _, batch = of_block(layer)(split, mm.microbatch)

    def init(stage, key):
        return {
            f"s{s}": stage(s, lambda k, s=s: jax.tree.map(lambda x: jax.random.normal(k, x.shape), dense(s)))(key)
            for s in range(2)
        }

    key = jax.random.key(0)
    params, want = mm.jit(functools.partial(init, split))(key), jax.jit(functools.partial(init, plain))(key)
    assert_all_at_home(split, params)
    train, evaluate = mm.jit(step, donate_argnums=0), mm.jit(loss_of(split))
    reference = jax.jit(lambda p, b: (loss_of(plain)(p, b), *of_block(layer)(plain, microbatched)[0](p, b)))
    for i in range(3):
        before = len(compilations)
        got = evaluate(params, batch)
        params, value = train(params, batch)
        assert i == 0 or len(compilations) == before
        expected, want, wanted = reference(want, batch)
        assert_same((got, value, jax.tree.map(jnp.copy, params)), (expected, wanted, want))


@pytest.mark.full
def test_first_calls_in_several_threads():
    split = Split(submeshes(2, (1,)))
    step, params, batch = of_block(layer)(split, mm.microbatch)
    want = jax.jit(of_block(layer)(plain, microbatched)[0])(params, batch)
    shared, errors = mm.jit(step), []

    def work():
        try:
            for f in (shared, mm.jit(lambda *args: step(*args))):
                assert_same(f(params, batch), want)
        except BaseException as e:  # noqa: BLE001 - handed to the main thread
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_callbacks_in_tasks_happen_once_a_microbatch(capfd):
    """In the order that plain jit has within a stage, where they are ordered."""
    seen = {0: [], 1: []}

    def case(stage):
        def block(s):
            def f(p, x):
                def note(v):
                    seen[s].append(float(v))
                    return np.float32(2)

                jax.debug.print("stage {}", s)
                x = x * io_callback(
                    note, jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(x.sum()), ordered=True
                )
                return layer(p, x)

            return f

        def loss(params, batch):
            x = stage(0, block(0))(params["s0"], batch["x"])
            return squared_error(stage(1, block(1))(params["s1"], x), batch["y"])

        loop = microbatched if stage is plain else mm.microbatch
        return lambda params, batch: trained(loss, loop, params, batch)

    results, notes, lines = [], [], []
    for jit, stage in ((jax.jit, plain), (mm.jit, Split(submeshes(2, (1,))))):
        results.append(jit(case(stage))(per_stage(2), regression()))
        jax.effects_barrier()
        notes.append({s: np.array(seen[s]) for s in seen})
        lines.append(sorted(capfd.readouterr().out.splitlines()))
        seen[0].clear(), seen[1].clear()
    assert_same(results[1], results[0])
    assert len(notes[0][0]) == BATCHES
    assert_same(notes[1], notes[0])
    assert lines[0] == lines[1] == ["stage 0"] * BATCHES + ["stage 1"] * BATCHES


def test_orbax_takes_a_state_and_gives_it_back(tmp_path, compilations):
    """The restored state has the layouts that were saved, and goes on as the one that was not."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    split = Split(submeshes(2, (2,)))
    step, state, batch = of_optimizer(lambda: optax.adam(1e-2))(split, mm.microbatch)
    train = mm.jit(step)
    state, _ = train(put(split, state), batch)
    state, _ = train(state, batch)
    with checkpoint.StandardCheckpointer() as files:
        files.save(tmp_path / "state", state)
        files.wait_until_finished()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = files.restore(tmp_path / "state", like)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)
    before = len(compilations)
    assert_same(train(restored, batch), train(state, batch), rtol=0)
    assert len(compilations) == before


def test_a_loop_in_a_loop_is_refused():
    split = Split(submeshes(2, (1,)))

    def inner(params, batch):
        return mm.microbatch(loss_of(split), size=1, argnum=1)(params, batch)

    with pytest.raises(
        mm.MultiMeshError, match=r"test_newcomer\.py:\d+.*a microbatch loop inside another; use one loop"
    ):
        mm.jit(mm.microbatch(inner, size=2, argnum=1))(per_stage(2), regression())


TOKENS = (np.arange(ROWS * 5).reshape(ROWS, 5) * 7 % 11).astype(np.int32)


def next_token(logits, tokens):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    return -jnp.mean(picked)


def registered(split, first, second):
    return mm.register_task(first, mesh=split.mesh(0)), mm.register_task(second, mesh=split.mesh(1))


@pytest.mark.full
@pytest.mark.flax
@pytest.mark.filterwarnings("error")  # tokens are inputs of the first stage and labels of the last
def test_a_linen_transformer_with_tied_embeddings_and_dropout():
    nn = pytest.importorskip("flax.linen")
    split = Split(submeshes(2, (1,)))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm()(x)
            mask = nn.make_causal_mask(x[..., 0])
            x = x + nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False, use_bias=False)(
                h, mask=mask
            )
            h = nn.Dense(WIDTH)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
            return x + nn.Dropout(0.1, deterministic=False)(h)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(11, WIDTH, name="embed")
            x = embed(tokens)
            for i in range(2):
                x = Block(name=f"s{i}")(x)
            with jax.named_scope("head"):
                return embed.attend(nn.LayerNorm(name="norm")(x))

    def step(loop):
        def loss(params, batch, key):
            return next_token(Transformer().apply(params, batch, rngs={"dropout": key}), batch)

        def step(params, batch, key):
            value, grads = loop(jax.value_and_grad(loss), size=SIZE, argnum=1)(params, batch, key)
            return descend(params, grads), value

        return step

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.device_get(jax.jit(Transformer().init)(keys, TOKENS))
    one, two = registered(split, r"(embed|s0)(?!\d)", r"(s1|norm|head)(?!\d)")
    with one, two:
        got = mm.jit(step(mm.microbatch))(params, TOKENS, jax.random.key(2))
    assert_same(got, jax.jit(step(microbatched))(params, TOKENS, jax.random.key(2)))
    assert_all_at_home(split, got)


@pytest.mark.full
@pytest.mark.flax
def test_batch_norm_of_linen():
    nn = pytest.importorskip("flax.linen")
    split = Split(submeshes(2, (1,)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                with jax.named_scope(f"part{i}"):
                    x = nn.Conv(3, (3,), name=f"s{i}")(x)
            return nn.BatchNorm(use_running_average=False, momentum=0.9, name="s2")(x).mean((1, 2))

    def case(loop):
        def loss(params, kept, batch):
            out, new = Net().apply({"params": params, "batch_stats": kept}, batch["x"], mutable=["batch_stats"])
            return jnp.mean(jnp.square(out - batch["y"])), new["batch_stats"]

        def step(params, kept, batch):
            (value, kept), grads = trained(loss, loop, params, kept, batch, has_aux=True)
            return descend(params, grads), jax.tree.map(lambda x: x / BATCHES, kept), value

        return step

    batch = {"x": normal(0, ROWS, 6, 3), "y": normal(1, ROWS)}
    state = jax.device_get(jax.jit(Net().init)(jax.random.key(0), batch["x"]))
    args = state["params"], state["batch_stats"], batch
    one, two = registered(split, r"part0", r"(part1|s2)")
    with one, two:
        got = mm.jit(case(mm.microbatch))(*args)
    assert_same(got, jax.jit(case(microbatched))(*args))
    assert_all_at_home(Split((*split.meshes, split.mesh(1))), got)


@pytest.mark.full
@pytest.mark.flax
def test_an_nnx_transformer_with_batch_norm_and_dropout():
    nnx = pytest.importorskip("flax.nnx")
    split = Split(submeshes(2, (1,)))

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=2, in_features=WIDTH, decode=False, use_bias=False, rngs=rngs
            )
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.batch_norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.dropout(self.batch_norm(nnx.gelu(self.dense(x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
            self.s0, self.s1 = Block(rngs), Block(rngs)

        def __call__(self, tokens):
            return self.embed.attend(self.s1(self.s0(self.embed(tokens))))

    def case(loop, scope):
        graph, params, rest = nnx.split(scope(Transformer(nnx.Rngs(0))), nnx.Param, ...)

        def loss(params, rest, batch):
            model = nnx.merge(graph, params, rest, copy=True)  # or Flax refuses to change statistics under grad
            return next_token(model(batch), batch), nnx.state(model, nnx.BatchStat)

        def step(params, rest, batch):
            (value, kept), grads = trained(loss, loop, params, rest, batch, has_aux=True)
            return *map(nnx.to_pure_dict, (descend(params, grads), kept)), value

        return step, params, rest, TOKENS

    step, *args = case(mm.microbatch, mm.scope_nnx)
    one, two = registered(split, r"(embed|s0)(?!\d)", r"s1(?!\d)")
    with one, two:
        got = mm.jit(step)(*args)
    step, *args = case(microbatched, lambda model: model)
    assert_same(got, jax.jit(step)(*args))
    assert_all_at_home(split, got)
