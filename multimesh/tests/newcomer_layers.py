"""Layers and losses that someone new to the library tries first; see test_newcomer.py."""

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
