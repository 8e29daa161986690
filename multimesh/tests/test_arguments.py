"""Arguments and results as arrays: which buffers they share, which are donated, and which result replaces which."""

import collections
import os
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from multimesh.runtime.compile import cores
from pipelines import Split, assert_same, submeshes

import multimesh as mm

X = np.ones((4, 4), np.float32)

sizes = pytest.mark.parametrize("size", [1, 2])


def buffers(tree):
    """Addresses of the shards of a leaf, or of all leaves."""
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards]


def ones(split, stage, *shape):
    return jax.device_put(jnp.ones(shape or (4, 4)), NamedSharding(split.mesh(stage), P()))


def aligned(count):
    """A NumPy array whose memory JAX may use as it is."""
    raw = np.zeros(4 * count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * count].view(np.float32)


def both(stage, w, v):
    """Something on each of two submeshes."""
    return stage(0, lambda w: w + 1)(w), stage(1, lambda v: v * 2)(v)


@sizes
def test_every_result_has_a_buffer_of_its_own(size):
    """Arguments that pass through, the same array twice, captured arrays: as under jax.jit."""
    split = Split(submeshes(2, (size,)))
    captured, table = ones(split, 0, 3), aligned(512)

    def f(stage):
        def g(w, unread, key):
            up, down = both(stage, w, w)
            return [w, w, unread, unread, up, up, down, captured, captured, table, stage(1, jnp.sin)(table), key]

        return g

    def arguments():
        return ones(split, 0), ones(split, 1), jax.random.key(1)

    args = arguments()
    compiled = mm.jit(f(split))
    actual = compiled(*args)
    addresses = buffers([args, captured, actual])
    assert len(set(addresses)) == len(addresses)
    expected = jax.device_get(jax.jit(f(plain))(*jax.device_get(args)))
    table[:] = 7
    for x in args:
        x.delete()
    assert_same(actual, expected)
    assert_same(compiled(*arguments()), expected)


@sizes
def test_a_donated_argument_that_passes_through_keeps_its_buffer(size):
    split = Split(submeshes(2, (size,)))
    w, x = ones(split, 1), ones(split, 0)
    before = buffers(w)
    f = mm.jit(lambda w, x: ((w, w), split(1, jnp.add)(w, x)), donate_argnums=0)
    (first, second), total = f(w, x)
    assert w.is_deleted()
    assert before in (buffers(first), buffers(second))
    assert_same([first, second, total], [jnp.ones((4, 4))] * 2 + [jnp.full((4, 4), 2.0)])


@sizes
@pytest.mark.parametrize("donate", [(0,), (0, 1)])
@pytest.mark.parametrize("other", ["the array", "an equal layout"])
def test_one_buffer_that_is_donated_and_given_again_is_refused(size, donate, other):
    """jax.jit raises so on one device, and XLA ends the process on two."""
    split = Split(submeshes(2, (size,)))
    w = {"w": ones(split, 0)}
    v = w if other == "the array" else jax.device_put(w, NamedSharding(split.mesh(0), P(None, None)))
    update = split(0, lambda w, v: (jax.tree.map(jnp.sin, w), jax.tree.map(jnp.cos, v)))
    f = mm.jit(lambda params, average: update(params, average), donate_argnums=donate)
    with pytest.raises(mm.UsageError, match=r"params\['w'\] and average\['w'\] are the same buffer.*jnp\.copy"):
        f(w, v)
    assert not w["w"].is_deleted()
    assert_same(f(w, jax.tree.map(jnp.copy, v)), ({"w": jnp.sin(jnp.ones((4, 4)))}, {"w": jnp.cos(jnp.ones((4, 4)))}))


@sizes
def test_arguments_on_disjoint_devices_may_share_the_memory_that_they_were_put_from(size):
    """Every CPU device may use an aligned NumPy array as it is; what one of them is given away for is its own."""
    split = Split(submeshes(2, (size,)))
    table = aligned(16).reshape(4, 4)
    arrays = [jax.device_put(table, NamedSharding(split.mesh(stage), P())) for stage in (0, 1)]
    assert len(set(buffers(arrays))) == 1
    f = mm.jit(lambda p, q: both(split, p, q), donate_argnums=(0, 1))
    assert_same(f(*arrays), both(plain, table, table))
    assert all(x.is_deleted() for x in arrays)
    assert not table.any()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_buffer_on_submeshes_that_overlap_is_refused(order):
    """Only a later shard of the one is the first of the other."""
    devices = np.array(jax.devices())
    wide, narrow = Mesh(devices[[0, 1]], ("data",)), Mesh(devices[[1, 2]], ("data",))
    p = jax.device_put(jnp.ones((4, 4)), NamedSharding(wide, P()))
    shards = [p.addressable_shards[1].data, jax.device_put(jnp.ones((4, 4)), devices[2])]
    q = jax.make_array_from_single_device_arrays((4, 4), NamedSharding(narrow, P()), shards)
    on = [mm.task(fn, mesh=mesh) for fn, mesh in ((jnp.sin, wide), (jnp.cos, narrow))]
    f = mm.jit(lambda *args: [on[i](x) for i, x in zip(order, args, strict=True)], donate_argnums=0)
    with pytest.raises(mm.UsageError, match=r"argument 0 and argument 1 are the same buffer"):
        f(*((p, q)[i] for i in order))


@sizes
def test_what_init_returns_twice_can_be_donated(size):
    """A state that begins as a parameter and its average, as jax.jit would make it."""
    split = Split(submeshes(2, (size,)))
    init = mm.jit(lambda key: [split(0, lambda k: jax.random.normal(k, (4, 4)))(key)] * 2)
    step = mm.jit(lambda w, average: both(split, w, average), donate_argnums=(0, 1))
    for _ in range(2):
        w, average = init(jax.random.key(0))
        expected = jax.jit(lambda w: both(plain, w, w))(jax.device_get(w))
        assert_same(step(w, average), expected)


def momentum_step(stage, params, momentum, x):
    """Two stages; momentum has the structure and the types of the parameters."""

    def loss(params):
        y = stage(0, lambda w, x: jnp.tanh(x @ w))(params["first"], x)
        return stage(1, lambda w, y: jnp.mean((y @ w) ** 2))(params["second"], y)

    grads = jax.grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum


ORDERS = {
    "in order": lambda params, momentum: (params, momentum),
    "by name": lambda params, momentum: {"momentum": momentum, "params": params},
    "one state": lambda params, momentum: {"state": {"momentum": momentum, "params": params}, "loss": 0.0},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_second_tree_of_the_same_structure_keeps_its_layout_and_is_donated(order, compilations):
    split = Split(submeshes(2, (2,)))
    rng = np.random.default_rng(0)
    host = [{k: rng.normal(size=(8, 8)).astype(np.float32) for k in ("first", "second")} for _ in range(2)]
    specs = {"params": P(), "momentum": P("data")}
    x = rng.normal(size=(3, 8)).astype(np.float32)

    def place(tree, spec):
        return {k: jax.device_put(jnp.array(tree[k]), NamedSharding(split.mesh(s), spec)) for s, k in enumerate(tree)}

    def step(stage):
        return lambda params, momentum, x: ORDERS[order](*momentum_step(stage, params, momentum, x))

    def state(result):
        tree = result if isinstance(result, dict) else dict(zip(specs, result, strict=True))
        tree = tree.get("state", tree)
        return tree["params"], tree["momentum"]

    f = mm.jit(step(split), donate_argnums=(0, 1))
    reference = jax.jit(step(plain))
    trees = {name: place(tree, specs[name]) for name, tree in zip(specs, host, strict=True)}
    params, momentum = trees["params"], trees["momentum"]
    addresses = {k: (buffers(params[k]), buffers(momentum[k])) for k in params}
    counts = []
    for _ in range(3):
        params, momentum = state(f(params, momentum, x))
        host = state(reference(*host, x))
        assert {k: (buffers(params[k]), buffers(momentum[k])) for k in params} == addresses
        counts.append(len(compilations))
    assert_same([params, momentum], list(host))  # not in the loop: jax 0.11.2 moves what was read
    assert counts[-1] == counts[-2]
    for tree, spec in ((params, P()), (momentum, P("data"))):
        for s, leaf in enumerate(tree.values()):
            assert leaf.sharding.is_equivalent_to(NamedSharding(split.mesh(s), spec), 2)


State = collections.namedtuple("State", "step params momentum")


@pytest.mark.parametrize("form", [State, lambda *parts: dict(zip(State._fields, parts, strict=True)), lambda *p: p])
def test_every_leaf_of_a_donated_state_is_replaced_by_its_own(form):
    """So is the scalar beside two trees of one structure; gradients have the layout of the first of these."""
    split = Split(submeshes(2, (2,)))

    def lie(stage, spec):
        return jax.device_put(jnp.ones((4, 4)), NamedSharding(split.mesh(stage), spec))

    def state():
        step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(split.mesh(1), P()))
        return form(step, [lie(0, P()), lie(1, P())], [lie(0, P("data")), lie(1, P("data"))])

    @mm.jit
    def f(state):
        step, params, momentum = jax.tree.unflatten(jax.tree.structure((0, [0, 0], [0, 0])), jax.tree.leaves(state))
        if isinstance(state, dict):
            momentum, params, step = state["momentum"], state["params"], state["step"]
        grads = [split(s, jnp.cos)(p) for s, p in enumerate(params)]
        momentum = [split(s, jnp.add)(m, g) for s, (m, g) in enumerate(zip(momentum, grads, strict=True))]
        params = [split(s, jnp.subtract)(p, m) for s, (p, m) in enumerate(zip(params, momentum, strict=True))]
        return grads, form(split(1, lambda n: n + 1)(step), params, momentum)

    grads, after = f(state())
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state()), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    for s, g in enumerate(grads if form is State else ()):
        assert g.sharding.is_equivalent_to(NamedSharding(split.mesh(s), P()), 2)


@pytest.mark.parametrize(
    ("make", "location"),
    [
        (lambda x, split: jax.device_put(x, jax.devices()[7]), "device 7"),
        (
            lambda x, split: jax.device_put(x, NamedSharding(split.mesh(1), P("data"))),
            r"\[data=2 \| devices 2,3\]",
        ),
        (lambda x, split: jax.device_put(x, NamedSharding(split.mesh(0), P())), None),
        (lambda x, split: jax.device_put(x, NamedSharding(split.mesh(0), P(None, None))), None),
        (lambda x, split: x, None),
        (lambda x, split: np.asarray(x), None),
    ],
    ids=["another device", "another mesh", "where it is read", "there, by another spec", "uncommitted", "NumPy"],
)
def test_an_argument_that_every_call_moves_is_named_once(make, location, recwarn):
    split = Split(submeshes(2))
    f = mm.jit(lambda params, v: both(split, params["w"], v))
    for _ in range(4):
        w = make(jnp.ones((4, 4)), split)
        assert_same(f({"w": w}, ones(split, 1)), (w + 1, 2 * jnp.ones((4, 4))))
    messages = [w for w in recwarn if "in every call" in str(w.message)]
    assert len(messages) == (location is not None)
    for warning in messages:
        assert warning.filename == __file__
        message = str(warning.message)
        assert re.match(rf"params\['w'\] \(64 bytes\) lies on {location}", message)
        assert "is moved to [data=2 | devices 0,1]" in message


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "16"}, 1),
        ({"MPI_LOCALNRANKS": "x"}, 8),
    ],
)
def test_processes_of_a_node_share_its_cores(environment, share, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cores() == share


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("aligned", [True, False])
def test_one_numpy_array_as_two_arguments_of_which_one_is_donated(aligned, devices):
    """JAX shares the memory of NumPy at some addresses; a call must not depend on it, as under ``jax.jit``."""
    mesh = submeshes(1, (devices,))[0]
    task = mm.task(lambda w, m: (w + 1, 2 * m), mesh=mesh)
    memory = np.zeros(64 * 64 + 64, np.float32)
    start = (-memory.ctypes.data % 64) // 4 + (not aligned)
    array = memory[start : start + 64 * 64].reshape(64, 64)
    array[:] = np.arange(64)
    old = array.copy()
    for one, other in ((array, array), (array, jnp.asarray(array)), (jnp.asarray(array), array)):
        actual = mm.jit(task, donate_argnums=0)(one, other)
        assert_same(actual, (old + 1, 2 * old))
        np.testing.assert_array_equal(array, old)
    step = mm.jit(lambda w, m: task(w, m)[0], donate_argnums=0)
    assert_same(step(array, array), old + 1)
    np.testing.assert_array_equal(array, old)


def train(split, params, x):
    h = split(0, lambda w, x: jnp.tanh(x @ w))(params["w"], x)
    return jax.tree.map(lambda p: 0.9 * p, params), split(1, lambda v, h: (h @ v).sum())(params["v"], h)


def test_a_donated_argument_that_is_given_again_is_named():
    split = Split(submeshes(2, (1,)))
    step = mm.jit(lambda params, x: train(split, params, x), donate_argnums=0)
    old = {"w": jax.device_put(X, split.mesh(0).devices[0]), "v": jax.device_put(X, split.mesh(1).devices[0])}
    new, _ = step(old, X)
    for stale in (old, {"w": old["w"], "v": new["v"]}):
        with pytest.raises(mm.UsageError, match=r"params\['w'\] was donated to an earlier call .* jnp.copy"):
            step(stale, X)


def test_a_donated_argument_that_nothing_replaces_is_told():
    """As JAX does; one that is replaced, passed through, read by nobody or a scalar is not."""
    split = Split(submeshes(2, (1,)))

    def loss(params, n, x):
        return train(split, params, x)[1] + n, params["kept"]

    state = {"w": X, "v": X, "kept": X, "unread": X}
    line = r"loss: params\['v'\], params\['w'\] donated, but no result of its type"
    with pytest.warns(UserWarning, match=line) as record:
        mm.jit(loss, donate_argnums=(0, 1)).lower(state, 1.0, X)
    assert [w.filename for w in record if "donated" in str(w.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*donated")
        mm.jit(lambda params, x: train(split, params, x), donate_argnums=0).lower({"w": X, "v": X}, X)
