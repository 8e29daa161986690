"""Work that is not the same in each call, through one pipeline: packed texts, small batches, evaluation, more losses.

    python examples/variable_work.py

A small decoder in four stages, cut by ``mm.pipeline``. Each line has the loss of a recipe as a pipeline, the loss of
the same code under plain ``jax.jit``, and the largest difference between their gradients.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import multimesh as mm

VOCAB, WIDTH, LAYERS, LENGTH, ROWS, SIZE = 32, 16, 4, 12, 8, 2
MESHES = [Mesh(np.array([device]), ("data",)) for device in jax.devices()[:4]]
RNG = np.random.default_rng(0)


def draw(*shape):
    """Return random weights."""
    return (RNG.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)


def init():
    """Return parameters."""
    layers = [{"qkv": draw(WIDTH, 3 * WIDTH), "out": draw(WIDTH, WIDTH)} for _ in range(LAYERS)]
    return {"embed": draw(VOCAB, WIDTH), "layers": layers, "head": draw(WIDTH, VOCAB), "value": draw(WIDTH, 1)}


def hidden(params, x, segments):
    """Run the layers. A token sees earlier tokens of its own text only."""
    sees = (segments[:, :, None] == segments[:, None, :]) & np.tri(segments.shape[1], dtype=bool)
    for w in params["layers"]:
        q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
        scores = jnp.where(sees, jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5, -1e9)
        x = x + jnp.tanh(jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v) @ w["out"])
    return x


def text_loss(params, x, batch):
    """The sum of the losses of tokens; those of weight 0 are padding."""
    scores = jax.nn.log_softmax(x @ params["head"])
    picked = jnp.take_along_axis(scores, batch["labels"][..., None], -1)[..., 0]
    return -jnp.sum(picked * batch["weights"])


def packed(params, batch):
    """Packed texts: the sum of losses, over the sum of weights once all microbatches are done."""
    return text_loss(params, hidden(params, params["embed"][batch["tokens"]], batch["segments"]), batch)


def two_losses(params, batch):
    """The text, and the length of each text up to a token."""
    x = hidden(params, params["embed"][batch["tokens"]], batch["segments"])
    error = jnp.square((x @ params["value"])[..., 0] - batch["places"] / LENGTH)
    return text_loss(params, x, batch) + 0.1 * jnp.sum(error * batch["weights"])


def penalized(params, batch):
    """A penalty for the gradient by the embedded tokens: a gradient through all stages, differentiated again."""
    x = params["embed"][batch["tokens"]]
    loss, slope = jax.value_and_grad(lambda x: text_loss(params, hidden(params, x, batch["segments"]), batch))(x)
    return loss + 0.1 * jnp.sum(jnp.square(slope))


def step_of(loss, loop):
    """Loss and gradients, as means over tokens."""

    def one(params, batch):
        return jax.value_and_grad(loss)(params, batch), jnp.sum(batch["weights"])

    return loop(one)


def as_pipeline(one):
    """Return ``one`` in a loop over microbatches: the sums of its results, divided once by the sum of weights."""
    return mm.microbatch(one, size=SIZE, argnum=1, reduce=mm.Ratio())


def at_once(one):
    """Return the same for all rows at once."""

    def call(params, batch):
        sums, tokens = one(params, batch)
        return jax.tree.map(lambda total: total / tokens, sums)

    return call


def texts(rows):
    """Rows of packed texts of random lengths."""
    tokens = RNG.integers(0, VOCAB, (rows, LENGTH + 1))
    starts = RNG.random((rows, LENGTH)) < 0.3
    segments = np.cumsum(starts, 1)
    places = np.arange(LENGTH) - np.maximum.accumulate(np.where(starts, np.arange(LENGTH), 0), 1)
    last = np.diff(segments, append=segments[:, -1:] + 1) > 0  # the label of a last token is of another text
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "segments": segments, "places": places}
    return {**batch, "weights": (~last).astype(np.float32)}


def pad(batch, rows):
    """Add rows of weight 0 to a last batch that is smaller, so that it takes the program of the others."""
    return jax.tree.map(lambda x: np.pad(x, ((0, rows - len(x)), (0, 0))), batch)


def compare(name, ours, plain, params, batch, reference_batch=None):
    """Print a line of both losses; ``reference_batch`` is the batch of plain ``jax.jit`` if that needs no padding."""
    value, grads = ours(params, batch)
    reference, expected = plain(jax.device_get(params), batch if reference_batch is None else reference_batch)
    pairs = zip(jax.tree.leaves(jax.device_get(grads)), jax.tree.leaves(jax.device_get(expected)), strict=True)
    error = max(np.abs(a - b).max() for a, b in pairs)
    print(f"{name:<22} {value:.6f} {reference:.6f} {error:.1e}")


def main():
    """Run each recipe."""
    params = init()
    train, plain = mm.jit(step_of(mm.pipeline(packed, MESHES), as_pipeline)), jax.jit(step_of(packed, at_once))
    print(f"{'':<22} {'pipeline':<8} {'plain':<8} gradients differ by")
    compare("packed", train, plain, params, texts(ROWS))
    compare("another batch size", train, plain, params, texts(2 * ROWS))
    small = texts(ROWS - 3)
    compare("small last batch", train, plain, params, pad(small, ROWS), small)
    for name, loss in (("two losses", two_losses), ("gradient penalty", penalized)):
        ours = mm.jit(step_of(mm.pipeline(loss, MESHES), as_pipeline))
        compare(name, ours, jax.jit(step_of(loss, at_once)), params, texts(ROWS))
    _, grads = train(params, texts(ROWS))
    update = mm.jit(lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    trained, held_out = update(params, grads), texts(ROWS)
    score = mm.pipeline(packed, MESHES, argnums=())  # without a backward pass: the cut counts none

    def scored(params, batch):
        return score(params, batch), jnp.sum(batch["weights"])

    value = mm.jit(as_pipeline(scored))(trained, held_out)
    reference, _ = plain(jax.device_get(trained), held_out)
    print(f"{'evaluation':<22} {value:.6f} {reference:.6f} -")
    print(f"{len(train.compiled)} programs for two numbers of rows")


if __name__ == "__main__":
    main()
