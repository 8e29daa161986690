"""Arrays between layouts of unlike cut: the right values, each byte once, never through the host, without waiting."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.core import _compat
from multimesh.runtime.resharding import mover, needs_cutting, plan_resharding
from pipelines import assert_same

import multimesh as mm

SHAPE = (8, 12)


def mesh(start, shape, axes, kinds=None):
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[start : start + count]).reshape(shape), axes, axis_types=kinds)


TWO, FOUR = mesh(0, (2,), ("data",)), mesh(4, (4,), ("data",))
ROW, SQUARE = mesh(0, (1, 4), ("data", "model")), mesh(4, (2, 2), ("data", "model"))
ONE = mesh(0, (1,), ("data",))
WAYS = {
    "data 2 to data 4": (TWO, P("data"), FOUR, P("data")),
    "data 4 to data 2": (FOUR, P("data"), TWO, P("data")),
    "1 x 4 to 2 x 2": (ROW, P("data", "model"), SQUARE, P("data", "model")),
    "other dimension": (TWO, P("data"), FOUR, P(None, "data")),
    "other names": (SQUARE, P("data", "model"), mesh(0, (4,), ("x",)), P("x")),
    "two and three": (mesh(0, (2,), ("a",)), P(None, "a"), mesh(2, (3,), ("b",)), P(None, "b")),
    "one to many": (ONE, P(), FOUR, P("data")),
    "many to one": (FOUR, P("data"), ONE, P()),
    "replicated to divided": (TWO, P(), FOUR, P("data")),
    "divided to replicated": (FOUR, P("data"), TWO, P()),
    "overlapping": (mesh(0, (4,), ("data",)), P("data"), mesh(2, (4,), ("data",)), P(None, "data")),
    "same devices": (mesh(0, (4,), ("data",)), P("data"), mesh(0, (2, 2), ("a", "b")), P("b")),
    "same devices, other order": (
        mesh(0, (4,), ("data",)),
        P("data"),
        Mesh(np.array(jax.devices()[3::-1]), ("data",)),
        P("data"),
    ),
    "Explicit axes": (mesh(0, (2,), ("data",), (AxisType.Explicit,)), P("data"), FOUR, P("data")),
}
DTYPES = ("float32", "bfloat16", "bool", "int4", "uint8", "complex64", "key")


def values(dtype):
    if dtype == "key":
        return jax.random.split(jax.random.key(1), SHAPE)
    return (jnp.arange(np.prod(SHAPE)).reshape(SHAPE) % 7).astype(dtype)


@pytest.fixture
def no_host(monkeypatch):
    """Fail where JAX copies an array of a device to the host."""
    array = type(jnp.zeros(()))

    def copied(self):
        raise AssertionError(f"{self.shape} goes through the host")

    def forbid():
        monkeypatch.setattr(array, "_value", property(copied))

    yield forbid
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in WAYS), *(("data 2 to data 4", d) for d in DTYPES[1:])]
)
def test_a_transfer_keeps_every_value_and_stays_on_devices(case, dtype, no_host, monkeypatch):
    """The second one's array is made without checks: it is as JAX makes one."""
    before, spec, after, target_spec = WAYS[case]
    source, target = NamedSharding(before, spec), NamedSharding(after, target_spec)
    value = values(dtype)
    x = jax.device_put(value, source)
    with _compat.explicit_transfers():
        no_host()
        move = mover([source], [target], [x])
        results = jax.block_until_ready([*move(x), *move(x)])
    monkeypatch.undo()
    other = jax.device_put(value, target)
    bits = jax.random.key_data if dtype == "key" else lambda v: np.asarray(v).astype("complex64")
    for y in results:
        assert y.sharding.is_equivalent_to(target, 2)
        if dtype != "key":
            assert (y.aval, y.sharding, y.aval.sharding, y.committed) == (other.aval, target, other.aval.sharding, True)
        assert [shard.device for shard in y.addressable_shards] == [s.device for s in other.addressable_shards]
        np.testing.assert_array_equal(np.asarray(bits(y)), np.asarray(bits(value)))
    if dtype == "float32":
        np.testing.assert_array_equal(jax.jit(lambda x: x + x)(results[1]), value + value)


@pytest.mark.parametrize("case", WAYS)
def test_each_byte_of_a_shard_crosses_once(case):
    before, spec, after, target_spec = WAYS[case]
    resharding = plan_resharding(NamedSharding(before, spec), NamedSharding(after, target_spec), SHAPE)
    piece = np.prod(NamedSharding(after, target_spec).shard_shape(SHAPE)) / np.prod(resharding.joins)
    copies = {device: [p for p in resharding.copies if p.target == device] for device in after.devices.flat}
    for pieces in copies.values():
        assert piece * len(pieces) == np.prod(NamedSharding(after, target_spec).shard_shape(SHAPE))
        assert [p.join for p in pieces] == list(range(len(pieces)))
    sources = {d for p in resharding.copies for d in [p.source]}
    assert sources <= set(before.devices.flat)


def two_stages(first, second):
    def f(w, x):
        h = mm.task(lambda w, x: mm.with_sharding_constraint(jnp.sin(x @ w), P("data")), "a", mesh=first)(w, x)
        return mm.task(lambda w, h: jnp.sum((h @ w) ** 2), "b", mesh=second)(w, h)

    return lambda w, x: mm.microbatch(jax.value_and_grad(f), argnum=1, size=4)(w, x)


@pytest.mark.telling("2 to 4", "2d")
@pytest.mark.parametrize(("first", "second"), [(TWO, FOUR), (FOUR, TWO), (ROW, SQUARE)], ids=["2 to 4", "4 to 2", "2d"])
def test_no_step_of_a_plan_touches_the_host(first, second, no_host, monkeypatch):
    w, x = np.eye(4, dtype=np.float32), np.ones((8, 4), np.float32)
    f = mm.jit(two_stages(first, second))
    args = jax.device_put(w, NamedSharding(first, P())), jax.device_put(x, NamedSharding(first, P("data")))
    compiled = f.lower(*args).compile()
    layouts = compiled.plan.layouts
    moves = [case for t in compiled.plan.transfers for case in zip(t.ins, t.outs, strict=True)]
    assert any(needs_cutting(layouts[a], layouts[b], compiled.plan.slots[a]) for a, b in moves)
    no_host()
    actual = jax.block_until_ready(compiled(*args))
    monkeypatch.undo()
    halves = [jax.value_and_grad(lambda w, x: jnp.sum((jnp.sin(x @ w) @ w) ** 2))(w, x[i::2]) for i in range(2)]
    assert_same(actual, jax.tree.map(lambda *parts: sum(parts), *halves))


def test_a_transfer_is_dispatched_before_its_array_is_there():
    event = threading.Event()

    def wait(x):
        assert event.wait(60)
        return x

    def slow(x):
        return mm.with_sharding_constraint(
            jax.pure_callback(wait, x[:1], x[:1], vmap_method="sequential") + x, P("data")
        )

    f = mm.jit(lambda x: mm.task(lambda h: h + 1, "b", mesh=FOUR)(mm.task(slow, "a", mesh=TWO)(x)))
    event.set()
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(TWO, P("data")))
    jax.block_until_ready(f(x))
    event.clear()
    y = f(x)
    assert not event.is_set()
    assert not y.is_ready()
    event.set()
    assert_same(y, np.full((8, 4), 3.0, np.float32))


def test_an_argument_on_other_devices_is_moved_on_devices(no_host, monkeypatch):
    f = mm.jit(mm.task(lambda x: x * 2, "a", mesh=FOUR), in_shardings=P("data"))
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(TWO, P("data")))
    f(x)
    no_host()
    y = jax.block_until_ready(f(x))
    monkeypatch.undo()
    assert_same(y, 2 * np.arange(8.0, dtype=np.float32))
