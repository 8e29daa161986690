"""A parameter of a wrong type is refused at once, in one line that names it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import submeshes

import multimesh as mm

X = np.ones((8, 4), np.float32)
MESH = submeshes(1, (2, 2))[0]
DEVICES = np.array(jax.devices()[:4]).reshape(2, 2)
WRONG = (2.5, "nonsense", None, [1.5], {"a": 1}, (None,), object(), MESH, np.ones(3), True)
TASK, CALLBACK, LOOP = {"fn": jnp.sin, "name": "a"}, {"regex": "(a)", "callback": max}, {"fn": jnp.sin, "size": 2}
JIT, LAYOUT = {"fn": jnp.sin}, {"x": X}
TRAIN = {"fn": jnp.dot, "init_params": lambda: X.T, "initial_batch": X}

PARAMETERS = {  # function, its other arguments, parameter: which of the wrong values are right
    (mm.task, "fn"): (TASK | {"mesh": MESH}, {2}),
    (mm.task, "name"): (TASK | {"mesh": MESH}, {1, 2}),
    (mm.task, "mesh"): (TASK, {7}),
    (mm.task, "devices"): (TASK, ()),
    (mm.task, "device_axes"): (TASK | {"devices": DEVICES}, {2}),
    (mm.task, "logical_axes"): (TASK | {"mesh": MESH}, {2}),
    (mm.register_task, "regex"): ({"mesh": MESH}, {1}),
    (mm.register_task, "mesh"): ({"regex": "a"}, {7}),
    (mm.register_task, "devices"): ({"regex": "a"}, ()),
    (mm.register_task, "callback"): ({"regex": "(a)"}, {7}),  # a mesh can be called
    (mm.register_task, "dims"): (CALLBACK, {2}),
    (mm.register_task, "device_axes"): (CALLBACK, {2, 4}),
    (mm.register_task, "logical_axes"): (CALLBACK | {"device_axes": ("x",)}, {2, 4}),
    (mm.microbatch, "fn"): (LOOP, {7}),
    (mm.microbatch, "size"): (LOOP, {2}),  # None: rows that are cut already
    (mm.microbatch, "dim"): (LOOP, ()),
    (mm.microbatch, "argnum"): (LOOP, ()),
    (mm.microbatch, "schedule"): (LOOP, ()),
    (mm.jit, "fn"): (JIT, {2, 7}),
    (mm.jit, "donate_argnums"): (JIT, {2}),
    (mm.jit, "static_argnums"): (JIT, {2}),
    (mm.jit, "devices"): (JIT, {2}),
    (mm.with_sharding_constraint, "spec"): (LAYOUT, ()),
    (mm.parallelize, "fn"): (TRAIN, {7}),
    (mm.parallelize, "init_params"): (TRAIN, ()),
    (mm.parallelize, "devices"): (TRAIN, {2}),
    (mm.schedules.get, "schedule"): ({}, ()),
    (mm.schedules.custom, "rows"): ({}, ()),
    (mm.schedules.load, "path"): ({}, ()),
    (mm.schedules.validate, "table"): ({"submeshes": 2, "chunks": 1, "microbatches": 2}, ()),
}


@pytest.mark.parametrize(("call", "parameter"), PARAMETERS, ids=lambda x: getattr(x, "__name__", x))
def test_every_parameter_of_a_wrong_type(call, parameter):
    """At once, in one line that names the parameter or what it is."""
    others, right = PARAMETERS[call, parameter]
    for i, value in enumerate(WRONG):
        if i in right:
            continue
        with pytest.raises(mm.UsageError) as error:
            call(**(others | {parameter: value}))
        message = str(error.value)
        words = (parameter, "callable", "first argument", "expression", "schedule", "device", "PartitionSpec")
        assert any(word in message for word in words), (value, message)
        assert "\n" not in message, (value, message)
