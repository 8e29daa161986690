"""First calls of public models as pipelines: ``mm.pipeline`` cuts each as it is, beside plain ``jax.jit``.

    git clone https://github.com/google/tunix /tmp/tunix
    git clone https://github.com/jax-ml/bonsai /tmp/bonsai
    python multimesh/benchmarks/first_call.py --tunix /tmp/tunix --bonsai /tmp/bonsai

Each model has eight layers of width 32, and is cut into four stages for microbatches of two rows. ``first call`` is the
CPU time of the first call, as a multiple of that of ``jax.jit`` on one device, with the caches of JAX empty.
``kernels`` are those of the plan, ``compiled`` those that are unlike, and ``lines`` their StableHLO, beside that of
plain JAX. ``slowest`` is the operations of the longest stage, as a multiple of the mean. ``bytes`` is what the stages
get from each other, for each microbatch. ``gradients`` is the largest difference from plain ``jax.jit``, relative to
the largest gradient. MaxText is that of third_party, if it is there.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from jax.sharding import Mesh

import multimesh as mm

STAGES, LAYERS, WIDTH, HEADS, VOCAB, LENGTH, ROWS, MICRO = 4, 8, 32, 2, 64, 16, 8, 2
DRAW = np.random.default_rng(0)
ROOT = Path(__file__).resolve().parents[2]
MAXTEXT = ROOT / "third_party" / "maxtext" / "src"
Model = tuple[Callable[[Any, Any], Any], Any, Any]
"""A loss of parameters and a batch, its parameters, and a batch."""


def tokens() -> dict[str, np.ndarray]:
    """Rows of text: no token is 0, which means padding to some of the models."""
    text = DRAW.integers(1, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    return {"text": text[:, :-1], "target": text[:, 1:]}


def mean_loss(logits: Any, labels: Any) -> Any:
    """Return the cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def split(model: Any, forward: Callable[[Any, Any], Any], batch: Any) -> Model:
    """Return the loss of a model in Flax NNX."""
    from flax import nnx

    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, others, copy=True)
        return mean_loss(forward(model, batch["text"]), batch["target"])

    return loss, params, batch


def tunix(folder: Path, name: str, model: str) -> Model:
    """Return a language model of google/tunix."""
    from flax import nnx

    for package in ("tunix", "tunix.generate", "tunix.models"):  # without their imports, of all that trains and samples
        module = types.ModuleType(package)
        module.__path__ = [str(folder / package.replace(".", "/"))]
        sys.modules.setdefault(package, module)
    peer: Any = importlib.import_module(f"tunix.models.{name}.model")
    sizes = {"num_layers": LAYERS, "vocab_size": VOCAB, "embed_dim": WIDTH, "hidden_dim": 4 * WIDTH, "norm_eps": 1e-6}
    heads = {"num_heads": HEADS, "head_dim": WIDTH // HEADS, "num_kv_heads": 1, "rope_theta": 10_000}
    config = peer.ModelConfig(**sizes, **heads)

    def forward(model: Any, text: Any) -> Any:
        places = jnp.broadcast_to(jnp.arange(LENGTH), text.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (len(text), LENGTH, LENGTH))
        return model(text, places, None, mask)[0]

    return split(getattr(peer, model)(config, rngs=nnx.Rngs(0)), forward, tokens())


def vit(folder: Path) -> Model:
    """Return the vision transformer of jax-ml/bonsai."""
    from flax import nnx

    sys.path.insert(0, str(folder))
    peer: Any = importlib.import_module("bonsai.models.vit.modeling")
    config = peer.ModelConfig((16, 16), (4, 4), 3, WIDTH, 0.0, 0.0, HEADS, 4 * WIDTH, 1e-6, LAYERS, 10)
    images = DRAW.normal(size=(ROWS, 16, 16, 3)).astype(np.float32)
    model = peer.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    return split(model, lambda model, x: model(x, rngs=None), {"text": images, "target": np.arange(ROWS) % 10})


def maxtext() -> Model:
    """Return the decoder of MaxText, as it builds it for one device."""
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    sizes = {"base_num_decoder_layers": LAYERS, "base_emb_dim": WIDTH, "base_mlp_dim": 4 * WIDTH, "vocab_size": VOCAB}
    sizes |= {"base_num_query_heads": HEADS, "base_num_kv_heads": 1, "head_dim": WIDTH // HEADS}
    options = {"max_target_length": LENGTH, "per_device_batch_size": ROWS, "dtype": "float32", "scan_layers": False}
    options |= {"attention": "dot_product", "hardware": "cpu", "skip_jax_distributed_system": True, "jax_cache_dir": ""}
    argv = [f"{key}={value}" for key, value in {**sizes, **options, "run_name": "first_call"}.items()]
    config = pyconfig.initialize(["", str(MAXTEXT / "maxtext" / "configs" / "base.yml"), *argv])
    mesh = maxtext_utils.get_mesh_from_config(config, devices=jax.devices()[:1])
    model = model_creation_utils.get_transformer_model(config, mesh, None, rngs=nnx.Rngs(0))

    def forward(model: Any, text: Any) -> Any:
        return model(text, jnp.broadcast_to(jnp.arange(LENGTH), text.shape), jnp.ones_like(text))

    return split(model, forward, tokens())


def measure(name: str, make: Callable[[], Model], repeats: int) -> report.Row:
    """Cut a model, and compare its first call and its gradients with those of plain ``jax.jit``."""
    loss, params, batch = make()
    meshes = [Mesh(np.array([device]), ("data",)) for device in jax.devices()[:STAGES]]
    times: tuple[list[float], list[float]] = ([], [])
    piped = mm.pipeline(loss, meshes)
    step = mm.jit(mm.microbatch(jax.value_and_grad(piped), size=MICRO, argnum=1, schedule="1f1b", reduce="mean"))
    plain = jax.jit(jax.value_and_grad(loss))
    for _ in range(repeats):
        (_, gradients), seconds = first_call(step, params, batch)
        times[0].append(seconds)
        (_, reference), seconds = first_call(plain, params, batch)
        times[1].append(seconds)
    cuts = piped.cuts(params, jax.tree.map(lambda x: x[:MICRO], batch))
    (compiled, lines), (_, plain_lines) = stablehlo(step, params, batch), stablehlo(plain, params, batch)
    return {
        "model": name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "first call": statistics.median(times[0]) / statistics.median(times[1]),
        "plain s": statistics.median(times[1]),
        "kernels": len(step.compiled[0].plan.kernels),
        "compiled": compiled,
        "lines": lines,
        "plain lines": plain_lines,
        "slowest": cuts.slowest,
        "bytes": int(cuts.sent),
        "gradients": differences(gradients, reference),
    }


def stablehlo(step: Any, params: Any, batch: Any) -> tuple[int, int]:
    """Return how many programs the first call compiles, and the lines of all."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_dump_ir_to", folder)
        first_call(step, params, batch)
        jax.config.update("jax_dump_ir_to", None)
        texts = [file.read_text() for file in Path(folder).glob("*compile*.mlir")]
    return len(texts), sum(text.count("\n") for text in texts)


def first_call(step: Any, params: Any, batch: Any) -> tuple[Any, float]:
    """Call a function with empty caches; return its results and the CPU seconds of all threads."""
    jax.clear_caches()
    step.clear_cache()
    start = time.process_time()
    results = jax.block_until_ready(step(params, batch))
    return results, time.process_time() - start


def differences(gradients: Any, reference: Any) -> float:
    """Return the largest, relative to the largest element. Some biases have no gradient but rounding."""
    actual, expected = ([*map(np.asarray, jax.tree.leaves(tree))] for tree in (gradients, reference))
    return float(max(map(lambda a, b: np.abs(a - b).max(), actual, expected)) / max(np.abs(b).max() for b in expected))


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--tunix", type=Path, help="a clone of google/tunix: llama3 and qwen3")
    options.add_argument("--bonsai", type=Path, help="a clone of jax-ml/bonsai: ViT")
    options.add_argument("--repeats", type=int, default=3, help="first calls of each (default 3)")
    args = options.parse_args()
    mm.virtual_devices(STAGES)
    models: dict[str, Callable[[], Model]] = {}
    if args.tunix:
        models["llama3, tunix"] = lambda: tunix(args.tunix, "llama3", "Llama3")
        models["qwen3, tunix"] = lambda: tunix(args.tunix, "qwen3", "Qwen3")
    if args.bonsai:
        models["ViT, bonsai"] = lambda: vit(args.bonsai)
    if MAXTEXT.exists():
        models["llama2, MaxText"] = maxtext
    with contextlib.redirect_stdout(sys.stderr):  # some of them print
        rows = [measure(name, make, args.repeats) for name, make in models.items()]
    report.show({"First calls": rows}, args.json)


if __name__ == "__main__":
    main()
