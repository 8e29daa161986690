"""Layouts carried forward through operations, against those that XLA gives the results of the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.passes.inline import inline
from multimesh.passes.propagate import propagate, ways
from programs import jaxpr

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def constrained(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH.abstract_mesh, P(*spec)))


def scanned(x, w):
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), y.sum(0)), x, w)


@pytest.mark.parametrize(
    ("fn", "shapes", "specs"),
    [
        (jnp.matmul, [(8, 4), (4, 6)], [P("data"), P(None, "model")]),
        (jnp.matmul, [(8, 4), (4, 6)], [P("data"), P(None, "data")]),  # an axis divides one dimension only
        (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), [(4, 8, 2), (4, 2, 6)], [P("data"), P("data", None, "model")]),
        (lambda x: x.T, [(8, 4)], [P("data")]),
        (lambda x: x.reshape(24, 2, 2), [(8, 3, 4)], [P("data", None, "model")]),
        (lambda x: x.reshape(4, 2, 6), [(8, 6)], [P("data", "model")]),
        (lambda x: x.sum(0), [(8, 4)], [P("data", "model")]),
        (lambda x: jnp.broadcast_to(x, (8, 4)), [(4,)], [P("model")]),
        (lambda x: x[:, None], [(8,)], [P("data")]),
        (lambda x, y: jnp.tanh(x) + y, [(8, 4), (8, 4)], [P(), P("data")]),
        (lambda x: x[:, :3], [(8, 4)], [P("data", None)]),
        (lambda table, i: table[i.astype("int32")], [(16, 4), (8,)], [P(None, "model"), P("data")]),
        (lambda x: jax.checkpoint(jnp.tanh)(x), [(8, 4)], [P("data")]),
        (scanned, [(8, 4), (3, 4, 4)], [P("data"), P()]),
        (lambda x: constrained(x, None, "model"), [(8, 4)], [P("data")]),
        (lambda x: jnp.cumsum(jnp.concatenate([x, x], 1), 1), [(8, 4)], [P("data")]),
    ],
)
def test_layouts_are_those_that_xla_chooses(fn, shapes, specs):
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(MESH, p))
        for s, p in zip(shapes, specs, strict=True)
    ]
    compiled = jax.jit(fn).lower(*args).compile()
    program = inline(jaxpr(fn, *args), jax.devices())
    names = [tuple((e,) if isinstance(e, str) else () for e in spec) for spec in specs]
    known = propagate(program.items, dict(zip(program.inputs, names, strict=True)), MESH)
    for out, layout in zip(program.outputs, jax.tree.leaves(compiled.output_shardings), strict=True):
        shape = out.aval.shape
        axes = (*known[out], *((),) * (len(shape) - len(known[out])))
        shard = tuple(n // ways((names,), MESH) for n, names in zip(shape, axes, strict=True))
        assert shard == layout.shard_shape(shape)
