"""Submeshes of different sizes, shapes and axis names, apart or overlapping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, TRANSFORMER, mlp_block, plain, squared_error
from pipelines import Split, assert_placed, assert_same, gradient, microbatched, reference_gradient, submeshes

import multimesh as mm

ROWS, SIZE = 8, 2


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
    "same devices, other order": (
        mesh(0, (4,), ("data",)),
        Mesh(np.array(jax.devices()[3::-1]), ("data",)),
    ),
}


@pytest.mark.promise("Submeshes may differ in size, shape and axis names, and may overlap")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout):
    split = Split(LAYOUTS[layout])
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)
    loss, grads = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS))(split.place(params, MLP.owners(params)), batch)
    assert_same((loss, grads), reference_gradient(MLP, 2, ROWS, SIZE))
    assert_placed(split, grads, MLP.owners(params))


def constrained_block(p, x):
    """Column- then row-parallel, on whatever axes the submesh gives to the two logical names."""
    up = mm.with_sharding_constraint(p["up"], P(None, "mlp"))
    hidden = mm.with_sharding_constraint(jnp.tanh(x @ up + p["bias"]), P("batch", "mlp"))
    return mm.with_sharding_constraint(x + hidden @ p["down"], P("batch"))


RULES = (
    {"batch": "data", "mlp": "model"},
    {"batch": ("x", "y"), "mlp": None},
)


@pytest.mark.promise("Logical axes translate to each submesh's own axes")
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

    got = mm.jit(make(task, mm.microbatch))(params, batch)
    assert_same(got, jax.jit(make(lambda _: mlp_block, microbatched))(params, batch))


def test_an_output_has_the_sharding_that_the_task_gave_it():
    meshes = LAYOUTS["axis names differ"]
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    for s, want in enumerate([P("data"), P(("x", "y"))]):
        block = mm.task(constrained_block, name="block", mesh=meshes[s], logical_axes=RULES[s])
        y = mm.jit(block)(params["stages"][s], x)
        assert y.sharding.is_equivalent_to(NamedSharding(meshes[s], want), y.ndim)
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


def test_physical_axes_inside_a_task_are_the_submeshs_own():
    """jax.lax.with_sharding_constraint with a bare PartitionSpec names the axes of the task's submesh."""
    split = Split(LAYOUTS["shapes (2, 2) + (4, 1)"])
    params, batch = MLP.init(2), MLP.batch(ROWS, 0)

    def make(stage, microbatch):
        def block(p, x):
            if stage is plain:
                return mlp_block(p, x)
            return jax.lax.with_sharding_constraint(mlp_block(p, x), P("data", "model"))

        def loss(p, b):
            x = stage(1, block)(p["stages"][1], stage(0, block)(p["stages"][0], b["x"]))
            return squared_error(x, b["y"])

        return microbatch(jax.value_and_grad(loss), size=4, argnum=1)

    got = mm.jit(make(split, mm.microbatch))(params, batch)
    assert_same(got, jax.jit(make(plain, microbatched))(params, batch))


def test_devices_with_axes():
    """``devices`` is an array whose shape is the submesh's."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    tasks = [
        mm.task(
            constrained_block, name=f"s{s}", devices=devices[s], device_axes=("data", "model"), logical_axes=RULES[0]
        )
        for s in range(2)
    ]
    y = mm.jit(lambda p, x: tasks[1](p[1], tasks[0](p[0], x)))(params["stages"], x)
    assert set(y.devices()) == set(devices[1].flat)
    assert_same(y, mlp_block(params["stages"][1], mlp_block(params["stages"][0], x)))


def test_a_callable_object_is_a_task():
    class Block:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, p, x):
            return self.scale * mlp_block(p, x)

    (m,) = submeshes(1, (2,))
    p, x = MLP.init(1)["stages"][0], MLP.batch(ROWS, 0)["x"]
    y = mm.jit(mm.task(Block(2.0), mesh=m))(p, x)
    assert set(y.devices()) == set(m.devices.flat)
    assert_same(y, 2.0 * mlp_block(p, x))


def test_tensor_parallel_parameters_keep_their_sharding():
    """Gradients of parameters that come in sharded lie as the parameters do."""
    split = Split(submeshes(2, (2, 2)))
    params, batch = TRANSFORMER.init(2), TRANSFORMER.batch(ROWS, 0)
    placed = split.place(params, TRANSFORMER.owners(params))

    def shard(s, p):
        by_column = NamedSharding(split.mesh(s), P(None, "model"))
        return p | {"mlp": p["mlp"] | {"up": jax.device_put(p["mlp"]["up"], by_column)}}

    placed["stages"] = [shard(s, p) for s, p in enumerate(placed["stages"])]
    got = mm.jit(gradient(TRANSFORMER, split, size=4, rows=ROWS))(placed, batch)
    assert_same(got, reference_gradient(TRANSFORMER, 2, ROWS, 4))
    assert_placed(split, got[1], TRANSFORMER.owners(params))
