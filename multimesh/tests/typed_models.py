"""Models whose types say where each array lies, as today's JAX writes them; run whole or split over tasks.

``place`` puts parameters on the meshes of stages with the specs that stand beside them. The reference is the same code
under plain `jax.jit` on the first mesh: values, gradients and types of results must be equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from models import plain
from pipelines import Split, assert_same, microbatched

import multimesh as mm

WIDTH, HIDDEN, VOCAB, ROWS, SIZE = 8, 16, 16, 8, 4
LAYER = {"up": P(None, "model"), "down": P("model", None)}
Block = Callable[[Any, Any], Any]


def typed_meshes(
    shapes: Sequence[Sequence[int]] = ((2, 2), (2, 2)), kinds: Sequence[AxisType] = (AxisType.Explicit,) * 2
) -> tuple[Mesh, ...]:
    """Disjoint submeshes with axes ``data`` and ``model``, Explicit unless ``kinds`` says otherwise."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(np.array(jax.devices()[: ends[-1]]), ends[:-1])
    return tuple(
        Mesh(d.reshape(*s), ("data", "model"), axis_types=tuple(kinds)) for d, s in zip(parts, shapes, strict=True)
    )


def draw(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)


def block(w: Any, x: Any) -> Any:
    """One layer, whose products say their layouts."""
    h = jnp.einsum("bd,df->bf", x, w["up"], out_sharding=P("data", "model"))
    y = jnp.einsum("bf,fd->bd", jnp.tanh(h), w["down"], out_sharding=P("data", None))
    return reshard(x + y, P("data", None))


def init(layers: int = 4) -> tuple[Any, Any]:
    """Parameters of a decoder, and their specs."""
    weights = [{"up": draw(s, WIDTH, HIDDEN), "down": draw(100 + s, HIDDEN, WIDTH)} for s in range(layers)]
    return {"embed": draw(7, VOCAB, WIDTH), "layers": weights}, {
        "embed": P(),
        "layers": [dict(LAYER) for _ in range(layers)],
    }


def batch() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, ROWS).astype(np.int32)


def decoder(stage: Callable[..., Any], body: Block = block, stages: int = 2) -> Callable[..., Any]:
    """``loss(params, tokens)``; the embedding is tied to the output."""

    def first(embed: Any, tokens: Any) -> Any:
        return embed.at[tokens].get(out_sharding=P("data", None))

    def last(embed: Any, x: Any, tokens: Any) -> Any:
        scores = jnp.einsum("bd,vd->bv", x, embed, out_sharding=P("data", None))
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, None], 1).mean()

    def loss(params: Any, tokens: Any) -> Any:
        x = stage(0, first)(params["embed"], tokens)
        for s, w in enumerate(params["layers"]):
            x = stage(s * stages // len(params["layers"]), body)(w, x)
        return stage(stages - 1, last)(params["embed"], x, tokens)

    return loss


def owners(params: Any, stages: int = 2) -> Any:
    """The stage of each leaf of a decoder."""
    count = len(params["layers"])
    layers = [jax.tree.map(lambda _, s=s: s * stages // count, w) for s, w in enumerate(params["layers"])]
    return {"embed": 0, "layers": layers}


def place(tree: Any, specs: Any, where: Any, meshes: Sequence[Mesh]) -> Any:
    """Put each leaf on the mesh of its stage, with its spec."""
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    layouts = jax.tree.map(lambda s, n: NamedSharding(meshes[n], s), specs, where, is_leaf=is_spec)
    return jax.device_put(tree, layouts)


looped = functools.partial(microbatched, size=SIZE, argnum=1, reduce="mean")


def loss_of(form: str, meshes: Sequence[Mesh], body: Block = block) -> Callable[..., Any]:
    """The loss of a decoder whose stages are tasks, or that `mm.pipeline` cuts."""
    return decoder(Split(tuple(meshes)), body) if form == "task" else mm.pipeline(decoder(plain, body), meshes)


def arguments(meshes: Sequence[Mesh], specs: Any = None, layers: int = 4) -> tuple[Any, Any]:
    """Parameters and tokens on the submeshes, and the same on the first one."""
    params, default_specs = init(layers)
    specs, where = specs or default_specs, owners(params)
    tokens = jax.device_put(batch(), NamedSharding(meshes[0], P("data")))
    plain_args = place(params, specs, jax.tree.map(lambda _: 0, where), meshes)
    return (place(params, specs, where, meshes), tokens), (plain_args, tokens)


def check(fn: Any, plain: Any, args: Any, plain_args: Any, mesh: Mesh, *, types: bool = True, **tolerance: Any) -> Any:
    """Compare ``fn`` under `mm.jit` with ``plain`` under `jax.jit`: values, and layouts in types. Return the jit."""
    with jax.set_mesh(mesh):
        expected = jax.jit(plain)(*plain_args)
    jitted = mm.jit(fn)
    actual = jitted(*args)
    assert_same(actual, jax.device_get(expected), **tolerance)
    if types:
        specs = [jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree) for tree in (actual, expected)]
        assert specs[0] == specs[1]
    jitted(*args)
    assert len(jitted.compiled) == 1
    return jitted
