"""Submeshes of different sizes, shapes and axis names, apart or overlapping; what moves a value between them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, mlp_block, plain, squared_error
from pipelines import Split, assert_same, both, check_gradient, microbatched, submeshes

import multimesh as mm

ROWS = 8


def mesh(start, shape, axes):
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[start : start + count]).reshape(shape), axes)


LAYOUTS = {
    "sizes 4 + 2": (mesh(0, (4,), ("data",)), mesh(4, (2,), ("data",))),
    "sizes 1 + 6": (mesh(0, (1,), ("data",)), mesh(1, (6,), ("data",))),
    "shapes (2, 2) + (4, 1)": (mesh(0, (2, 2), ("data", "model")), mesh(4, (4, 1), ("data", "model"))),
    "axis names differ": (mesh(0, (2, 2), ("data", "model")), mesh(4, (2, 2), ("x", "y"))),
    "ranks 1 + 3": (mesh(0, (2,), ("i",)), mesh(2, (1, 2, 2), ("a", "b", "c"))),
    "overlapping": (mesh(0, (4,), ("data",)), mesh(2, (4,), ("data",))),
    "one inside the other": (mesh(0, (8,), ("data",)), mesh(2, (2,), ("data",))),
    "same devices, other shape": (mesh(0, (4, 2), ("data", "model")), mesh(0, (2, 4), ("data", "model"))),
    "same devices, other order": (mesh(0, (4,), ("data",)), Mesh(np.array(jax.devices()[3::-1]), ("data",))),
    "every other": tuple(Mesh(np.array(jax.devices()[n::2]), ("data",)) for n in (0, 1)),
    "3 to 5, backwards": (mesh(5, (3,), ("data",)), mesh(0, (5,), ("data",))),
}


@pytest.mark.telling("sizes 4 + 2", "overlapping", "same devices, other order", "every other", "3 to 5, backwards")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout):
    check_gradient(MLP, Split(LAYOUTS[layout]), 2, rows=8, size=2, laid_out=False)


def constrained_block(p, x):
    """Column- then row-parallel, on whatever axes the submesh gives to the two logical names."""
    up = mm.with_sharding_constraint(p["up"], P(None, "mlp"))
    hidden = mm.with_sharding_constraint(jnp.tanh(x @ up + p["bias"]), P("batch", "mlp"))
    return mm.with_sharding_constraint(x + hidden @ p["down"], P("batch"))


RULES = (
    {"batch": "data", "mlp": "model"},
    {"batch": ("x", "y"), "mlp": None},
)


@pytest.mark.telling("loop")
@pytest.mark.parametrize("loop", ["no loop", "loop"])
def test_logical_axes(loop):
    """Stage 0 is data x tensor parallel, stage 1 data parallel over both of its axes."""
    meshes = LAYOUTS["axis names differ"]
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage, microbatch):
        def loss(p, b):
            x = b["x"]
            for s, w in enumerate(p["stages"]):
                x = stage(s)(w, x)
            return squared_error(x, b["y"])

        return jax.value_and_grad(loss) if loop == "no loop" else microbatch(jax.value_and_grad(loss), size=4, argnum=1)

    def task(s):
        return mm.task(constrained_block, name=f"s{s}", mesh=meshes[s], logical_axes=RULES[s])

    actual = mm.jit(make(task, mm.microbatch))(params, batch)
    assert_same(actual, jax.jit(make(lambda _: mlp_block, microbatched))(params, batch))


def test_an_output_has_the_sharding_that_the_task_gave_it():
    meshes = LAYOUTS["axis names differ"]
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    for s, expected in enumerate([P("data"), P(("x", "y"))]):
        block = mm.task(constrained_block, name="block", mesh=meshes[s], logical_axes=RULES[s])
        y = mm.jit(block)(params["stages"][s], x)
        assert y.sharding.is_equivalent_to(NamedSharding(meshes[s], expected), y.ndim)
        assert_same(y, jax.jit(mlp_block)(params["stages"][s], x))


def test_a_constraint_outside_a_task_is_resolved_by_the_task_that_consumes_the_value():
    meshes = LAYOUTS["axis names differ"]
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]

    def f(p, x):
        h = mm.task(mlp_block, name="s0", mesh=meshes[0], logical_axes=RULES[0])(p[0], x)
        h = mm.with_sharding_constraint(h, P("batch"))
        y = mm.task(mlp_block, name="s1", mesh=meshes[1], logical_axes=RULES[1])(p[1], h)
        return mm.with_sharding_constraint(y, P("batch"))

    y = mm.jit(f)(params["stages"], x)
    assert y.sharding.is_equivalent_to(NamedSharding(meshes[1], P(("x", "y"))), y.ndim)
    assert_same(y, mlp_block(params["stages"][1], mlp_block(params["stages"][0], x)))


def test_a_constraint_outside_of_tasks_that_no_task_could_resolve():
    def f(x, y):
        return mm.task(jnp.sin, mesh=submeshes(1)[0])(x), jnp.cos(mm.with_sharding_constraint(2 * y, P("rows")))

    with pytest.raises(mm.MultiMeshError, match=r"test_submeshes.py:.*no task beside it reads or makes the value"):
        mm.jit(f)(jnp.ones(2), jnp.ones(2))


def test_physical_axes_inside_a_task_are_the_submeshs_own():
    """jax.lax.with_sharding_constraint with a bare PartitionSpec names the axes of the task's submesh."""

    def make(stage, microbatch):
        def block(p, x):
            if stage is plain:
                return mlp_block(p, x)
            return jax.lax.with_sharding_constraint(mlp_block(p, x), P("data", "model"))

        def loss(p, b):
            x = stage(1, block)(p["stages"][1], stage(0, block)(p["stages"][0], b["x"]))
            return squared_error(x, b["y"])

        return microbatch(jax.value_and_grad(loss), size=4, argnum=1)

    both(make, MLP.init(2), MLP.batch(ROWS, 0), split=Split(LAYOUTS["shapes (2, 2) + (4, 1)"]))


SMALL = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


@pytest.mark.parametrize("name", SMALL)
def test_types_of_a_few_bits_between_submeshes_and_as_arguments(name):
    on, dtype = Split(submeshes(2)), getattr(jnp, name)
    x = jnp.linspace(0.25 if "8m0" in name else 0 if name[0] == "u" else -2, 1, 32).reshape(8, 4)

    def f(x, y):
        small = on(0, lambda x: x.astype(dtype))(x)
        return on(1, lambda h, y: h.astype(jnp.float32) + y.astype(jnp.float32))(small, y), small

    y = np.asarray(x.astype(dtype))
    actual, expected = ([np.asarray(r, np.float32) for r in jit(f)(x, y)] for jit in (mm.jit, jax.jit))
    assert_same(actual, expected)
    loop = mm.microbatch(lambda x: f(x, x)[0], size=2)
    assert_same(mm.jit(loop)(x), loop(x))


def put_targets():
    first, second = submeshes(2, (2,))
    foreign = Mesh(np.array(jax.devices()[4:8]), ("rows",))
    return {
        "layout of the next submesh": NamedSharding(second, P("data")),
        "layout of the same submesh": NamedSharding(first, P(None, "data")),
        "explicit layout": NamedSharding(Mesh(second.devices, ("data",), axis_types=(AxisType.Explicit,)), P("data")),
        "another mesh": NamedSharding(foreign, P("rows")),
        "device": jax.devices()[5],
        "sharding of a device": jax.sharding.SingleDeviceSharding(jax.devices()[5]),
    }


@pytest.mark.telling(
    "microbatch-layout of the next submesh",
    "grad-another mesh",
    "straight-explicit layout",
    "grad-device",
    "microbatch-sharding of a device",
)
@pytest.mark.parametrize("target", put_targets())
@pytest.mark.parametrize("how", ["straight", "grad", "microbatch"])
def test_device_put_between_tasks(target, how):
    """It sends the value there, where operations outside tasks then run; and JAX's values with and without it."""
    where, (first, second) = put_targets()[target], submeshes(2, (2,))
    if target == "explicit layout":
        how = "straight"  # JAX itself can't transpose it: its cotangent has no such type

    def f(w, x, put=lambda h: h):
        h = mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=first)(w, x)
        return mm.task(lambda h: jnp.square(h).sum(), "second", mesh=second)(put(h) * 2)

    def put(h):
        return jax.device_put(h, where)

    w, x = np.eye(8, dtype=np.float32) / 3, np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    make = {
        "straight": lambda f: f,
        "grad": lambda f: jax.value_and_grad(f, argnums=(0, 1)),
        "microbatch": lambda f: mm.microbatch(jax.value_and_grad(f), size=4, argnum=1),
    }[how]
    assert_same(mm.jit(make(lambda w, x: f(w, x, put)))(w, x), jax.jit(make(f))(w, x))
    if how == "straight":
        y = mm.jit(lambda w, x: put(mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=first)(w, x)))(w, x)
        assert_same(y, jnp.tanh(x @ w))
        assert set(y.devices()) == (where.device_set if isinstance(where, jax.sharding.Sharding) else {where})
        assert not isinstance(where, NamedSharding) or y.sharding == where


@pytest.mark.parametrize("space", ["kind", "space"])
def test_device_put_to_the_memory_of_a_host(space):
    first, second = submeshes(2, (2,))
    host = NamedSharding(second, P("data"), memory_kind="pinned_host") if space == "kind" else jax.memory.Space.Host
    f = mm.jit(lambda x: jax.device_put(mm.task(jnp.sin, "first", mesh=first)(x), host))
    x = np.ones((4, 4), np.float32)
    assert_same(f(x), jnp.sin(x))
    assert f(x).sharding.memory_kind == "pinned_host"
    assert set(f(x).devices()) == set((second if space == "kind" else first).devices.flat)


@pytest.mark.parametrize("target", put_targets())
def test_device_put_inside_a_task(target):
    """Within the submesh it is a layout; to other devices it is refused with the line."""
    where = put_targets()[target]
    f = mm.jit(mm.task(lambda x: jax.device_put(jnp.sin(x), where), "first", mesh=submeshes(2, (2,))[0]))
    x = np.ones((4, 4), np.float32)
    if target == "layout of the same submesh":
        assert_same(f(x), jnp.sin(x))
        assert f(x).sharding.spec == where.spec
        return
    with pytest.raises(mm.MultiMeshError, match=r"submeshes.py:\d+: device_put to .* inside task 'first'.*outside"):
        f(x)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("axes", [("stage",), ("data", "stage"), ("data",)])
def test_a_constraint_of_another_mesh(axes, inside):
    """Axes that the submesh has carry over; others are told of, with the line."""
    first, second = submeshes(2, (2,))
    other = Mesh(np.array(jax.devices()[:4]).reshape((2, 2) if len(axes) == 2 else 4), axes)

    def constrain(h):
        return jax.lax.with_sharding_constraint(h, NamedSharding(other, P(axes)))

    def f(x):
        h = mm.task(lambda x: constrain(jnp.sin(x)) if inside else jnp.sin(x), "first", mesh=first)(x)
        return mm.task(jnp.cos, "second", mesh=second)(h if inside else constrain(h))

    x = np.ones((8, 4), np.float32)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        assert_same(mm.jit(f)(x), jnp.cos(jnp.sin(x)))
    messages = {(str(w.message), w.filename) for w in record if "sharding constraint" in str(w.message)}
    assert len(messages) == ("stage" in axes)
    assert all("axis 'stage'" in text and file == __file__ and "[data=2" in text for text, file in messages)


def test_a_constraint_to_one_device():
    device = put_targets()["sharding of a device"]
    f = mm.task(lambda x: jax.lax.with_sharding_constraint(x, device), mesh=submeshes(1, (2,))[0])
    with pytest.raises(mm.MultiMeshError, match=r"submeshes.py:\d+: sharding_constraint to one device.*NamedSharding"):
        mm.jit(f)(np.ones(4, np.float32))
