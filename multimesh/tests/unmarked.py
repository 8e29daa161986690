"""Models without a single mark: a loss of parameters and a batch each, as their authors would write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from models import (
    SEQUENCE,
    VOCAB,
    WIDTH,
    attention_block,
    attention_params,
    cross_entropy,
    mlp_block,
    mlp_params,
    moe_block,
    moe_params,
    normal,
)

DEPTH = 8

Loss = Callable[[Any, Any], Any]


def stacked(make: Callable[[int], Any], depth: int = DEPTH) -> Any:
    return jax.tree.map(lambda *rows: np.stack(rows), *(make(10 * i) for i in range(depth)))


def layers(make: Callable[[int], Any], depth: int = DEPTH) -> list[Any]:
    return [make(10 * i) for i in range(depth)]


def regression() -> dict[str, np.ndarray]:
    return {"x": normal(99, 8, WIDTH), "y": normal(98, 8, WIDTH)}


def tokens() -> dict[str, np.ndarray]:
    text = np.random.default_rng(5).integers(0, VOCAB, (8, SEQUENCE + 1)).astype(np.int32)
    return {"x": text[:, :-1], "y": text[:, 1:]}


def error(x: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(x - y))


def mlp(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for p in params:
        x = mlp_block(p, x)
    return error(x, batch["y"])


def scan(params: Any, batch: Any) -> Any:
    """Parameters are cast first, and each layer gives a result of its own."""
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    x, means = jax.lax.scan(jax.checkpoint(lambda x, p: (mlp_block(p, x), jnp.mean(x**2))), batch["x"], half)
    return error(x, batch["y"]) + jnp.sum(means * jnp.arange(DEPTH))


def backward_scan(params: Any, batch: Any) -> Any:
    x, means = jax.lax.scan(lambda x, p: (mlp_block(p, x), jnp.mean(x**2)), batch["x"], params, reverse=True)
    return error(x, batch["y"]) + jnp.sum(means * jnp.arange(len(means)))


def checkpointed(params: Any, batch: Any) -> Any:
    return jax.checkpoint(backward_scan)(params, batch)


def indexed(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for i in range(DEPTH):
        x = mlp_block(jax.tree.map(lambda w, i=i: w[i], params), x)
    return error(x, batch["y"])


def u_net(params: Any, batch: Any) -> Any:
    x, skips = batch["x"], []
    for p in params[: DEPTH // 2]:
        x = mlp_block(p, x)
        skips.append(x)
    for p in params[DEPTH // 2 :]:
        x = mlp_block(p, x + skips.pop())
    return error(x, batch["y"])


def towers(params: Any, batch: Any) -> Any:
    """Two encoders, written layer by layer side by side, that meet in the loss."""
    one, two = batch["x"], batch["y"]
    for p, q in zip(params[: DEPTH // 2], params[DEPTH // 2 :], strict=True):
        one, two = mlp_block(p, one), mlp_block(q, two)
    return -jnp.mean(jax.nn.log_softmax(one @ two.T))


def gpt(params: Any, batch: Any) -> Any:
    """Tied embeddings, and weight decay in the loss."""
    x = params["emb"][batch["x"]]
    for p in params["blocks"]:
        x = attention_block(p, x)
    decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(params["blocks"]))
    return cross_entropy(x @ params["emb"].T, batch["y"]) + 1e-4 * decay


def encoder_decoder(params: Any, batch: Any) -> Any:
    source = params["emb"][batch["x"]]
    for p in params["encoder"]:
        source = attention_block(p, source)
    x = params["emb"][batch["y"]]
    for p in params["decoder"]:
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, source))
        x = attention_block(p, x + jnp.einsum("bts,bsd->btd", scores, source))
    return cross_entropy(x @ params["emb"].T, batch["y"])


def moe(params: Any, batch: Any) -> Any:
    x, balance = batch["x"], 0.0
    for p in params:
        x, loss = moe_block(p, x)
        balance = balance + loss
    return error(x, batch["y"]) + 0.01 * balance


def mamba(params: Any, batch: Any) -> Any:
    """A scan over time in every layer, in a scan over layers."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        decay, inputs = jax.nn.sigmoid(x @ p["decay"]), x @ p["input"]

        def move(h: Any, gates: Any) -> tuple[Any, Any]:
            h = gates[0] * h + (1 - gates[0]) * gates[1]
            return h, h

        steps = (jnp.swapaxes(decay, 0, 1), jnp.swapaxes(inputs, 0, 1))
        _, states = jax.lax.scan(move, jnp.zeros_like(x[:, 0]), steps)
        return x + jnp.swapaxes(states, 0, 1) @ p["out"], None

    x, _ = jax.lax.scan(layer, params["emb"][batch["x"]], params["layers"])
    return cross_entropy(x @ params["emb"].T, batch["y"])


def vit(params: Any, batch: Any) -> Any:
    """Patches by a convolution, blocks, a mean over patches and a head."""
    images = jnp.tile(batch["x"][:, :, None, None], (1, 1, 8, 3)).reshape(batch["x"].shape[0], 16, 8, 3)
    x = jax.lax.conv_general_dilated(
        images, params["patch"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = x.reshape(x.shape[0], -1, WIDTH) + params["place"]
    for p in params["blocks"]:
        x = attention_block(p, x)
    return error(x.mean(1) @ params["head"], batch["y"])


def _mamba_layer(seed: int) -> dict[str, np.ndarray]:
    return {name: normal(seed + i, WIDTH, WIDTH) for i, name in enumerate(("decay", "input", "out"))}


def _embedding() -> np.ndarray:
    return 0.5 * normal(7, VOCAB, WIDTH)


class Unmarked(NamedTuple):
    """A model, how its parameters and its batch are made, and bytes that stages get if a person cuts it in four."""

    loss: Loss
    params: Callable[[], Any]
    batch: Callable[[], Any] = regression
    hand: int | None = None
    """Of a microbatch of two rows, with a cut in each quarter of the layers."""


ROW = 2 * WIDTH * 4
"""Bytes of what one layer of two rows hands to the next."""

MODELS = {
    "mlp": Unmarked(mlp, lambda: layers(mlp_params), hand=3 * ROW),
    "scan": Unmarked(scan, lambda: stacked(mlp_params), hand=3 * ROW + 4 * 6),
    "backward scan": Unmarked(backward_scan, lambda: stacked(mlp_params), hand=3 * ROW + 4 * 6),
    "few rows": Unmarked(backward_scan, lambda: stacked(mlp_params, 3)),
    "checkpointed": Unmarked(checkpointed, lambda: stacked(mlp_params), hand=3 * ROW + 4 * 6),
    "indexed": Unmarked(indexed, lambda: stacked(mlp_params), hand=3 * ROW),
    "u-net": Unmarked(u_net, lambda: layers(mlp_params), hand=7 * ROW),
    "towers": Unmarked(towers, lambda: layers(mlp_params), hand=3 * ROW),
    "gpt": Unmarked(
        gpt,
        lambda: {"emb": _embedding(), "blocks": layers(attention_params)},
        tokens,
        3 * ROW * SEQUENCE + VOCAB * WIDTH * 4 + 48 * 4,
    ),
    "encoder-decoder": Unmarked(
        encoder_decoder,
        lambda: {"emb": _embedding(), "encoder": layers(attention_params, 4), "decoder": layers(attention_params, 4)},
        tokens,
        4 * ROW * SEQUENCE + 2 * VOCAB * WIDTH * 4 + 2 * SEQUENCE * 4,
    ),
    "moe": Unmarked(moe, lambda: layers(moe_params), hand=3 * (ROW + 4)),
    "mamba": Unmarked(
        mamba,
        lambda: {"emb": _embedding(), "layers": stacked(_mamba_layer)},
        tokens,
        3 * ROW * SEQUENCE + VOCAB * WIDTH * 4,
    ),
    "vit": Unmarked(
        vit,
        lambda: {
            "patch": normal(3, 4, 4, 3, WIDTH),
            "place": normal(4, 8, WIDTH),
            "blocks": layers(attention_params),
            "head": normal(5, WIDTH, WIDTH),
        },
        hand=3 * ROW * 8,
    ),
}
