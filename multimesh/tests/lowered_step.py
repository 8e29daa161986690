"""A step of two stages that ``python -m multimesh forecast --compile`` lowers: see test_forecast_command.py."""

import jax
import numpy as np
from jax.sharding import Mesh

import multimesh as mm


def lower(devices):
    front, back = (Mesh(half, ("data",)) for half in np.array(devices).reshape(2, -1))

    def step(params, x):
        hidden = mm.task(lambda w, x: jax.numpy.tanh(x @ w), "front", mesh=front)(params[0], x)
        return mm.task(lambda w, h: h @ w, "back", mesh=back)(params[1], hidden)

    params = [jax.ShapeDtypeStruct((1024, 1024), "bfloat16")] * 2
    return mm.jit(step).lower(params, jax.ShapeDtypeStruct((512, 1024), "bfloat16"))


def lower_nothing(devices):
    return devices


def fail(devices):
    raise ValueError(f"{len(devices)} are too few")
