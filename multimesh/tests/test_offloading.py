"""Arguments in the memory of the host stay there, as under ``jax.jit``: moments that are offloaded save their bytes."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from pipelines import Split, assert_same, submeshes

import multimesh as mm

STAGES, WIDTH, ROWS = 2, 64, 8
OPTIMIZER = optax.adam(0.01)
Space = jax.memory.Space
DEVICE = "device"
HOST = "pinned_host"


def make(on, offloaded, loop=True):
    """A step with Adam whose moments wait on the host, if they are offloaded."""

    def loss(params, x):
        for n, w in enumerate(params):
            x = on(n, lambda w, x: jnp.tanh(x @ w))(w, x)
        return jnp.mean(x**2)

    def step(params, state, x):
        def one(x):
            return jax.grad(loss)(params, x)

        grads = mm.microbatch(one, size=2)(x) if loop else one(x)
        on_device = jax.tree.map(lambda s: jax.device_put(s, Space.Device), state) if offloaded else state
        updates, new = OPTIMIZER.update(grads, on_device, params)
        new = jax.tree.map(lambda s: jax.device_put(s, Space.Host), new) if offloaded else new
        return optax.apply_updates(params, updates), new

    return step


def arguments(meshes, offloaded, spec=()):
    draw = np.random.default_rng(0)
    params = [draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(STAGES)]
    state = OPTIMIZER.init(params)
    if meshes is not None:
        layouts = [NamedSharding(mesh, P(*spec)) for mesh in meshes]
        params = [jax.device_put(p, layout) for p, layout in zip(params, layouts, strict=True)]
        kinds = [layout.with_memory_kind(HOST if offloaded else DEVICE) for layout in layouts]

        def placed(tree):
            return [jax.device_put(x, kind) for x, kind in zip(tree, kinds, strict=True)]

        adam = state[0]
        count = jax.device_put(adam.count, NamedSharding(meshes[0], P(), memory_kind=HOST if offloaded else DEVICE))
        state = (adam._replace(count=count, mu=placed(adam.mu), nu=placed(adam.nu)), *state[1:])
    return params, state, draw.normal(size=(ROWS, WIDTH)).astype(np.float32)


@pytest.mark.longer
@pytest.mark.telling("2-spec1")
@pytest.mark.parametrize(("devices", "spec"), [(1, ()), (2, ("data",))])
def test_moments_on_the_host_stay_there(devices, spec):
    meshes = submeshes(STAGES, (devices,))
    steps = {on_host: mm.jit(make(Split(meshes), on_host), donate_argnums=(0, 1)) for on_host in (False, True)}
    needs = {}
    for on_host, step in steps.items():
        params, state, x = arguments(meshes, on_host, spec)
        expected = arguments(None, False)[:2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                old = jax.tree.leaves((params, state))
                params, state = step(params, state, x)
                expected = jax.jit(make(plain, False))(*expected, x)
                assert all(leaf.is_deleted() for leaf in old if leaf.ndim)
        # Adam divides by the root of a moment: where a gradient is tiny, its rounding is as large as the update.
        assert_same(jax.device_get((params, state)), jax.device_get(expected), rtol=1e-4)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {HOST if on_host else DEVICE}
        assert {leaf.sharding.memory_kind for leaf in params} == {DEVICE}
        for n in range(STAGES):
            assert state[0].mu[n].devices() == set(meshes[n].devices.flat)
        needs[on_host] = step.lower(params, state, x).memory_estimate()
        analysis = step.memory_analysis(params, state, x)
        assert (analysis[1]["arguments"] > 3 * 4 * WIDTH**2) != on_host
    moments = 2 * 4 * WIDTH**2 // devices
    for default, offloaded in zip(needs[False], needs[True], strict=True):
        assert default.arguments - offloaded.arguments >= moments


def test_in_shardings_say_that_an_argument_waits_on_the_host():
    meshes = submeshes(STAGES, (1,))
    host = NamedSharding(meshes[0], P(), memory_kind=HOST)

    def scaled(w, x):
        return Split(meshes)(0, lambda w, x: jax.device_put(w, Space.Device) @ x)(w, x)

    step = mm.jit(scaled, in_shardings=(host, None))
    w, x = np.eye(4, dtype=np.float32), np.ones(4, np.float32)
    layout = step.lower(w, x).compile().input_shardings[0][0]
    assert layout.memory_kind == HOST
    assert_same(step(w, x), w @ x)
    assert_same(step(jax.device_put(w, layout), x), w @ x)
    array = jax.device_put(w, NamedSharding(meshes[0], P()))
    step(array, x)
    with pytest.warns(UserWarning, match=r"lies on \[data=1 . devices 0\] as .*\(\) and is moved to .* in pinned_host"):
        step(array, x)


@pytest.mark.parametrize("change", [jax.grad, jax.value_and_grad, jax.vmap], ids=lambda f: f.__name__)
def test_under_transformations(change):
    mesh = submeshes(1, (1,))[0]
    host = NamedSharding(mesh, P(), memory_kind=HOST)

    def loss(w, x):
        return mm.task(lambda w, x: jnp.sum((jax.device_put(w, Space.Device) * x) ** 2), mesh=mesh)(w, x)

    changed = functools.partial(jax.vmap, in_axes=(None, 0)) if change is jax.vmap else change
    w, x = jax.device_put(jnp.arange(4.0), host), jnp.ones((3, 4))[0 if change is not jax.vmap else slice(None)]
    expected = jax.jit(changed(loss))(w, x)
    assert_same(mm.jit(changed(loss))(w, x), expected)
    if change is jax.vmap:
        assert_same(changed(mm.jit(loss))(w, x), expected)


def test_a_type_on_the_host_can_be_lowered_for():
    meshes = submeshes(STAGES, (1,))
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments(meshes, True)[:2]
    )
    lowered = mm.jit(make(Split(meshes), True)).lower(*types, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    kinds = [layout.memory_kind for layout in lowered.input_shardings]
    assert kinds[: STAGES + 1].count(HOST) == 1
    assert kinds.count(HOST) == 2 * STAGES + 1


def test_what_plain_jax_refuses_is_refused():
    """A value on the host has to be moved before it meets one on the device: nothing moves it silently."""
    mesh = submeshes(1, (1,))[0]
    task = mm.task(lambda w, x: w * x, mesh=mesh)
    w = jax.device_put(jnp.ones(4), NamedSharding(mesh, P(), memory_kind=HOST))
    for step in (jax.jit(lambda w, x: w * x), mm.jit(task)):
        with pytest.raises(ValueError, match="memory_space"):
            step(w, jnp.ones(4))
