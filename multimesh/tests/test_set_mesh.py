"""Transformations over `multimesh.jit` under ``jax.set_mesh``, and on meshes with Explicit axes under none."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, submeshes

import multimesh as mm

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
WEIGHTS = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def on(kind):
    return [Mesh(m.devices, m.axis_names, axis_types=(KINDS[kind],)) for m in submeshes(2, (2,))]


AMBIENT = {
    "none": lambda: None,
    "all devices": lambda: Mesh(np.array(jax.devices()), ("data",)),
    "all devices, explicit": lambda: jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,)),
    "another name, explicit": lambda: jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,)),
    "the first submesh": lambda: on("auto")[0],
    "the last submesh, explicit": lambda: on("explicit")[1],
}


def loss(stage):
    def f(weights, x):
        h = stage(0, lambda w, x: jnp.tanh(x @ w))(weights[0], x)
        return stage(1, lambda w, h: jnp.square(h @ w.T).sum(1))(weights[1], h).mean()

    return f


TRANSFORMED = {
    "grad": lambda f, w, x: jax.grad(f)(w, x),
    "value_and_grad": lambda f, w, x: jax.value_and_grad(f, argnums=(0, 1))(w, x),
    "vjp": lambda f, w, x: (lambda value, pull: (value, pull(jnp.float32(1))))(*jax.vjp(f, w, x)),
    "jvp": lambda f, w, x: jax.jvp(f, (w, x), (w, x)),
    "linearize": lambda f, w, x: jax.linearize(f, w, x)[1](w, x),
    "product with the Hessian": lambda f, w, x: jax.jvp(jax.grad(f), (w, x), (w, x)),
    "vmap": lambda f, w, x: jax.vmap(f, in_axes=(None, 0))(w, np.stack([np.asarray(x)] * 2)),
    "grad of vmap": lambda f, w, x: jax.vmap(jax.grad(f), in_axes=(None, 0))(w, np.stack([np.asarray(x)] * 2)),
}


@pytest.mark.longer
@pytest.mark.telling("none-explicit", "the last submesh, explicit-explicit")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ambient", AMBIENT)
def test_every_transformation(ambient, kind):
    meshes, mesh = on(kind), AMBIENT[ambient]()
    spec = P(None, "data") if kind == "auto" else P()  # rows are over the axis: with both JAX can't type a product
    weights = [jax.device_put(w, NamedSharding(m, spec)) for w, m in zip(WEIGHTS, meshes, strict=True)]
    x = jax.device_put(X, NamedSharding(meshes[0], P("data")))
    f = mm.jit(loss(lambda s, fn: mm.task(fn, f"stage{s}", mesh=meshes[s])))
    for name, transformed in TRANSFORMED.items():
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            actual = transformed(f, weights, x)
        expected = transformed(jax.jit(loss(lambda _, fn: fn)), list(WEIGHTS), X)
        assert_same(actual, expected)
        if name == "grad":
            assert [g.sharding.mesh for g in actual] == meshes
            assert kind == "auto" or [jax.typeof(g) for g in actual] == [jax.typeof(w) for w in weights]


def test_blocks_on_meshes_of_different_sizes_under_vmap_are_refused_in_a_line():
    """JAX keeps the mesh in the type of what a block makes; as calls the same tasks run."""
    small, large = Mesh(np.array(jax.devices()[:1]), ("data",)), Mesh(np.array(jax.devices()[2:4]), ("data",))

    def blocks(w, x):
        with mm.task(mesh=small, name="first"):
            v = jnp.sin(w)
        with mm.task(mesh=large, name="second"):
            return x + v

    def calls(w, x):
        return mm.task(jnp.add, mesh=large)(x, mm.task(jnp.sin, "first", mesh=small)(w))

    with pytest.raises(mm.UsageError, match=r"test_set_mesh.py:\d+: in .* meshes of different sizes .*as calls"):
        jax.vmap(mm.jit(blocks), in_axes=(None, 0))(X[0], X)
    assert_same(jax.vmap(mm.jit(calls), in_axes=(None, 0))(X[0], X), X + np.sin(X[0]))


@pytest.mark.parametrize("layer", [lambda w, x: x @ w - 2, lambda w, x: jax.nn.softmax(x @ w)])
def test_gradients_of_blocks_on_meshes_of_different_sizes_are_refused_in_a_line(layer):
    """JAX's transposes go from the mesh in one type to that in another; as calls or scopes the same tasks run."""
    meshes = [Mesh(np.array(jax.devices()[a:b]), ("data",)) for a, b in ((0, 2), (2, 3))]

    def blocks(ws, x):
        for w, mesh in zip(ws, meshes, strict=True):
            with mm.task(mesh=mesh):
                x = layer(w, x)
        return jnp.sum(x)

    def calls(ws, x):
        for w, mesh in zip(ws, meshes, strict=True):
            x = mm.task(layer, mesh=mesh)(w, x)
        return jnp.sum(x)

    def scopes(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"stage_{i}"):
                x = layer(w, x)
        return jnp.sum(x)

    ws = [np.eye(8, dtype=np.float32)] * 2
    with pytest.raises(
        mm.UsageError, match=r"test_set_mesh.py:\d+: in blocks .* different sizes .*as calls(?!.*in blocks)"
    ):
        mm.jit(jax.grad(blocks))(ws, X)
    desired = jax.grad(scopes)(ws, X)
    assert_same(mm.jit(jax.grad(calls))(ws, X), desired)
    with mm.register_task("stage_0", mesh=meshes[0]), mm.register_task("stage_1", mesh=meshes[1]):
        actual = mm.jit(jax.grad(scopes))(ws, X)
    assert_same(actual, desired)
    assert [gradient.devices() for gradient in actual] == [set(mesh.devices.flat) for mesh in meshes]
