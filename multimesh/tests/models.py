"""Tiny models that are written once and run whole or split over tasks.

A model takes ``stage``: ``stage(s, fn)`` returns the function that runs ``fn`` as stage ``s``. With ``plain`` that is
``fn`` itself, so the same code without a single call to MultiMesh is the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Stage = Callable[[int, Callable[..., Any]], Callable[..., Any]]

WIDTH, HIDDEN, HEADS, VOCAB, SEQUENCE, EXPERTS = 16, 32, 2, 24, 8, 4


def plain(stage: int, fn: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Run a stage where it stands: the reference."""
    return fn


@dataclasses.dataclass(frozen=True)
class Model:
    """``loss(params, batch, stage)`` is a scalar; ``owners(params)`` has the stages that use a leaf, at that leaf."""

    name: str
    init: Callable[[int], Any]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any, Stage], Any]

    def owners(self, params: Any) -> Any:
        last = len(params["stages"]) - 1
        shared = {"emb": (0, last)}
        owner = {"stages": [jax.tree.map(lambda _, s=s: (s,), p) for s, p in enumerate(params["stages"])]}
        return owner | {k: jax.tree.map(lambda _, k=k: shared[k], v) for k, v in params.items() if k != "stages"}


def normal(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def _regression(rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + seed)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1, keepdims=True)).astype(np.float32)}


def mlp_params(s: int) -> dict[str, np.ndarray]:
    return {
        "up": normal(3 * s, WIDTH, HIDDEN),
        "bias": 0.1 * normal(3 * s + 1, HIDDEN),
        "down": normal(3 * s + 2, HIDDEN, WIDTH),
    }


def mlp_block(p: Any, x: Any) -> Any:
    return x + product(jnp.tanh(x @ p["up"] + p["bias"]), p["down"], x)


def product(x: Any, w: Any, like: Any) -> Any:
    """Return a product laid out as ``like``: JAX needs that where Explicit axes divide the summed dimension."""
    if not any(jax.typeof(x).sharding.spec[-1:]):
        return x @ w
    return jnp.matmul(x, w, out_sharding=jax.typeof(like).sharding.spec)


def squared_error(x: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(x.mean(-1, keepdims=True) - y))


def _mlp_init(stages: int) -> dict[str, Any]:
    return {"stages": [mlp_params(s) for s in range(stages)]}


def _mlp_loss(params: Any, batch: Any, stage: Stage) -> Any:
    *front, last = params["stages"]
    x = batch["x"]
    for s, p in enumerate(front):
        x = stage(s, mlp_block)(p, x)
    return stage(len(front), lambda p, x, y: squared_error(mlp_block(p, x), y))(last, x, batch["y"])


def _skip_loss(params: Any, batch: Any, stage: Stage) -> Any:
    """The first stage's output is added again after the last one, and the loss stands outside every task."""
    x = batch["x"]
    first = None
    for s, p in enumerate(params["stages"]):
        x = stage(s, mlp_block)(p, x)
        first = x if first is None else first
    return squared_error(x + 0.5 * first, batch["y"])


def _dropout_batch(rows: int, seed: int) -> dict[str, Any]:
    return _regression(rows, seed) | {"key": jax.random.split(jax.random.key(seed), rows)}


def _dropout_loss(params: Any, batch: Any, stage: Stage) -> Any:
    """One PRNG key a row, so that a row's mask does not depend on the microbatch that it is in."""

    def block(s: int) -> Callable[..., Any]:
        def f(p: Any, x: Any, key: Any) -> Any:
            keep = jax.vmap(lambda k: jax.random.bernoulli(jax.random.fold_in(k, s), 0.75, (WIDTH,)))(key)
            return jnp.where(keep, mlp_block(p, x) / 0.75, 0.0)

        return f

    x = batch["x"]
    for s, p in enumerate(params["stages"]):
        x = stage(s, block(s))(p, x, batch["key"])
    return squared_error(x, batch["y"])


def attention_params(s: int) -> dict[str, np.ndarray]:
    return {
        "gain": np.ones(WIDTH, np.float32),
        "qkv": normal(10 * s, WIDTH, HEADS, 3 * WIDTH // HEADS),
        "out": normal(10 * s + 1, WIDTH, WIDTH).reshape(HEADS, WIDTH // HEADS, WIDTH),
        "mlp": mlp_params(50 + s),
    }


def attention_block(p: Any, x: Any) -> Any:
    h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["gain"]
    q, k, v = jnp.split(jnp.einsum("btd,dhe->bthe", h, p["qkv"]), 3, -1)
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), -1)
    x = x + jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), p["out"])
    return mlp_block(p["mlp"], x)


def take(emb: Any, tokens: Any) -> Any:
    """Rows of an embedding. On Explicit axes JAX has to be told their layout: that of the tokens."""
    spec = jax.typeof(tokens).sharding.spec
    return emb.at[tokens].get(out_sharding=jax.P(*spec, None)) if any(spec) else emb[tokens]


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def _transformer_init(stages: int) -> dict[str, Any]:
    return {"emb": 0.5 * normal(7, VOCAB, WIDTH), "stages": [attention_params(s) for s in range(stages)]}


def _tokens(rows: int, seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(200 + seed).integers(0, VOCAB, (rows, SEQUENCE + 1)).astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def _transformer_loss(params: Any, batch: Any, stage: Stage) -> Any:
    """The embedding is looked up on the first stage and is the output projection on the last one."""
    *front, last = params["stages"]
    x = stage(0, lambda emb, p, tokens: attention_block(p, take(emb, tokens)))(params["emb"], front[0], batch["x"])
    for s, p in enumerate(front[1:], 1):
        x = stage(s, attention_block)(p, x)

    def head(emb: Any, p: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(attention_block(p, x) @ emb.T, labels)

    return stage(len(front), head)(params["emb"], last, x, batch["y"])


def moe_params(s: int) -> dict[str, np.ndarray]:
    return {
        "router": normal(20 * s, WIDTH, EXPERTS),
        "up": normal(20 * s + 1, WIDTH, EXPERTS * HIDDEN).reshape(WIDTH, EXPERTS, HIDDEN),
        "down": normal(20 * s + 2, HIDDEN, EXPERTS * WIDTH).reshape(HIDDEN, EXPERTS, WIDTH),
    }


def moe_block(p: Any, x: Any) -> tuple[Any, Any]:
    """Top-1 routing; the second result is the load-balancing loss of this layer."""
    gates = jax.nn.softmax(x @ p["router"], -1)
    mask = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS, dtype=x.dtype)
    hidden = jax.nn.gelu(jnp.einsum("bd,deh->beh", x, p["up"]))
    y = jnp.einsum("beh,hed,be->bd", hidden, p["down"], gates * mask)
    return x + y, EXPERTS * jnp.sum(mask.mean(0) * gates.mean(0))


def _moe_loss(params: Any, batch: Any, stage: Stage) -> Any:
    """Every stage gives an auxiliary loss; they are added between the tasks."""
    x, balance = batch["x"], 0.0
    for s, p in enumerate(params["stages"]):
        x, aux = stage(s, moe_block)(p, x)
        balance = balance + aux
    return squared_error(x, batch["y"]) + 0.01 * balance


MLP = Model("mlp", _mlp_init, _regression, _mlp_loss)
SKIP = Model("skip", _mlp_init, _regression, _skip_loss)
DROPOUT = Model("dropout", _mlp_init, _dropout_batch, _dropout_loss)
TRANSFORMER = Model("transformer", _transformer_init, _tokens, _transformer_loss)
MOE = Model("moe", lambda stages: {"stages": [moe_params(s) for s in range(stages)]}, _regression, _moe_loss)

MODELS = (MLP, SKIP, DROPOUT, TRANSFORMER, MOE)
