"""Six models as sources, and what each way to make a pipeline changes in them: four stages of two layers."""

from __future__ import annotations

import difflib
from typing import NamedTuple

PIPELINE = ("", "loss = mm.pipeline(loss, meshes)\n")
"""What is replaced by what; an empty text is the end of the source."""
REGISTER = (
    "",
    'place = functools.partial(mm.register_task, r"layers_(\\d+)", device_axes=("data",), dims=(1,),\n'
    '    callback=lambda i, _: ((int(i) // 2, int(i) // 2 + 1), f"stage{int(i) // 2}"))\n',
)
"""A script writes ``with mm.register_task(...):`` around its training."""

Edits = tuple[tuple[str, str], ...]


class Ways(NamedTuple):
    """A model, and the edits for marks by hand and for `register_task`."""

    source: str
    hand: Edits
    register: Edits

    def edited(self, way: str) -> str:
        """The source with the edits of a way."""
        edits = {"hand": self.hand, "register": (*self.register, REGISTER), "pipeline": (PIPELINE,)}[way]
        text = self.source
        for old, new in edits:
            assert not old or text.count(old) == 1, old
            text = text.replace(old, new) if old else text + new
        return text

    def changed(self, way: str) -> int:
        """Lines that are new or other than before."""
        lines = difflib.ndiff(self.source.splitlines(), self.edited(way).splitlines())
        return sum(line.startswith("+ ") for line in lines)


def _indented(block: str) -> str:
    return "".join(f"    {line}\n" for line in block.splitlines())


def _loop(head: str, body: str, numbered: str) -> tuple[Edits, Edits]:
    """Edits of a loop over layers: a block of each stage, and a scope of each layer, around its body."""
    block = '        with mm.task(mesh=meshes[i // 2], name=f"stage{i // 2}"):\n'
    scope = '        with jax.named_scope(f"layers_{i}"):\n'
    return tuple(((head + body, numbered + mark + _indented(body)),) for mark in (block, scope))  # type: ignore[return-value]


_LAYER = '        x = x + jnp.tanh(x @ p["up"]) @ p["down"]\n'
_END = '    return jnp.mean((x - batch["y"]) ** 2)\n'
_MLP = 'def loss(params, batch):\n    x = batch["x"]\n    for p in params:\n' + _LAYER + _END
_SCAN_LINE = '    x, _ = jax.lax.scan(layer, batch["x"], params)\n'
_SCAN = (
    'def layer(x, p):\n    return x + jnp.tanh(x @ p["up"]) @ p["down"], None\n\ndef loss(params, batch):\n'
    + _SCAN_LINE
    + _END
)
_ROWS = "        x, _ = jax.lax.scan(layer, x, jax.tree.map(lambda w: w[2 * s : 2 * s + 2], params))\n"
_SCAN_HEAD = '    x = batch["x"]\n    for s in range(4):\n'
_DOWN = "    for p in params[:4]:\n" + _LAYER + "        skips.append(x)\n"
_UP_BODY = "        x = x + skips.pop()\n" + _LAYER
_UP = "    for p in params[4:]:\n" + _UP_BODY
_UNET = 'def loss(params, batch):\n    x, skips = batch["x"], []\n' + _DOWN + _UP + _END
_ENCODER_BODY = '        source = source + jnp.tanh(source @ p["up"]) @ p["down"]\n'
_DECODER_BODY = "        x = x + jax.nn.softmax(x @ source.T) @ source\n" + _LAYER
_TWO = (
    'def loss(params, batch):\n    source, x = batch["x"], batch["y"]\n    for p in params[:4]:\n'
    + _ENCODER_BODY
    + "    for p in params[4:]:\n"
    + _DECODER_BODY
    + '    return jnp.mean((x - batch["x"]) ** 2)\n'
)
_LINEN = """class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))

class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(8):
            x = Block(name=f"layers_{i}")(x)
        return x

def loss(params, batch):
    return jnp.mean((Model().apply(params, batch["x"]) - batch["y"]) ** 2)
"""
_NNX = """class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(8)])
    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Model(nnx.Rngs(0))
graph, state = nnx.split(model)

def loss(params, batch):
    return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)
"""


def _both(first: tuple[Edits, Edits], second: tuple[Edits, Edits]) -> tuple[Edits, Edits]:
    return first[0] + second[0], first[1] + second[1]


WAYS = {
    "list of layers": Ways(_MLP, *_loop("    for p in params:\n", _LAYER, "    for i, p in enumerate(params):\n")),
    "scan over a stack": Ways(
        _SCAN,
        ((_SCAN_LINE, _SCAN_HEAD + '        with mm.task(mesh=meshes[s], name=f"stage{s}"):\n' + _indented(_ROWS)),),
        ((_SCAN_LINE, _SCAN_HEAD + '        with jax.named_scope(f"layers_{2 * s}"):\n' + _indented(_ROWS)),),
    ),
    "U-Net": Ways(
        _UNET,
        *_both(
            _loop("    for p in params[:4]:\n", _LAYER, "    for i, p in enumerate(params[:4]):\n"),
            _loop("    for p in params[4:]:\n", _UP_BODY, "    for i, p in enumerate(params[4:], 4):\n"),
        ),
    ),
    "encoder-decoder": Ways(
        _TWO,
        *_both(
            _loop("    for p in params[:4]:\n", _ENCODER_BODY, "    for i, p in enumerate(params[:4]):\n"),
            _loop("    for p in params[4:]:\n", _DECODER_BODY, "    for i, p in enumerate(params[4:], 4):\n"),
        ),
    ),
    "Flax Linen": Ways(
        _LINEN,
        (
            (
                'x = Block(name=f"layers_{i}")(x)',
                'x = mm.task(Block(name=f"layers_{i}"), f"stage{i // 2}", mesh=meshes[i // 2])(x)',
            ),
        ),
        (),
    ),
    "Flax NNX": Ways(
        _NNX,
        (
            ("        for layer in self.layers:\n", "        for i, layer in enumerate(self.layers):\n"),
            ("x = layer(x)", 'x = mm.task(layer, f"stage{i // 2}", mesh=meshes[i // 2])(x)'),
        ),
        (("model = Model(nnx.Rngs(0))", "model = mm.scope_nnx(Model(nnx.Rngs(0)))"),),
    ),
}
