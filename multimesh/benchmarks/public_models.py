"""Models of public repositories as pipelines: ``mm.pipeline`` cuts each as it is, beside plain ``jax.jit``.

    git clone https://github.com/jenkspt/gpt-jax
    python multimesh/benchmarks/public_models.py gpt-jax

Takes folders of clones; the table of docs/any-model.md has their addresses and commits. Each model has eight layers of
width 32, and is cut into four stages for microbatches of two rows. ``slowest`` is the operations of the longest stage,
as a multiple of the mean. ``bytes`` is what the stages get from each other, for each microbatch. ``gradients`` is the
largest difference from plain ``jax.jit`` on one device, relative to the largest gradient. The loss is the mean cross
entropy, without dropout, or the mean square error of the noise. Haiku needs jmp and tabulate; Equinox's notebook and
the diffusion transformer need einops.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from jax.sharding import Mesh

import multimesh as mm

STAGES, LAYERS, WIDTH, HEADS, VOCAB, LENGTH, ROWS, MICRO = 4, 8, 32, 2, 64, 16, 8, 2
DRAW = np.random.default_rng(0)
Model = tuple[Callable[[Any, Any], Any], Any, Any]
"""A loss of parameters and a batch, its parameters, and a batch."""


def tokens() -> dict[str, np.ndarray]:
    """Rows of text: no token is 0, which means padding to some of the models."""
    drawn = DRAW.integers(1, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    return {"obs": drawn[:, :-1], "target": drawn[:, 1:]}


def mean_loss(logits: Any, labels: Any) -> Any:
    """Cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gpt_jax(folder: Path) -> Model:
    """A GPT-2 in Flax Linen."""
    peer: Any = __import__("model")
    config = peer.GPTConfig(LENGTH, VOCAB, LAYERS, HEADS, WIDTH, dropout_rate=0.0, dtype="float32")
    model, batch = peer.GPT(config), tokens()

    def loss(params: Any, batch: Any) -> Any:
        return mean_loss(model.apply(params, batch["obs"], True), batch["target"])

    return loss, model.init(jax.random.key(0)), batch


def haiku(folder: Path) -> Model:
    """A transformer in Haiku."""
    import haiku as hk
    from examples.transformer import model as peer

    def forward(tokens: Any) -> Any:
        layers = peer.Transformer(num_heads=HEADS, num_layers=LAYERS, attn_size=WIDTH // HEADS, dropout_rate=0.0)
        return peer.LanguageModel(layers, model_size=WIDTH, vocab_size=VOCAB, pad_token=0)(tokens)

    model, batch, key = hk.transform(forward), tokens(), jax.random.key(0)

    def loss(params: Any, batch: Any) -> Any:
        return mean_loss(model.apply(params, key, batch["obs"]), batch["target"])

    return loss, model.init(key, batch["obs"]), batch


def gemma(folder: Path) -> Model:
    """Gemma 3 in Flax NNX."""
    from flax import nnx

    cfg: Any = __import__("transformer_cfg")
    peer: Any = __import__("transformer")
    config = cfg.TransformerConfig(
        num_layers=LAYERS,
        num_embed=VOCAB,
        embed_dim=WIDTH,
        hidden_dim=4 * WIDTH,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=cfg.make_attention_layers_types(cfg.GEMMA3_ATTENTION_PATTERN, LAYERS),
        sliding_window_size=LENGTH // 2,
    )
    graph, params, rest = nnx.split(peer.Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, batch: Any) -> Any:
        mask = batch["obs"] > 0
        model = nnx.merge(graph, params, rest)
        places = peer.build_positions_from_mask(mask)
        logits, _ = model(batch["obs"], places, None, peer.make_causal_attn_mask(mask), rngs=nnx.Rngs(0))
        return mean_loss(logits, batch["target"])

    return loss, params, tokens()


def equinox_vit(folder: Path) -> Model:
    """The vision transformer of Equinox's documentation."""
    import einops
    import equinox as eqx
    from jaxtyping import Array, Float, PRNGKeyArray

    cells = json.loads((folder / VIT).read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    peer: dict[str, Any] = {"einops": einops, "eqx": eqx, "jax": jax, "jnp": jnp, "jr": jax.random, "channels": 3}
    peer |= {"Array": Array, "Float": Float, "PRNGKeyArray": PRNGKeyArray}
    for text in texts:
        if text.startswith("class "):  # without its imports: the data set and PyTorch need not be there
            exec(text, peer)
    key = jax.random.key(0)
    model = peer["VisionTransformer"](WIDTH, 4 * WIDTH, HEADS, LAYERS, 0.0, 4, LENGTH, 10, key)
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> Any:
        whole = eqx.combine(params, rest)
        return mean_loss(jax.vmap(lambda x: whole(x, False, key))(batch["obs"]), batch["target"])

    images = DRAW.normal(size=(ROWS, 3, 16, 16)).astype(np.float32)
    return loss, params, {"obs": images, "target": np.arange(ROWS) % 10}


VIT = "docs/examples/vision_transformer.ipynb"


def diffusion(folder: Path) -> Model:
    """A diffusion transformer in Flax Linen."""
    peer: Any = __import__("diffusion_transformer")
    noise = __import__("schedulers").GaussianDiffusion(100)
    model = peer.DiT(4, WIDTH, LAYERS, HEADS, 4.0, class_dropout_prob=0.0, num_classes=10)
    shape = (ROWS, 16, 16, 3)
    batch = {"images": DRAW.normal(size=shape), "noise": DRAW.normal(size=shape), "labels": np.arange(ROWS) % 10}
    batch = {name: x.astype("int32" if name == "labels" else "float32") for name, x in batch.items()}
    batch["times"] = DRAW.integers(0, 100, ROWS).astype("int32")

    def loss(params: Any, batch: Any) -> Any:
        noisy = noise.q_sample(batch["images"], batch["times"], batch["noise"])
        return jnp.square(model.apply(params, noisy, batch["times"], batch["labels"]) - batch["noise"]).mean()

    params = model.init(jax.random.key(0), batch["images"], batch["times"], batch["labels"])
    # Its gates begin as zeros: then no layer has a gradient to compare.
    return loss, jax.tree.map(lambda x: x + 0.02 * DRAW.normal(size=x.shape).astype("float32"), params), batch


def mamba(folder: Path) -> Model:
    """Mamba 2 in Flax NNX, with a tied embedding."""
    from flax import nnx

    peer: Any = __import__("modeling")
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "chunk_size": LENGTH // 2}
    config = peer.ModelConfig(**sizes, state_size=16, head_dim=WIDTH // HEADS)
    graph, params, rest = nnx.split(peer.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, batch: Any) -> Any:
        return nnx.merge(graph, params, rest)(batch["obs"], batch["obs"])["loss"]

    return loss, params, tokens()


class Peer(NamedTuple):
    """A file that says whose clone a folder is, the folder to import from, and what makes the model."""

    file: str
    imports: str | None
    make: Callable[[Path], Model]


PEERS = (
    Peer("examples/transformer/model.py", ".", haiku),
    Peer("examples/gemma/transformer.py", "examples/gemma", gemma),
    Peer(VIT, None, equinox_vit),
    Peer("diffusion_transformer.py", ".", diffusion),
    Peer("bonsai/models/mamba2/modeling.py", "bonsai/models/mamba2", mamba),
    Peer("model.py", ".", gpt_jax),
)


def peer_of(folder: str) -> tuple[Path, Peer]:
    """A clone, and the model that it has."""
    for peer in PEERS:
        if Path(folder, peer.file).is_file():
            return Path(folder), peer
    known = ", ".join(peer.file for peer in PEERS)
    raise argparse.ArgumentTypeError(f"{folder} is no clone that is known here: it has none of {known}")


def measure(folder: Path, peer: Peer) -> report.Row:
    """Cut the model of a clone, and compare its gradients with those of plain ``jax.jit``."""
    if peer.imports:
        sys.path.insert(0, str(folder / peer.imports))
    loss, params, batch = peer.make(folder)
    meshes = [Mesh(np.array([device]), ("data",)) for device in jax.devices()[:STAGES]]
    piped = mm.pipeline(loss, meshes)
    cuts = piped.cuts(params, jax.tree.map(lambda x: x[:MICRO], batch))
    step = mm.microbatch(jax.value_and_grad(piped), size=MICRO, argnum=1, schedule="1f1b", reduce="mean")
    got = mm.jit(step)(params, batch)
    want = jax.jit(jax.value_and_grad(loss))(params, batch)
    return {
        "clone": folder.resolve().name,
        "commit": report.commit_of(folder) or "-",
        "model": (peer.make.__doc__ or "").rstrip("."),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "slowest": cuts.slowest,
        "bytes": int(cuts.sent),
        "gradients": differences(got[1], want[1]),
    }


def differences(got: Any, want: Any) -> float:
    """The largest, relative to the largest element. Some biases have no gradient but rounding."""
    pairs = [tuple(map(np.asarray, pair)) for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    return float(max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(b).max() for _, b in pairs))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("folders", nargs="+", type=peer_of, help="clones")
    args = parser.parse_args()
    mm.virtual_devices(STAGES)
    with contextlib.redirect_stdout(sys.stderr):  # some of them print
        rows = [measure(*found) for found in args.folders]
    report.show({"Public models": rows}, args.json)


if __name__ == "__main__":
    main()
